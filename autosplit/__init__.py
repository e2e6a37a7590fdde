"""autosplit: split a PyTorch model over the devices of a machine, prove the plan, run it, show measured beside predicted.

The public names, each loaded on first use (PEP 562), so that ``import autosplit`` costs nothing and planning needs no torch.
"""

import importlib

# ``python -m autosplit`` puts the current folder first on the path, and ``__main__`` takes it off. Until then, a module that
# Python has not loaded would come from that folder, so ``typing`` is for type checkers alone.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from autosplit import errors as errors
    from autosplit import figures as figures
    from autosplit.annotation import annotate as annotate
    from autosplit.api import AutoResult as AutoResult
    from autosplit.api import auto as auto
    from autosplit.api import export as export
    from autosplit.api import measure as measure
    from autosplit.api import predict as predict
    from autosplit.api import run as run
    from autosplit.api import search as search
    from autosplit.api import trace as trace
    from autosplit.bundling.bundler import write_bundle as write_bundle
    from autosplit.bundling.openbundle import OpenBundle as OpenBundle
    from autosplit.bundling.openbundle import load_bundle as load_bundle
    from autosplit.clusters.cluster import Cluster as Cluster
    from autosplit.deploying.service import Service as Service
    from autosplit.deploying.setup import Budget as Budget
    from autosplit.deploying.setup import Setup as Setup
    from autosplit.devices.discovering import machine_for as machine_for
    from autosplit.errors import AutosplitError as AutosplitError
    from autosplit.errors import BackendError as BackendError
    from autosplit.errors import BundleError as BundleError
    from autosplit.errors import DeadlineError as DeadlineError
    from autosplit.errors import DeviceError as DeviceError
    from autosplit.errors import GraphError as GraphError
    from autosplit.errors import InfeasibleError as InfeasibleError
    from autosplit.errors import MissingExtraError as MissingExtraError
    from autosplit.errors import ModelError as ModelError
    from autosplit.errors import PlanError as PlanError
    from autosplit.errors import ProfileError as ProfileError
    from autosplit.errors import RefusedError as RefusedError
    from autosplit.errors import StageError as StageError
    from autosplit.errors import TraceError as TraceError
    from autosplit.errors import UsageError as UsageError
    from autosplit.errors import WorkerError as WorkerError
    from autosplit.generating.attention import KVCache as KVCache
    from autosplit.generating.generators import Generator as Generator
    from autosplit.generating.opening import open_generator as open_generator
    from autosplit.generating.sampling import Sampling as Sampling
    from autosplit.generation import generator as generator
    from autosplit.loadedplan import LoadedPlan as LoadedPlan
    from autosplit.loadedplan import load as load
    from autosplit.pages.writing import write_report as write_report
    from autosplit.placing.placed import Placed as Placed
    from autosplit.planning.explaining import explain as explain
    from autosplit.reports.runreport import RunReport as RunReport
    from autosplit.searching.candidates import SearchResult as SearchResult
    from autosplit.serving.hostmanager import HostManager as HostManager
    from autosplit.serving.pipelineconfig import PipelineConfig as PipelineConfig
    from autosplit.serving.session import Session as Session
    from autosplit.shapes.batching import rows_family as rows_family
    from autosplit.shapes.pipelines import open_pipeline as open_pipeline
    from autosplit.shapes.service import observe as observe
    from autosplit.sharedhost import Shared as Shared
    from autosplit.sharedhost import share as share
    from autosplit.splitjudge import judge as judge
    from autosplit.tracing.capturing import Traced as Traced
    from autosplit.tracing.devicecopies import copy_to as copy_to
    from autosplit.tracing.family import Family as Family
    from autosplit.values.constraints import Constraints as Constraints
    from autosplit.values.graph import Graph as Graph
    from autosplit.values.machine import Machine as Machine
    from autosplit.values.plan import Plan as Plan
    from autosplit.values.planfile import write_plan as write_plan
    from autosplit.values.profile import Profile as Profile
    from autosplit.values.sequences import Sequences as Sequences
    from autosplit.values.shapes import Traffic as Traffic
    from autosplit.values.shapes import read_traffic as read_traffic

_NAMES = {
    "annotation": "annotate",
    "clusters.cluster": "Cluster",
    "api": "AutoResult auto export measure predict run search trace",
    "bundling.bundler": "write_bundle",
    "bundling.openbundle": "OpenBundle load_bundle",
    "deploying.service": "Service",
    "deploying.setup": "Budget Setup",
    "devices.discovering": "machine_for",
    "errors": "AutosplitError BackendError BundleError DeadlineError DeviceError GraphError "
    "InfeasibleError MissingExtraError ModelError PlanError ProfileError RefusedError StageError TraceError UsageError "
    "WorkerError",
    "generating.attention": "KVCache",
    "generating.generators": "Generator",
    "generating.sampling": "Sampling",
    "generating.opening": "open_generator",
    "generation": "generator",
    "loadedplan": "LoadedPlan load",
    "shapes.batching": "rows_family",
    "shapes.pipelines": "open_pipeline",
    "shapes.service": "observe",
    "sharedhost": "Shared share",
    "splitjudge": "judge",
    "pages.writing": "write_report",
    "placing.placed": "Placed",
    "planning.explaining": "explain",
    "reports.runreport": "RunReport",
    "searching.loop": "SearchResult",
    "serving.hostmanager": "HostManager",
    "serving.pipelineconfig": "PipelineConfig",
    "serving.session": "Session",
    "tracing.capturing": "Traced",
    "tracing.devicecopies": "copy_to",
    "tracing.family": "Family",
    "values.constraints": "Constraints",
    "values.graph": "Graph",
    "values.machine": "Machine",
    "values.plan": "Plan",
    "values.planfile": "write_plan",
    "values.profile": "Profile",
    "values.sequences": "Sequences",
    "values.shapes": "Traffic read_traffic",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}
_MODULES = ("errors", "figures")

__all__ = sorted([*_HOME, *_MODULES])


def __getattr__(name: str) -> "Any":
    if name in _MODULES:
        return importlib.import_module(f"autosplit.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'autosplit' has no attribute {name!r}; the public names are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"autosplit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__

"""autosplit: split a PyTorch model over the devices of a machine, prove the plan, run it, show measured beside predicted.

The public names, each loaded on first use (PEP 562), so that ``import autosplit`` costs nothing and planning needs no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autosplit.api import auto as auto
    from autosplit.api import export as export
    from autosplit.api import load_plan as load_plan
    from autosplit.api import measure as measure
    from autosplit.api import run as run
    from autosplit.api import search as search
    from autosplit.api import trace as trace
    from autosplit.deploying.workspace import open_pipeline as open_pipeline
    from autosplit.devices.discovering import machine_for as machine_for
    from autosplit.planning.explaining import explain as explain
    from autosplit.reports.runreport import RunReport as RunReport
    from autosplit.values.constraints import Constraints as Constraints
    from autosplit.values.graph import Graph as Graph
    from autosplit.values.machine import Machine as Machine
    from autosplit.values.plan import Plan as Plan
    from autosplit.values.planfile import write_plan as write_plan
    from autosplit.values.profile import Profile as Profile

_HOME = {
    "auto": "api",
    "export": "api",
    "load_plan": "api",
    "measure": "api",
    "run": "api",
    "search": "api",
    "trace": "api",
    "Constraints": "values.constraints",
    "explain": "planning.explaining",
    "Graph": "values.graph",
    "Machine": "values.machine",
    "Plan": "values.plan",
    "Profile": "values.profile",
    "RunReport": "reports.runreport",
    "machine_for": "devices.discovering",
    "open_pipeline": "deploying.workspace",
    "write_plan": "values.planfile",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autosplit' has no attribute {name!r}; the public names are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"autosplit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__

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
    from autosplit.constraints import Constraints as Constraints
    from autosplit.deploying import open_pipeline as open_pipeline
    from autosplit.discovering import machine_for as machine_for
    from autosplit.explaining import explain as explain
    from autosplit.graph import Graph as Graph
    from autosplit.machine import Machine as Machine
    from autosplit.plan import Plan as Plan
    from autosplit.planfile import write_plan as write_plan
    from autosplit.profile import Profile as Profile
    from autosplit.runreport import RunReport as RunReport

_HOME = {
    "auto": "api",
    "export": "api",
    "load_plan": "api",
    "measure": "api",
    "run": "api",
    "search": "api",
    "trace": "api",
    "Constraints": "constraints",
    "explain": "explaining",
    "Graph": "graph",
    "Machine": "machine",
    "Plan": "plan",
    "Profile": "profile",
    "RunReport": "runreport",
    "machine_for": "discovering",
    "open_pipeline": "deploying",
    "write_plan": "planfile",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autosplit' has no attribute {name!r}; the public names are {', '.join(__all__)}")
    return getattr(importlib.import_module(f"autosplit.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return __all__

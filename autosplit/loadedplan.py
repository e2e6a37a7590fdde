"""load(): a plan file becomes an object that runs."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autosplit.annotation import annotate
from autosplit.api import Model, trace
from autosplit.arguments import checked
from autosplit.deploying.service import Service
from autosplit.devices.discovering import Devices, as_machine
from autosplit.errors import PlanError, UsageError, raise_faults
from autosplit.placing.placed import Placed
from autosplit.shapes.pipelines import open_pipeline
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family
from autosplit.tracing.importing import same_function
from autosplit.tracing.loading import Inputs
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import Plan
from autosplit.values.planfile import PlanFile, read_plan
from autosplit.values.profile import Profile

TRUSTED = ("transformers:", "autosplit.examples.")
"""Beginnings of specs that a plan file may name: nothing is fetched and no other code runs unless the user names it too."""


@dataclass(frozen=True)
class LoadedPlan:
    """A plan file with its model, traced, and its devices; ``family`` for a plan of several sizes, or of a generator.

    The plan of a generator runs by ``open_generator(loaded.family, loaded.plan, loaded.machine)``.
    """

    plan: Plan
    traced: Traced
    machine: Machine
    family: Family | None = None

    def open(self, profile: Profile | None = None) -> Service:
        """The plan as a running service. Raises: UsageError: it is the plan of a generator.

        ``profile`` as for ``open_pipeline``.
        """
        return open_pipeline(self.family or self.traced, self.plan, self.machine, profile=profile)

    def placed(self) -> Placed:
        """The model with each op on the device of its stage: ``annotate`` with the plan. ``placed().plan()`` goes back."""
        return annotate(self.traced, self.plan, machine=self.machine)

    def __repr__(self) -> str:
        return f"LoadedPlan({self.plan!r})"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()


@checked
def load(
    path: str | Path,
    model: Model | Traced | None = None,
    *,
    inputs: Inputs | None = None,
    devices: Devices | None = None,
    trust: bool = False,
    weights: bool = True,
) -> LoadedPlan:
    """A plan file as an object that runs: ``autosplit.load("plan.yaml").open()``.

    Args:
        path: the plan.yaml.
        model: the spec of the plan, if it names code of your own; or the module that the plan was made for.
        inputs: example inputs, for a module.
        devices: the devices, or their names, as a list or with commas between; by default those of the plan.
        trust, weights: as for ``trace``.
    Raises: PlanError: the file is not a plan, or was made for another model. UsageError: the call must name its model.
    """
    path = Path(path)
    file = read_plan(path)
    source, sequences, shapes = file.model, file.sequences, file.shapes
    named = _require_named(path, file, model) if model is None or isinstance(model, str | Path) else model
    if shapes is not None:
        raise_faults(PlanError, f"plan '{path}' is wrong", shapes.faults)
    asked: dict[str, Any] = {"inputs": inputs, "trust": trust, "values": source.values, "trust_backends": source.trusted}
    family: Family | None = None
    if isinstance(named, Traced):
        if sequences is not None or shapes is not None:
            kind = "for requests of several sizes" if sequences is None else "of a generator"
            raise UsageError(f"plan '{path}' is {kind}; give the module or its spec")
        traced = named
    elif sequences is not None:
        family = trace(named, generate=sequences, trust=trust, trust_backends=source.trusted)
    elif shapes is not None:
        dims = None if isinstance(named, str) else shapes.dims
        family = trace(named, sizes=shapes.sizes, shapes=dims, **asked).only(shapes.variants)
    elif isinstance(named, str):
        traced = trace(named, batch=file.microbatch, seq_len=source.seq_len, weights=weights, **asked)
    else:
        traced = trace(named, inputs=inputs)
    if family is not None:
        traced = family.variants[0]
    plan = file.resolve(traced.graph)
    plan = replace(plan, source=replace(plan.source, spec=traced.source.spec))  # not one that the file names beside a module
    machine = Machine.of(map(parse_device, file.devices)) if devices is None else as_machine(devices)
    return LoadedPlan(plan, traced, machine, family)


def _require_named(path: Path, file: PlanFile, model: str | Path | None) -> str:
    """The spec to trace: the plan's, in the words of the caller if the call names it.

    Raises: UsageError: the plan's model is a Python object, or not the model that was named, or code that was not named.
    """
    spec = file.model.spec
    made_for = f"plan '{path}' is for {f'model {spec!r}' if spec else 'a Python object'}"
    if model is None and not spec:
        raise UsageError(f"{made_for}, which a file cannot hold; use autosplit.load(path, module, inputs=...)")
    if model is None and not spec.startswith(TRUSTED):
        raise UsageError(f"{made_for}, code that autosplit does not run unasked; pass --model '{spec}' if you trust it")
    if model is not None and not same_function(str(model), spec):
        way_out = f"pass --model '{spec}'" if spec else "use autosplit.load(path, module, inputs=...)"
        raise UsageError(f"{made_for}, and not for '{model}'; {way_out}{', or no --model' * spec.startswith(TRUSTED)}")
    return str(model or spec)

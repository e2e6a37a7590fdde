"""Footprints: the measured memory of stages. Their plan runs some requests, and the kernel gives the peak of each worker."""

from collections import ChainMap
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import partial

from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import deploy, further_sizes
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.discovering import absent_devices
from autosplit.errors import AutosplitError
from autosplit.memory.account import Account
from autosplit.memory.stages import StageKey, footprints_of, key_of, stage_memories, uncapped
from autosplit.reports.results import StageStats
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family, as_family
from autosplit.values.machine import Machine, kind_of
from autosplit.values.plan import Plan, Stage
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint

NUM_WINDOWS = 2
"""Requests that run while a plan is measured, as a multiple of those in flight."""


@dataclass(frozen=True)
class Footprints:
    """The footprints of stages on one machine.

    Attributes:
        workspace: where stages are saved and prepared; None makes one for each plan.
        variants: the model at the other sizes that each worker holds too.
        known: for each graph, by its hash, the footprints of its stages.
    """

    machine: Machine
    workspace: Workspace | None = None
    variants: Sequence[Traced] = ()
    known: dict[str, dict[StageKey, Footprint]] = field(default_factory=dict)

    def of(self, traced: Traced) -> dict[StageKey, Footprint]:
        """The footprints of a model's stages."""
        return self.known.setdefault(traced.graph.hash, {})

    def account(self, traced: Traced, profile: Profile | None = None) -> Account:
        """The memory account of a model; footprints of the profile count where none are known here.

        It measures stages, unless a device is not here: then nothing is run.
        """
        known = ChainMap(self.of(traced), footprints_of(profile))
        run = None if absent_devices(self.machine) else partial(self.measure, traced)
        return Account(traced.graph, values_of(traced, self.variants), known, run)

    def note(self, traced: Traced, plan: Plan, workers: Iterable[StageStats]) -> None:
        """Keep the memory that the workers of a plan held. Of the replicas of a stage, the one that held most counts.

        A stage keeps its first footprint, so that a plan that was accepted with it is not refused later.
        """
        if plan.process == "caller":
            return
        fresh = dict[StageKey, Footprint]()
        stages = {stage.name: stage for stage in plan.stages}
        parts = dict(zip(stages, stage_memories(traced.graph, plan, values_of(traced, self.variants)), strict=True))
        for worker in sorted(workers, key=lambda worker: worker.held_bytes):
            if kind_of(worker.device) == "cpu" and worker.base_bytes:
                extra_bytes = max(0, worker.held_bytes - parts[worker.stage].held_bytes)
                fresh[key_of(plan, stages[worker.stage])] = Footprint(worker.base_bytes, worker.held_bytes, extra_bytes)
        known = self.of(traced)
        known.update({key: found for key, found in fresh.items() if key not in known})

    def measure(self, traced: Traced, plan: Plan) -> None:
        """Run the plan, unless the footprints of its stages on cores are known, or a stage is not on a device of this machine.

        The memory of a stage on an accelerator is counted, not measured, so beside one the plan runs only where a core has a cap.
        """
        devices = {device.name: device for device in self.machine.devices}
        used = [(stage, devices[name]) for stage in plan.stages for name in stage.devices if name in devices]
        foreign = not used or any((device.kind != "cpu" and not is_accelerator(device)) or device.host for _, device in used)
        cores = [(stage, device) for stage, device in used if device.kind == "cpu"]
        counted = len(cores) < len(used) and all(device.memory_bytes is None for _, device in cores)
        known = all(key_of(plan, stage) in self.of(traced) for stage, _ in cores)
        if foreign or counted or known or plan.process == "caller":
            return
        with ExitStack() as opened:
            workspace = self.workspace or opened.enter_context(Workspace())
            host = opened.enter_context(HostManager())
            opened.enter_context(suppress(AutosplitError, OSError))  # a run of the plan reports the failure
            engine = deploy(host, traced.graph.name, as_family(traced, self.variants), plan, uncapped(self.machine), workspace)
            for one in (traced, *self.variants):
                engine.run_many([one.example_inputs] * (NUM_WINDOWS * engine.max_in_flight))
            self.note(traced, plan, engine.stats().stages)

    def footprint(self, traced: Traced, plan: Plan, stage: Stage) -> Footprint | None:
        """The footprint of a stage; None if it was not measured."""
        return self.of(traced).get(key_of(plan, stage))


def footprints_for(
    model: Traced | Family, profile: Profile | None, machine: Machine, workspace: Workspace | None = None
) -> Footprints:
    """The footprints of stages of a model, with the programs of all sizes for which plans from a profile have some."""
    family, shapes = as_family(model), None if profile is None else profile.shapes
    backends = () if profile is None else [setting.backend for setting in profile.measured]
    family = family if shapes is None else family.only(shapes.variants)
    return Footprints(machine, workspace, further_sizes(family, shapes, backends))

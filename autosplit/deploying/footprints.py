"""Footprints: the measured memory of stages. Their plan runs some requests, and the kernel says what each worker held at most."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial

from autosplit.deploying.workspace import Workspace, deploy
from autosplit.errors import AutosplitError
from autosplit.memory.stages import count, least_base_bytes, stage_memories, with_footprints
from autosplit.planning.caps import Ask, plan_within_caps
from autosplit.reports.results import StageStats
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, Stage
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint, stage_key

NUM_WINDOWS = 2
"""Requests that run while a plan is measured, as a multiple of those in flight."""

_Key = tuple[str, str, int, str, str]


@dataclass(frozen=True)
class Footprints:
    """The footprints of stages on one machine.

    Attributes:
        machine: the devices.
        workspace: where stages are saved and prepared; None makes one for each plan.
        known: footprints by graph, backend, threads, precision and ``stage_key``.
    """

    machine: Machine
    workspace: Workspace | None = None
    known: dict[_Key, Footprint] = field(default_factory=dict)

    def note(self, traced: Traced, plan: Plan, workers: Iterable[StageStats]) -> None:
        """Keep what the workers of a plan held, for stages that are not known: that of the replica that held most.

        What was measured first stays, so that a plan that was accepted with it is not refused later.
        """
        if plan.process == "caller":
            return
        fresh = dict[_Key, Footprint]()
        stages = {stage.name: stage for stage in plan.stages}
        parts = dict(zip(stages, stage_memories(traced.graph, plan, values_of(traced)), strict=True))
        for worker in sorted(workers, key=lambda worker: worker.held_bytes):
            if worker.device.startswith("cpu") and worker.base_bytes:
                part = parts[worker.stage]
                extra_bytes = max(0, worker.held_bytes - part.held_bytes)
                found = Footprint(worker.base_bytes, worker.held_bytes, extra_bytes)
                fresh[_key(traced, plan, stages[worker.stage])] = found
        self.known.update({key: found for key, found in fresh.items() if key not in self.known})

    def measure(self, traced: Traced, plan: Plan) -> None:
        """Run the plan, unless the footprint of each of its stages is known, or one is not on CPU cores of this machine."""
        devices = {device.name: device for device in self.machine.devices}
        used = [devices[name] for stage in plan.stages for name in stage.devices if name in devices]
        foreign = not used or any(device.kind != "cpu" or device.host for device in used)
        if foreign or plan.process == "caller" or all(_key(traced, plan, stage) in self.known for stage in plan.stages):
            return
        free = replace(self.machine, devices=tuple(replace(device, memory_bytes=None) for device in self.machine.devices))
        with ExitStack() as opened:
            workspace = self.workspace or opened.enter_context(Workspace())
            host = opened.enter_context(HostManager())
            opened.enter_context(suppress(AutosplitError, OSError))  # where the plan is run, the failure is told
            engine = deploy(host, traced.graph.name, traced, plan, free, workspace)
            engine.run_many([traced.example_inputs] * (NUM_WINDOWS * engine.window))
            self.note(traced, plan, engine.stats().stages)

    def plan_within_caps(self, ask: Ask, traced: Traced, profile: Profile, backends: Sequence[str]) -> Plan:
        """The best plan that ``ask`` gives on the machine whose stages, measured, are within the caps; see ``planning.caps``."""
        base_bytes = least_base_bytes(self.into(profile, traced), backends)
        measured = partial(self.measured, traced, profile)
        return plan_within_caps(ask, self.machine, backends, traced.graph, measured, base_bytes)

    def measured(self, traced: Traced, profile: Profile, plan: Plan) -> Plan:
        """The plan with the memory of its stages, measured where they can be run here."""
        self.measure(traced, plan)
        return self.counted(traced, plan, profile)

    def counted(self, traced: Traced, plan: Plan, profile: Profile | None) -> Plan:
        """The plan with the bytes that its stages take beside weights, measured where that is known."""
        known = self.into(profile, traced) if profile is not None else None
        return count(traced.graph, plan, values_of(traced), known)

    def footprint(self, traced: Traced, plan: Plan, stage: Stage) -> Footprint | None:
        """What a worker of the stage held, if it was measured."""
        return self.known.get(_key(traced, plan, stage))

    def into(self, profile: Profile, traced: Traced) -> Profile:
        """The profile with all footprints of the model in its precision."""
        for (graph_hash, backend, threads, precision, key), found in self.known.items():
            if (graph_hash, precision) == (traced.graph.hash, profile.precision):
                profile = with_footprints(profile, backend, threads, {key: found})
        return profile


def _key(traced: Traced, plan: Plan, stage: Stage) -> _Key:
    return traced.graph.hash, stage.backend, stage.threads, stage.precision or plan.precision, stage_key(stage.ops, stage.streams)

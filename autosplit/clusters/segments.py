"""Segments: the stages of a plan, cut where they change hosts, and the values that cross each cut.

::

    stages      stage0 on node-a | stage1 on node-a | stage2 on node-b | stage3 on node-b and on node-c
    segments    0: stage0, stage1 on node-a         | 1: stage2        | 2: stage3 on either, requests in turn

Each host of a segment runs it as one pipeline. It hands on every value that a later segment reads, also a value that
only passes through.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from autosplit.errors import PlanError
from autosplit.memory.slots import Workers, in_flight
from autosplit.running.modules import StageFolder
from autosplit.running.stage import StagePlacement
from autosplit.tracing.tensorspec import TensorSpec

DRIVER = "driver"
"""The name of this machine among the hosts that send requests and take answers."""

IN_TRANSIT = 2
"""Slots of a segment beyond its pipeline's, for requests that come and answers that go."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive stages with the same hosts; a host runs its replicas of them as one pipeline.

    Attributes:
        name: no two segments of a cluster share one.
        stages: in topological order, with the devices of all hosts, or of one host.
        hosts: the host of each replica of its stages; request ``k`` runs on ``hosts[k % len(hosts)]``.
        inputs: the values that come in, with their layouts for each variant.
        outputs: the values that go on, with their layouts for each variant.
        num_slots: most requests in the segment on one host.
        sources: the hosts that send requests, each over one connection.
        next_name: name of the next segment; empty for the last one.
        route: the hosts of the next segment; request ``k`` goes to ``route[k % len(route)]``. Empty for the driver.
    """

    name: str
    stages: tuple[StagePlacement, ...]
    hosts: tuple[str, ...]
    inputs: tuple[tuple[TensorSpec, ...], ...]
    outputs: tuple[tuple[TensorSpec, ...], ...]
    num_slots: int
    sources: tuple[str, ...] = (DRIVER,)
    next_name: str = ""
    route: tuple[str, ...] = ()

    def on(self, host: str) -> "Segment":
        """The segment with the replicas of one host, whose devices have the names that the host itself uses."""
        stages = [
            replace(stage, devices=tuple(device.on_host("") for device in stage.devices if device.host == host))
            for stage in self.stages
        ]
        return replace(self, stages=tuple(stages))

    @property
    def folders(self) -> set[Path]:
        """The folders of its stages. Raises: PlanError: a module is none, and cannot run on another host."""
        return {_saved(one).folder for stage in self.stages for one in stage.at_each_size()}

    def moved(self, place: Callable[[Path], Path]) -> "Segment":
        """The segment with its folders in other places."""

        def moved(stage: StagePlacement) -> StagePlacement:
            modules = [replace(_saved(one), folder=place(_saved(one).folder)) for one in stage.at_each_size()]
            variants = [replace(one, module=module) for one, module in zip(stage.variants, modules[1:], strict=True)]
            return replace(stage, module=modules[0], variants=tuple(variants))

        return replace(self, stages=tuple(map(moved, self.stages)))


def _saved(stage: StagePlacement) -> StageFolder:
    if not isinstance(stage.module, StageFolder):
        raise PlanError(f"stage '{stage.name}' is {type(stage.module).__name__}, and only stage folders run on other hosts")
    return stage.module


def segments_of(
    stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str], name: str = "segment"
) -> list[Segment]:
    """The segments of stages in topological order.

    Args:
        stages: on devices of hosts.
        inputs: names of the pipeline's inputs.
        outputs: names of the pipeline's outputs.
        name: the segments are called by it and their position.
    Raises: PlanError: an input that is only an output too, so that no stage knows its layout; or a stage on this machine.
    """
    here = [stage.name for stage in stages if not all(device.host for device in stage.devices)]
    if here:
        raise PlanError(f"stage '{here[0]}' is on a device without a host; in a cluster each device has one, as in node-a/cpu:0")
    runs = [tuple(run) for _, run in groupby(stages, key=lambda stage: tuple(device.host for device in stage.devices))]
    hosts = [tuple(device.host for device in run[0].devices) for run in runs]
    sizes = zip(*(stage.at_each_size() for stage in stages), strict=True)
    layouts = [{spec.name: spec for stage in one for spec in (*stage.outputs, *stage.inputs)} for one in sizes]
    unread = [name for name in outputs if name not in layouts[0]]
    if unread:
        raise PlanError(f"output '{unread[0]}' is an input that no stage reads, which a pipeline over hosts does not carry")
    known = [name for name in dict.fromkeys(inputs) if name in layouts[0]]
    found = []
    for number, run in enumerate(runs):
        made = [spec.name for stage in run for spec in stage.outputs]
        later = {spec.name for stages in runs[number + 1 :] for stage in stages for spec in stage.inputs} | set(outputs)
        is_last = number == len(runs) - 1
        on = list(dict.fromkeys(outputs if is_last else (value for value in (*known, *made) if value in later)))
        found.append(
            Segment(
                name=f"{name}.{number}",
                stages=run,
                hosts=hosts[number],
                inputs=tuple(tuple(specs[value] for value in known) for specs in layouts),
                outputs=tuple(tuple(specs[value] for value in on) for specs in layouts),
                num_slots=_num_slots(run, hosts[number]),
                sources=hosts[number - 1] if number else (DRIVER,),
                next_name="" if is_last else f"{name}.{number + 1}",
                route=() if is_last else hosts[number + 1],
            )
        )
        known = on
    return found


def _num_slots(stages: Sequence[StagePlacement], hosts: Sequence[str]) -> int:
    """Requests that one host may have of a segment: enough to keep its workers at work, and some on their way."""
    at_work, _ = in_flight([Workers(len(stage.devices), stage.streams, stage.queue_depth) for stage in stages], host_bytes=0)
    return -(-at_work // len(set(hosts))) + IN_TRANSIT

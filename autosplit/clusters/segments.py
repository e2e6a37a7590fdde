"""Segments: the stages of a plan, cut where they change hosts, and the values that cross each cut.

::

    stages      stage0 on node-a | stage1 on node-a | stage2 on node-b | stage3 on node-b and on node-c
    segments    0: stage0, stage1 on node-a         | 1: stage2        | 2: stage3 on either, requests in turn

A segment is a pipeline of its own on each of its hosts. It hands on every value that a later segment reads, also a value that
only passes through.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from autosplit.errors import PlanError
from autosplit.running.wiring import StagePlacement
from autosplit.tracing.tensorspec import TensorSpec


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive stages with the same hosts.

    Attributes:
        stages: in topological order, with the devices of all hosts.
        hosts: the host of each replica of its stages; request ``k`` runs on ``hosts[k % len(hosts)]``.
        inputs: the values that come in, with their layouts.
        outputs: the values that go on, with their layouts.
    """

    stages: tuple[StagePlacement, ...]
    hosts: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    def on(self, host: str) -> tuple[StagePlacement, ...]:
        """The stages with the replicas of one host, whose devices have the names that the host itself uses."""
        return tuple(
            replace(stage, devices=tuple(device.on_host("") for device in stage.devices if device.host == host))
            for stage in self.stages
        )


def segments_of(stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str]) -> list[Segment]:
    """The segments of stages in topological order.

    Args:
        stages: on devices of hosts.
        inputs: names of the pipeline's inputs.
        outputs: names of the pipeline's outputs.
    Raises: PlanError: an input that is only an output too, so that no stage knows its layout; or a stage on this machine.
    """
    here = [stage.name for stage in stages if not all(device.host for device in stage.devices)]
    if here:
        raise PlanError(f"stage '{here[0]}' is on a device without a host; in a cluster each device has one, as in node-a/cpu:0")
    runs = [tuple(run) for _, run in groupby(stages, key=lambda stage: tuple(device.host for device in stage.devices))]
    specs = {spec.name: spec for stage in stages for spec in (*stage.outputs, *stage.inputs)}
    unread = [name for name in outputs if name not in specs]
    if unread:
        raise PlanError(f"output '{unread[0]}' is an input that no stage reads, which a pipeline over hosts does not carry")
    known = [name for name in dict.fromkeys(inputs) if name in specs]
    found = []
    for number, run in enumerate(runs):
        made = [spec.name for stage in run for spec in stage.outputs]
        later = {spec.name for stages in runs[number + 1 :] for stage in stages for spec in stage.inputs} | set(outputs)
        is_last = number == len(runs) - 1
        on = list(outputs) if is_last else [name for name in (*known, *made) if name in later]
        on = list(dict.fromkeys(on))
        hosts = tuple(device.host for device in run[0].devices)
        found.append(Segment(run, hosts, tuple(specs[name] for name in known), tuple(specs[name] for name in on)))
        known = on
    return found

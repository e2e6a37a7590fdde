"""Connect stages: placements become channels between stages, and each channel has rings between their replicas.

Requests have numbers (see ``inflight``). Replica ``i`` of a stage with ``r`` replicas takes the requests with
``number % r == i``. So the ring of a request between two stages follows from its number, and every worker takes its requests in
order. Every request puts exactly one token on one ring of each channel, even if it fails. With bounded rings that is a
deterministic process network (Kahn 1974), in which the oldest request can always advance.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from autosplit.errors import DeviceError, PlanError, listed, raise_faults
from autosplit.memory.slots import HOST, Workers, at_once, in_flight, num_slots
from autosplit.running.stage import StagePlacement
from autosplit.tracing.tensorspec import TensorSpec

Replan = Callable[[str], Sequence[StagePlacement]]
"""Finds the stages of the same model without a device or host that is lost. Raises: AutosplitError: there are none."""


@dataclass(frozen=True, slots=True)
class Channel:
    """The values that one stage (or the host) hands to another, and the rings that carry them.

    ``layouts`` holds the layouts of the values for each variant. ``source_index`` and ``target_index`` are positions in the
    source's outputs and in the target's inputs. The host's outputs are the pipeline's inputs. The host reads values by name, so
    its ``target_index`` is empty.
    """

    source: int
    target: int
    layouts: tuple[tuple[TensorSpec, ...], ...]
    source_index: tuple[int, ...]
    target_index: tuple[int, ...]
    source_replicas: int
    target_replicas: int
    num_slots: int

    @property
    def every(self) -> int:
        """Each ring carries each ``every``-th request."""
        return math.lcm(self.source_replicas, self.target_replicas)

    def pairs(self) -> list[tuple[int, int]]:
        """The replicas (of source, of target) that share a ring; request k is on ring ``k % every``."""
        return [(first % self.source_replicas, first % self.target_replicas) for first in range(self.every)]


@dataclass(frozen=True)
class Wiring:
    """The stages of a pipeline with their channels.

    At most ``window`` requests are in flight, or ``most_in_flight`` while small ones come fast; rings have room for as many.
    """

    stages: tuple[StagePlacement, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    channels: tuple[Channel, ...]
    window: int
    most_in_flight: int
    input_layouts: tuple[dict[str, TensorSpec], ...] = ({},)
    """For each variant the layouts of the inputs that a stage reads."""

    @property
    def input_specs(self) -> dict[str, TensorSpec]:
        """The layouts of the inputs that a stage reads, at the largest sizes."""
        return self.input_layouts[0]

    @property
    def num_lanes(self) -> int:
        """The number of replicas, if all stages have the same number; else 1 (see ``inflight``)."""
        counts = {len(stage.devices) for stage in self.stages}
        return counts.pop() if len(counts) == 1 else 1

    def workers(self) -> Iterator[tuple[int, int]]:
        """(stage, replica) of each worker, in order."""
        return ((number, replica) for number, stage in enumerate(self.stages) for replica in range(len(stage.devices)))


def wire(stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str], window: int | None = None) -> Wiring:
    """Connect the stages by the names of their values.

    Args:
        stages: in topological order.
        inputs: names of the pipeline's inputs, in the order in which a request gives them.
        outputs: names of the pipeline's outputs: values of stages or inputs; a name may stand twice.
        window: the most requests in flight; by default enough to keep every replica at work and every ring half full,
            and up to ``BURST`` if they are small and come fast.
    Raises: PlanError: every value that no stage makes, that is made twice or too late, and every wrong setting.
    """
    inputs, outputs = listed("inputs", inputs, str), listed("outputs", outputs, str)
    raise_faults(PlanError, "the stages do not fit together", faults_of(stages, inputs, outputs))
    at_work = [at_once((device.kind for device in stage.devices), stage.streams) for stage in stages]
    workers = [Workers(len(one.devices), busy, one.queue_depth) for one, busy in zip(stages, at_work, strict=True)]
    if window is None:
        window, most = in_flight(workers, _host_bytes(stages, inputs, outputs))
    elif window < 1:
        raise PlanError(f"the number of requests in flight must be at least 1, but is {window}")
    else:
        most = window
    places = {name: (HOST, position) for position, name in enumerate(inputs)}
    levels: list[int] = []
    channels: list[Channel] = []

    def connect(source: int, target: int, layouts: Iterable[Iterable[TensorSpec]], made: list[int], read: list[int]) -> None:
        senders, receivers = (1 if number == HOST else workers[number].replicas for number in (source, target))
        slots = num_slots(workers, source, target, levels, most)
        channels.append(Channel(source, target, tuple(map(tuple, layouts)), tuple(made), tuple(read), senders, receivers, slots))

    for target, stage in enumerate(stages):
        sources = {places[spec.name][0] for spec in stage.inputs} or {HOST}
        levels.append(1 + max((levels[source] for source in sources if source != HOST), default=-1))
        for source in sorted(sources):
            wanted = [position for position, spec in enumerate(stage.inputs) if places[spec.name][0] == source]
            made = [places[stage.inputs[position].name][1] for position in wanted]
            connect(source, target, ([one.inputs[position] for position in wanted] for one in stage.at_each_size()), made, wanted)
        places |= {spec.name: (target, position) for position, spec in enumerate(stage.outputs)}
    sending = {channel.source for channel in channels}
    for source, stage in enumerate(stages):
        drained = [position for position, spec in enumerate(stage.outputs) if spec.name in outputs]
        if drained or source not in sending:
            connect(source, HOST, ([one.outputs[position] for position in drained] for one in stage.at_each_size()), drained, [])
    sizes = zip(*(stage.at_each_size() for stage in stages), strict=True)
    read = tuple({spec.name: spec for stage in one for spec in stage.inputs if spec.name in inputs} for one in sizes)
    return Wiring(tuple(stages), tuple(inputs), tuple(outputs), tuple(channels), window, most, read)


def planned_anew(what: str, stages: Sequence[StagePlacement]) -> str:
    """A sentence on a loss, and on where the stages are from now on."""
    placed = ", ".join(f"{stage.name} on {'+'.join(device.name for device in stage.devices)}" for stage in stages)
    return f"{what}; planned anew: {placed}"


def require_here(wiring: Wiring) -> None:
    """Raises: DeviceError: stages are on devices of a cluster's hosts, and the caller runs stages on this machine."""
    names = dict.fromkeys(device.name for stage in wiring.stages for device in stage.devices if device.host)
    if names:
        raise DeviceError(
            f"devices {', '.join(names)} are on hosts of a cluster; give the cluster (--cluster, or hosts=Cluster(...)), "
            "or make a plan for this machine"
        )


def _host_bytes(stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str]) -> int:
    """Bytes that the host writes and reads for one request."""
    fed = sum(spec.num_bytes for stage in stages for spec in stage.inputs if spec.name in inputs)
    return fed + sum(spec.num_bytes for stage in stages for spec in stage.outputs if spec.name in outputs)


def faults_of(stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str]) -> list[str]:
    """A sentence for each stage, value and output that keeps these stages from being a pipeline."""
    makers = {spec.name: number for number, stage in enumerate(stages) for spec in stage.outputs}
    names = [stage.name for stage in stages]
    faults = [] if stages else ["there are no stages"]
    faults += [f"{count} stages are called '{name}'" for name, count in Counter(names).items() if count > 1]
    for number, stage in enumerate(stages):
        faults += stage.faults()
        made = Counter(spec.name for spec in stage.outputs)
        faults += [
            f"value '{name}' is made twice, once by stage '{stage.name}'"
            for name, count in made.items()
            if name in inputs or makers[name] != number or count > 1
        ]
    faults += _input_faults(stages, inputs, makers)
    known = {*inputs, *makers}
    faults += [f"output '{name}' is not an input, and no stage makes it" for name in outputs if name not in known]
    return faults + _variant_faults(stages, inputs, outputs, faults)


def _variant_faults(
    stages: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str], known: Sequence[str]
) -> list[str]:
    """The faults that stages have at other sizes than the largest."""
    counts = {stage.name: len(stage.variants) for stage in stages}
    if len(set(counts.values())) > 1:
        listed_counts = ", ".join(f"'{name}' {count}" for name, count in counts.items())
        return [f"stages have different numbers of variants: {listed_counts}; each size needs a variant of every stage"]
    at_sizes = [stage.at_each_size()[1:] for stage in stages]
    return [
        f"variant {number}: {fault}"
        for number, one in enumerate(zip(*at_sizes, strict=True), 1)
        for fault in faults_of(one, inputs, outputs)
        if fault not in known
    ]


def _input_faults(stages: Sequence[StagePlacement], inputs: Sequence[str], makers: dict[str, int]) -> Iterator[str]:
    """The faults of values that stages read. An input of the pipeline is one tensor for all stages that read it."""
    first: dict[str, tuple[str, TensorSpec]] = {}
    for number, stage in enumerate(stages):
        for spec in stage.inputs:
            subject, maker = f"stage '{stage.name}' reads '{spec.name}'", makers.get(spec.name)
            if spec.name in inputs:
                other, known = first.setdefault(spec.name, (f"stage '{stage.name}' reads", spec))
            elif maker is None:
                yield f"{subject}, which is not an input, and no stage makes it"
                continue
            elif maker >= number:
                yield f"{subject} from stage '{stages[maker].name}', which does not come before it"
                continue
            else:
                other = f"stage '{stages[maker].name}' makes"
                known = next(made for made in stages[maker].outputs if made.name == spec.name)
            if (known.shape, known.dtype) != (spec.shape, spec.dtype):
                yield f"{subject} as {spec.dtype} {list(spec.shape)}, and {other} it as {known.dtype} {list(known.shape)}"

"""StagePlacement: one stage of a pipeline, the same value from the plan to the worker.

Each border adds to it, and copies none of its fields::

    plan         Stage: ops, names of devices, backend
    deploying    StagePlacement: the module with these ops, its tensors, its devices
    worker       messages.WorkerConfig: the stage, a replica, its rings
    host         clusters.segments.Segment: consecutive stages, and where their answers go
"""

import gc
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING

import torch

from autosplit.devices.limits import usable_threads
from autosplit.errors import PlanError
from autosplit.running.modules import Module, is_compiled
from autosplit.tracing.tensorspec import TensorSpec, spec_fault, zeros
from autosplit.values.machine import MAX_ON_CORE, Device
from autosplit.values.plan import MAX_QUEUE_DEPTH, QUEUE_DEPTH

if TYPE_CHECKING:
    from autosplit.backends.base import Runnable

HANG_S = 300.0
"""Seconds after which a request has hung, unless its stage says otherwise."""

_WARM_UP_PASSES = 2
"""Their number depends on no clock: equal stages then leave equal blocks in the heap, also on a busy machine."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A stage at other sizes: the same ops and weights, and values of other shapes.

    Attributes:
        module: loaded by each worker beside the stage's own, over the same weights.
        inputs: the values it reads, with the names and dtypes of the stage's.
        outputs: the values it makes, with the names and dtypes of the stage's.
    """

    module: Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """A stage with its devices.

    Attributes:
        name: for messages and reports.
        module: loaded by each worker.
        inputs: the values it reads, in the module's order; named as graph inputs or as outputs of other stages.
        outputs: the values it makes, in the module's order.
        devices: one for each replica; a device may occur twice, and may hold other stages.
        threads: threads of each replica; the number of the device's cores by default.
        queue_depth: slots of each ring that leads to this stage.
        hang_s: seconds after which a request has hung, so that its worker is killed and replaced; None for no limit.
        streams: requests that each replica works on at once, each on its share of the threads; an accelerator chooses for itself.
        memory_bytes: device name to the bytes that the stage takes there, as its plan counts them; on other devices it takes the
            most of these, and without them its weights.
        variants: the stage at other sizes: variant 1 and so on. The stage's own module and values are variant 0, the largest.
            All stages of a pipeline have the same sizes in the same order.
    """

    name: str
    module: Module
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    devices: tuple[Device, ...]
    threads: int | None = None
    queue_depth: int = QUEUE_DEPTH
    hang_s: float | None = HANG_S
    streams: int = 1
    memory_bytes: Mapping[str, int] = field(default_factory=dict)
    variants: tuple[Variant, ...] = ()

    def at_each_size(self) -> "tuple[StagePlacement, ...]":
        """The stage once for each variant, from variant 0 on, each without other variants."""
        own = replace(self, variants=()) if self.variants else self
        return own, *(replace(own, module=one.module, inputs=one.inputs, outputs=one.outputs) for one in self.variants)

    def faults(self) -> Iterator[str]:
        """A sentence for each setting that no stage can have."""
        if not self.devices:
            yield f"stage '{self.name}' is on no device"
        for device, count in Counter(self.devices).items():
            if count > MAX_ON_CORE:
                limits = f"and at most {MAX_ON_CORE} are allowed; name more devices"
                yield f"stage '{self.name}' has {count} replicas on '{device.name}', {limits}"
            if isinstance(self.threads, int) and 0 < len(device.cores) < self.threads:
                cores = f"{len(device.cores)} core{'s' * (len(device.cores) != 1)}"
                yield f"stage '{self.name}' has threads={self.threads}, and '{device.name}' has {cores}"
        if not 1 <= self.queue_depth <= MAX_QUEUE_DEPTH:
            limits = f"it must be at least 1 and at most {MAX_QUEUE_DEPTH}"
            yield f"stage '{self.name}' has a queue depth of {self.queue_depth}; {limits}"
        for what, value, kind in (("threads", self.threads, int), ("streams", self.streams, int), ("hang_s", self.hang_s, Real)):
            if value is not None and not (isinstance(value, kind) and value > 0):
                yield f"stage '{self.name}' has {what}={value!r}; it must be more than 0"
        if callable(self.module):
            way_out = "give a StageFolder, a PythonFunction, or on null devices a LocalFunction"
            yield f"stage '{self.name}' has a {type(self.module).__name__} as its module; {way_out}"
        yield from filter(None, map(spec_fault, (*self.inputs, *self.outputs)))
        for number, one in enumerate(self.variants, 1):
            for side, own, other in (("reads", self.inputs, one.inputs), ("makes", self.outputs, one.outputs)):
                kinds, found = ([(spec.name, spec.dtype) for spec in specs] for specs in (own, other))
                if kinds != found:
                    yield f"stage '{self.name}' {side} {kinds}, and at the sizes of variant {number} {found}"

    def needs_bytes(self, device: str) -> int | None:
        """The bytes that the stage takes on a device; None if they are not known."""
        return self.memory_bytes.get(device, max(self.memory_bytes.values(), default=self.module.num_bytes))

    def num_threads(self, replica: int) -> int:
        """The threads of a replica."""
        return self.threads or usable_threads(self.devices[replica].cores)

    def load_each_size(self, replica: int, *, shared: bool) -> "list[tuple[StagePlacement, Runnable, bool]]":
        """Load a replica in this process: the stage at each size, its function, and whether that is new, as sizes may share one.

        ``shared``: others compute on its cores. Raises: BackendError: it cannot be loaded.
        """
        placed = self.num_threads(replica), self.devices[replica].name, shared, self.streams
        found: list[tuple[StagePlacement, Runnable, bool]] = []
        sizes = self.at_each_size()
        has_several = any(one.module != self.module for one in sizes)
        for one in sizes:
            known = next((run for other, run, _ in found if other.module == one.module), None)
            with torch.inference_mode(False):
                found.append((one, one.module.load(*placed) if known is None else known, known is None))
            if has_several and known is None:
                gc.collect()  # a graph that was read is a ring of nodes, whose memory the next one takes
        return found

    def warm_up(self, run: "Runnable") -> None:
        """Run a few passes of a loaded replica on zeros; if one raises, the first request will show it."""
        if self.module.warms_up:
            inputs = [zeros(spec) for spec in self.inputs]
            try:
                with torch.inference_mode():
                    for _ in range(_WARM_UP_PASSES):
                        run(inputs)
            except Exception:
                return

    def refuse_isolated(self) -> None:
        """Raises: PlanError: the stage would run in the caller's process, and may run in worker processes only."""
        if self.module.isolated:
            raise PlanError(
                f"stage '{self.name}' comes from a file and runs in torch: without trust in the maker of the file it runs in a "
                "worker process, not in the caller's; place it on CPU cores or an accelerator, or give trust=True"
            )

    def failure_text(self, replica: int, number: int, inputs: Sequence[torch.Tensor], trace: str) -> str:
        """The text of a StageError: the stage, the request ``number``, the op if it is known, and the cause.

        The traceback follows, unless a compiled stage failed or a device is full: its frames are none of the user's.
        """
        try:
            op = self.module.failing_op(inputs)
        except Exception:
            op = None
        place = f"replica {replica} of {len(self.devices)}, device '{self.devices[replica].name}'"
        where = f" while executing {op}" if op else ""
        cause = trace.strip().splitlines()[-1]
        text = f"stage '{self.name}' ({place}) failed on request {number}{where}: {cause}"
        if torch.OutOfMemoryError.__name__ in cause.partition(":")[0]:
            return f"{text}; end what else uses that device, or place fewer ops there"
        return text if is_compiled(self.module.kind) else f"{text}\nThe traceback follows.\n{trace}"

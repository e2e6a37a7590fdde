"""Run a stage on an accelerator whose memory its weights do not fit: parts of them are copied there while other ops compute.

``values.residency`` says which ops are parts, and draws the order of copies. The weights of a part lie one after the other in
pinned memory of the host, and each has a fixed place in one of two buffers on the device. Two calls in the stage's graph keep the
order: before the op of a part the queue that computes waits for its copy, and after the op the next copy into its buffer begins.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import fx

from autosplit.backends.base import Runnable
from autosplit.compat.torchparts import OpOverload, schema_of
from autosplit.devices.accelerators import Accelerator, Queue
from autosplit.errors import BackendError
from autosplit.memory.lives import aligned
from autosplit.tables import bytes_text
from autosplit.tracing.flattening import is_op
from autosplit.tracing.splitting import StageProgram, place_stage
from autosplit.tracing.tensorspec import spec_of, storage_bytes, view_storage
from autosplit.values.residency import NUM_BUFFERS, parts_of


class WeightStream:
    """The copies of the parts of a stage, in the order in which ops need them.

    Args:
        parts: the weights of each part, by name.
        following: the part that comes into the buffer of a part after it.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        computing: Queue,
        parts: list[dict[str, torch.Tensor]],
        following: Callable[[int], int],
    ) -> None:
        self._accelerator, self._computing, self._copying = accelerator, computing, accelerator.queue()
        self._following, self._next = following, 0
        self._there = [accelerator.event() for _ in parts]
        self._read = [accelerator.event() for _ in parts]
        specs = [[replace(spec_of(name, tensor), offset_bytes=0) for name, tensor in part.items()] for part in parts]
        sizes = [[aligned(storage_bytes(spec)) for spec in part] for part in specs]
        self._staged = [accelerator.staging(sum(part)) for part in sizes]
        most = [max((sum(part) for part in sizes[buffer::NUM_BUFFERS]), default=0) for buffer in range(NUM_BUFFERS)]
        buffers = [accelerator.empty(size) if size else None for size in most]
        self._memory: list[torch.Tensor] = []
        self.weights: dict[str, torch.Tensor] = {}
        """Each weight in its place on the device."""
        for number, (part, staged) in enumerate(zip(parts, self._staged, strict=True)):
            buffer = buffers[number % NUM_BUFFERS]
            assert buffer is not None  # it is as large as the largest of its parts
            start = 0
            for spec, size, tensor in zip(specs[number], sizes[number], part.values(), strict=True):
                view_storage(staged[start : start + size], spec).copy_(tensor.detach())
                self.weights[spec.name] = view_storage(buffer[start : start + size], spec)
                start += size
            self._memory.append(buffer[:start])
        self._fill()

    def begin(self) -> None:
        """Before the first op: bring the first parts, if the request before this one ended early by a failure."""
        if self._next:
            self._next = 0
            self._fill()

    def arrive(self, part: int) -> None:
        """Let the op of a part wait for its weights."""
        self._there[part].hold(self._computing)
        self._next = part + 1

    def leave(self, part: int) -> None:
        """After the op of a part, and all that read its weights: let the next part come into the buffer."""
        self._copy(self._following(part))
        self._next %= len(self._memory)

    def _fill(self) -> None:
        """Bring the first part of each buffer."""
        for part in range(min(NUM_BUFFERS, len(self._memory))):
            self._copy(part)

    def _copy(self, part: int) -> None:
        """Copy a part after all that computes now."""
        self._read[part].record(self._computing)
        self._read[part].hold(self._copying)
        memory, staged = self._memory[part], self._staged[part]

        def copy() -> None:
            memory.copy_(staged, non_blocking=True)

        self._accelerator.enqueue(self._copying, copy)
        self._there[part].record(self._copying)


def streamed_runnable(program: StageProgram, resident_bytes: int, accelerator: Accelerator, computing: Queue) -> Runnable:
    """The stage on an accelerator with at most ``resident_bytes`` of weights there, two buffers among them.

    Raises: BackendError: the bytes have no room for two buffers, or a view of streamed weights is read long after their op.
    """
    ops = list(filter(is_op, program.module.graph.nodes))
    own = [_own_weights(op) for op in ops]
    sizes = [sum(program.weights[name].nbytes for name in names) for names in own]
    parts = parts_of(sizes, program.weight_bytes - sum(sizes), resident_bytes)
    if parts is None:
        raise BackendError(
            f"stage '{program.name}' cannot be streamed: {bytes_text(resident_bytes)} on the device have no room for two "
            f"buffers; its largest op has {bytes_text(max(sizes))} of weights"
        )
    weights = [{name: program.weights[name] for name in own[place]} for place in parts.streamed]
    stream = WeightStream(accelerator, computing, weights, parts.next_in_buffer)
    moved = fx.GraphModule({**program.weights, **stream.weights}, program.module.graph, class_name="Stage")
    placed = place_stage(replace(program, module=moved), accelerator.device).module
    nodes = list(filter(is_op, placed.graph.nodes))
    order = {node: number for number, node in enumerate(placed.graph.nodes)}
    for part, place in enumerate(parts.streamed):
        last = max((nodes[place], *_views(nodes[place])), key=order.__getitem__)
        limit = part + NUM_BUFFERS
        if limit < len(parts.streamed) and order[last] >= order[nodes[parts.streamed[limit]]]:
            raise BackendError(
                f"stage '{program.name}' cannot be streamed: op '{nodes[place].name}' hands on a view of its weights, which "
                f"'{last.name}' reads after other weights have their place; let all weights stay, or put the op on another device"
            )
        _call_before(placed.graph, nodes[place], stream.arrive, part)
        _call_before(placed.graph, last.next, stream.leave, part)
    if parts.streamed:
        _call_before(placed.graph, next(node for node in placed.graph.nodes if node.op != "placeholder"), stream.begin)
    placed.recompile()
    return lambda inputs: placed.forward(*inputs)


def _own_weights(op: fx.Node) -> list[str]:
    """The weights that only this op of the stage reads."""
    found = [node for node in op.all_input_nodes if node.op == "get_attr"]
    names = [str(node.target) for node in found if list(node.users) == [op]]
    others = {str(node.target) for node in op.graph.nodes if node.op == "get_attr" and node not in found}
    return [name for name in names if name not in others]


def _views(op: fx.Node) -> Iterator[fx.Node]:
    """The ops that read a view of the weights of an op, if it returns one."""
    returns = schema_of(op.target).returns if isinstance(op.target, OpOverload) else ()
    if any(one.alias_info is not None for one in returns) or not isinstance(op.target, OpOverload):
        for user in op.users:
            if user.op != "output":
                yield user
                yield from _views(user)


def _call_before(graph: fx.Graph, node: fx.Node, method: Callable[..., None], *given: int) -> None:
    """Put a call of a method into a graph."""

    def call() -> None:
        method(*given)

    with graph.inserting_before(node):
        graph.call_function(call)

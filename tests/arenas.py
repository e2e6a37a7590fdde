"""A checking interpreter: each memory is an arena of its own, and an op that reads a value of another arena is refused.

It runs the placed program op by op in one thread, on tensors that lie in arenas at the offsets of the memory plan. A missing
copy, two live values at one place, or an op that is written over too early show on a machine without any accelerator.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autosplit.errors import StageError
from autosplit.memory.lives import ALIGNMENT
from autosplit.placing.placed import Placed
from autosplit.tracing.devicecopies import DEVICE_COPY
from autosplit.tracing.flattening import is_op, is_pick
from autosplit.tracing.tensorspec import TensorSpec, copy_into, view_storage


@dataclass
class ArenaInterpreter(fx.Interpreter):
    """Runs a placed program and refuses reads across arenas.

    Attributes:
        placed: the placed graph.
        program: its program; a test may give one with a fault.
    """

    placed: Placed
    program: fx.GraphModule
    arenas: dict[str, torch.Tensor] = field(default_factory=dict)
    home: dict[str, str] = field(default_factory=dict)
    specs: Mapping[str, TensorSpec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__(self.program)
        plans = self.placed.memory
        self.arenas = {name: _aligned(plan.peak_bytes) for name, plan in plans.items()}
        self.specs = {copy.name: self.placed.traced.specs[copy.value] for copy in self.placed.copies} | dict(
            self.placed.traced.specs
        )

    def check(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The outputs of the model. Raises: StageError: an op reads a value that is not in its arena."""
        with torch.inference_mode():
            found: tuple[torch.Tensor, ...] = self.run(*inputs)
        return tuple(tensor.clone() for tensor in found)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node; what it makes moves into its arena."""
        if n.op == "placeholder":
            readers = [node for node in n.users if node.target is not DEVICE_COPY]
            memory = self._memory(readers[0]) if readers else None
            return self._keep(n.name, memory, super().run_node(n))
        if not is_op(n):
            value = super().run_node(n)
            return self._keep(n.name, self._memory(n.all_input_nodes[0]), value) if is_pick(n) else value
        memory = self._memory(n)
        for source in n.all_input_nodes if n.target is not DEVICE_COPY else ():
            if source.name in self.home and self.home[source.name] != memory:
                raise StageError(
                    f"op '{n.name}' in the memory of {memory} reads '{source.name}' in the memory of {self.home[source.name]}; "
                    "a copy is missing"
                )
        return self._keep(n.name, memory, super().run_node(n))

    def _memory(self, node: fx.Node) -> str:
        return self.placed.machine[self.placed.devices[node.name]].memory

    def _keep(self, name: str, memory: str | None, value: Any) -> Any:
        """The value, in its place in the arena; views stay views of what is there."""
        if memory is None or not isinstance(value, torch.Tensor):
            return value
        self.home[name] = memory
        storage = self.placed.memory[memory].storage_of.get(name)
        if storage is None or name in self.placed.aliases.views:
            return value
        spec = replace(self.specs[name], offset_bytes=0)
        place = view_storage(self.arenas[memory][storage.offset : storage.offset + storage.num_bytes], spec)
        copy_into(place, value)
        return place


def _aligned(num_bytes: int) -> torch.Tensor:
    """Bytes that begin at a 64-byte boundary."""
    buffer = torch.empty(num_bytes + ALIGNMENT, dtype=torch.uint8)
    start = -buffer.data_ptr() % ALIGNMENT
    return buffer[start : start + num_bytes]

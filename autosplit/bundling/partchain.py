"""PartChain: all parts of a network as one stage, which a thread of the caller's process runs one after the other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autosplit.running.wiring import StagePlacement
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import Device

if TYPE_CHECKING:
    from autosplit.backends.base import Runnable


@dataclass(frozen=True, slots=True)
class PartChain:
    """Parts in topological order, joined by the names of their values: a module for ``running.InProcess``.

    Attributes:
        parts: each with its threads; their devices are not used.
        inputs, outputs: the values that the chain reads and makes, in order.
    """

    parts: tuple[StagePlacement, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    warms_up: bool = True

    @property
    def kind(self) -> str:
        """The backend of all parts, or ``mixed``."""
        kinds = {part.module.kind for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all parts."""
        return sum(part.module.num_bytes for part in self.parts)

    def import_packages(self) -> None:
        """Import the packages of every part."""
        for part in self.parts:
            part.module.import_packages()

    def load(self, threads: int, device: str, shared: bool) -> "Runnable":
        """Load every part, each for its own number of threads. Raises: BackendError: a runtime refuses one."""
        runs = [part.module.load(part.threads or threads, device, shared) for part in self.parts]
        return lambda inputs: self._walk(runs, inputs)[1]

    def failing_op(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """Run the parts anew up to the one that raises, and ask it for its op."""
        runs = [part.module.load(part.threads or 1, "cpu:0", True) for part in self.parts]
        failed, found = self._walk(runs, inputs, until_failure=True)
        return None if failed is None else failed.module.failing_op(found)

    def _walk(
        self, runs: Sequence["Runnable"], inputs: Sequence[torch.Tensor], until_failure: bool = False
    ) -> tuple[StagePlacement | None, list[torch.Tensor]]:
        """Run the parts. Returns: None and the outputs; with ``until_failure``, the part that raises and its inputs.

        Raises: RuntimeError: a part failed; the message names it.
        """
        values = {spec.name: value for spec, value in zip(self.inputs, inputs, strict=True)}
        last = {spec.name: number for number, part in enumerate(self.parts) for spec in part.inputs}
        kept = {spec.name for spec in self.outputs}
        for number, (part, run) in enumerate(zip(self.parts, runs, strict=True)):
            given = [values[spec.name] for spec in part.inputs]
            try:
                made = run(given)
            except Exception as failure:
                if until_failure:
                    return part, given
                raise RuntimeError(f"part '{part.name}': {type(failure).__name__}: {failure}") from failure
            values.update((spec.name, value) for spec, value in zip(part.outputs, made, strict=True))
            for spec in part.inputs:
                if last[spec.name] == number and spec.name not in kept:
                    values.pop(spec.name, None)
        return None, [values[spec.name] for spec in self.outputs]


def as_one_stage(
    name: str, parts: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str], devices: Sequence[Device]
) -> StagePlacement:
    """The parts as one stage with a copy on each of these devices."""
    read: Mapping[str, TensorSpec] = {spec.name: spec for part in parts for spec in part.inputs}
    made: Mapping[str, TensorSpec] = {spec.name: spec for part in parts for spec in part.outputs}
    sources = tuple(read[value] for value in inputs if value in read)
    targets = tuple(made[value] for value in dict.fromkeys(outputs) if value in made)
    threads = max(part.threads or 1 for part in parts)
    return StagePlacement(name, PartChain(tuple(parts), sources, targets), sources, targets, tuple(devices), threads)

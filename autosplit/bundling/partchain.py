"""PartChain: all parts of a network as one stage, which one thread runs one after the other."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from autosplit.running.modules import Module
from autosplit.running.stage import StagePlacement, Variant
from autosplit.tracing.tensorspec import TensorSpec, announced, check_outputs, laid_out
from autosplit.values.machine import Device

if TYPE_CHECKING:
    from autosplit.backends.base import Runnable


Step = Callable[[dict[str, torch.Tensor]], None]
"""Runs a part: adds its outputs to the values of a request, and drops those that no later part reads."""


Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class PartChain(Module):
    """Parts in topological order, joined by the names of their values: a module for the caller's process or for one worker.

    It takes requests with the shapes of each variant of its parts.

    Attributes:
        parts: each with its threads; their devices are not used.
        inputs: the values that the chain reads, in order, once for each variant.
        outputs: the names of the values that it makes, in order.
    """

    parts: tuple[StagePlacement, ...]
    inputs: tuple[tuple[TensorSpec, ...], ...]
    outputs: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The backend of all parts, or ``mixed``."""
        kinds = {part.module.kind for part in self.parts}
        return kinds.pop() if len(kinds) == 1 else "mixed"

    @property
    def isolated(self) -> bool:
        """Whether one of the parts is."""
        return any(part.module.isolated for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights of all parts."""
        return sum(part.module.num_bytes or 0 for part in self.parts)

    def import_packages(self) -> None:
        """Import the packages of every part."""
        for part in self.parts:
            part.module.import_packages()

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> "Runnable":
        """Load every part, each for its own number of threads. Raises: BackendError: a runtime refuses one."""
        steps = self._steps(threads, device, shared)

        def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            values = self._named(inputs)
            for part, step in steps[_shapes(inputs)]:
                try:
                    step(values)
                except Exception as failure:
                    raise RuntimeError(f"part '{part.name}': {type(failure).__name__}: {failure}") from failure
            return [values[name] for name in self.outputs]

        return run

    def failing_op(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """Run the parts anew up to the one that raises; return its failing op."""
        values = self._named(inputs)
        for part, step in self._steps(1, "cpu:0", True)[_shapes(inputs)]:
            given = [values[spec.name] for spec in part.inputs]
            try:
                step(values)
            except Exception:
                return part.module.failing_op(given)
        return None

    def _named(self, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return {spec.name: value for spec, value in zip(self.inputs[0], inputs, strict=True)}

    def _steps(self, threads: int, device: str, shared: bool) -> dict[Shapes, list[tuple[StagePlacement, Step]]]:
        """By the shapes of each variant the parts, each with its step, which drops the values that nothing after it needs."""
        last = {spec.name: number for number, part in enumerate(self.parts) for spec in part.inputs}
        found: list[list[tuple[StagePlacement, Step]]] = [[] for _ in self.inputs]
        for number, part in enumerate(self.parts):
            loaded = list[tuple[Module, "Runnable"]]()
            dropped = [spec.name for spec in part.inputs if last[spec.name] == number and spec.name not in self.outputs]
            for steps, one in zip(found, part.at_each_size(), strict=True):
                run = next((run for module, run in loaded if module == one.module), None)
                if run is None:
                    run = one.module.load(part.threads or threads, device, shared, part.streams)
                    loaded.append((one.module, run))
                steps.append((one, _step(one, run, dropped)))
        return dict(reversed([*zip(map(_shapes, self.inputs), found, strict=True)]))


def _shapes(values: Sequence[torch.Tensor | TensorSpec]) -> Shapes:
    return tuple(tuple(value.shape) for value in values)


def _step(part: StagePlacement, run: "Runnable", dropped: Sequence[str]) -> Step:
    wanted = announced(part.outputs)

    def step(values: dict[str, torch.Tensor]) -> None:
        made = run([values[spec.name] for spec in part.inputs])
        check_outputs(made, wanted)
        values.update((spec.name, laid_out(value, spec)) for spec, value in zip(part.outputs, made, strict=True))
        for name in dropped:
            values.pop(name, None)

    return step


def as_one_stage(
    name: str, parts: Sequence[StagePlacement], inputs: Sequence[str], outputs: Sequence[str], devices: Sequence[Device]
) -> StagePlacement:
    """The parts as one stage with a copy on each of these devices."""
    sources, targets = list[tuple[TensorSpec, ...]](), list[tuple[TensorSpec, ...]]()
    for one in zip(*(part.at_each_size() for part in parts), strict=True):
        read: Mapping[str, TensorSpec] = {spec.name: spec for part in one for spec in part.inputs}
        made: Mapping[str, TensorSpec] = {spec.name: spec for part in one for spec in part.outputs}
        sources.append(tuple(read[value] for value in inputs if value in read))
        targets.append(tuple(made[value] for value in dict.fromkeys(outputs) if value in made))
    threads = max(part.threads or 1 for part in parts)
    chain = PartChain(tuple(parts), tuple(sources), tuple(spec.name for spec in targets[0]))
    others = tuple(Variant(chain, *pair) for pair in zip(sources[1:], targets[1:], strict=True))
    return StagePlacement(name, chain, sources[0], targets[0], tuple(devices), threads, variants=others)

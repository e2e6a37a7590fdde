"""Run a placed graph in this process: each device has a thread, which runs its parts and copies in graph order."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Lock

import torch

from autosplit.backends.base import Runnable, get_backend
from autosplit.devices.accelerators import open_accelerator
from autosplit.errors import StageError
from autosplit.placing.parts import Part
from autosplit.tracing.capturing import Traced
from autosplit.tracing.devicecopies import copied_tensor
from autosplit.tracing.splitting import StageProgram, place_stage, split
from autosplit.values.machine import Machine

_LOCKS: dict[str, Lock] = {}
"""The lock of each device that runs one model at a time; locks are taken in the order of names, so none waits for ever."""

Later = Callable[[], torch.Tensor]
"""A tensor once it is there; the call waits for it."""


@dataclass(frozen=True)
class Compiled:
    """A part as a function of tensors, and the names of its inputs and outputs."""

    part: Part
    memory: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    call: Runnable
    device: torch.device


@dataclass(frozen=True)
class Runner:
    """The parts in order, compiled for a number of torch threads, and the memory in which each value is made."""

    parts: tuple[Compiled, ...]
    homes: Mapping[str, str]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    threads: int
    locks: tuple[Lock, ...] = ()

    @staticmethod
    def of(traced: Traced, machine: Machine, parts: Sequence[Part], homes: Mapping[str, str]) -> "Runner":
        """Compile every part; ``homes`` maps each value to the memory in which it is made. Raises: BackendError: a refusal."""
        programs = split(traced, [part.ops for part in parts])
        compiled = tuple(
            Compiled(
                part,
                machine[part.site.device].memory,
                tuple(spec.name for spec in program.inputs),
                tuple(spec.name for spec in program.outputs),
                *_compile(part, program),
            )
            for part, program in zip(parts, programs, strict=True)
        )
        alone = sorted({part.site.device for part in parts if machine[part.site.device].one_model})
        locks = tuple(_LOCKS.setdefault(name, Lock()) for name in alone)
        return Runner(compiled, homes, traced.graph.inputs, traced.graph.outputs, torch.get_num_threads(), locks)

    def __call__(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The outputs of the model. Raises: StageError: a part failed."""
        with ExitStack() as held:
            for lock in self.locks:
                held.enter_context(lock)
            return self._run(inputs)

    def _run(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        there: dict[tuple[str, str], Later] = {
            (name, self.homes[name]): partial(inputs.__getitem__, number)
            for number, name in enumerate(self.inputs)
            if name in self.homes
        }
        devices = dict.fromkeys(part.part.site.device for part in self.parts)
        pools = {device: ThreadPoolExecutor(1, f"autosplit-{device}") for device in devices}
        try:
            for part in self.parts:
                self._submit(part, there, pools[part.part.site.device])
            return tuple(there[name, self.homes[name]]().cpu() for name in self.outputs)
        finally:
            for pool in pools.values():
                pool.shutdown(cancel_futures=True)

    def _submit(self, part: Compiled, there: dict[tuple[str, str], Later], pool: ThreadPoolExecutor) -> None:
        """Queue the part behind the copies that it is the first to read."""
        for value in part.inputs:
            if (value, part.memory) not in there:
                source = there[value, self.homes[value]]
                there[value, part.memory] = pool.submit(_copied, source, part.device).result
        done = pool.submit(_run, part, [there[value, part.memory] for value in part.inputs])
        for position, value in enumerate(part.outputs):
            there[value, part.memory] = partial(_nth, done.result, position)


def _copied(source: Later, device: torch.device) -> torch.Tensor:
    return copied_tensor(source(), device)


def _nth(made: Callable[[], Sequence[torch.Tensor]], position: int) -> torch.Tensor:
    return made()[position]


def _run(part: Compiled, given: Sequence[Later]) -> Sequence[torch.Tensor]:
    inputs = [tensor() for tensor in given]
    try:
        with torch.inference_mode():
            return part.call(inputs)
    except Exception as failure:
        first, last = part.part.ops[0], part.part.ops[-1]
        raise StageError(
            f"{part.part.name} (ops '{first}' to '{last}' on {part.part.site}) failed: {type(failure).__name__}: {failure}"
        ) from failure


def _compile(part: Part, program: StageProgram) -> tuple[Runnable, torch.device]:
    """The part on its backend, and torch's device of its tensors; an accelerator that a provider serves gets its weights."""
    device = torch.device("cpu")
    if accelerator := open_accelerator(part.site.device):
        device, program = accelerator.device, place_stage(program, accelerator.device)
    return get_backend(part.site.backend).compile(program, torch.get_num_threads(), part.site.precision), device

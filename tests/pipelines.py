"""Small pipelines for tests: stages on null devices (threads) or on cores (processes), functions that workers import."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autosplit.devices.limits import affinity
from autosplit.running.modules import LocalFunction, PythonFunction
from autosplit.running.nullworker import SimulatedDeath
from autosplit.running.stage import StagePlacement, Variant
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import Device, parse_device

NULL = parse_device("null:0")
CORES = tuple(parse_device(f"cpu:{core}") for core in affinity()[:2])
WIDTH = 4


def spec(name: str, width: int = WIDTH) -> TensorSpec:
    """A float vector."""
    return TensorSpec(name, (width,), (1,), "float32")


def request(number: float, width: int = WIDTH) -> list[torch.Tensor]:
    """One vector, all elements ``number``."""
    return [torch.full((width,), float(number))]


def wait_until(holds: Callable[[], bool], limit_s: float = 60.0) -> None:
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"it does not hold within {limit_s} s"
        time.sleep(1e-3)


def abandoned_since(before: set[Path]) -> list[Path]:
    """Names in shared memory that are new and that no living process has mapped: others may use it meanwhile."""
    held, paths = "", set(Path("/dev/shm").iterdir()) - before
    for maps in Path("/proc").glob("[0-9]*/maps") if paths else ():
        with contextlib.suppress(OSError):
            held += maps.read_text()
    return [path for path in paths if path.exists() and str(path) not in held]


def at_widths(stage: StagePlacement, *widths: int) -> StagePlacement:
    """The stage with a variant for each further width of its vectors."""
    sides = [[tuple(spec(one.name, width) for one in side) for side in (stage.inputs, stage.outputs)] for width in widths]
    return replace(stage, variants=tuple(Variant(stage.module, *side) for side in sides))


def local(name: str, function: Callable[..., Any], reads: str, makes: str, replicas: int = 1, **settings: Any) -> StagePlacement:
    """A stage in threads; ``reads`` and ``makes`` are value names with blanks between them."""
    inputs, outputs = tuple(map(spec, reads.split())), tuple(map(spec, makes.split()))
    return StagePlacement(name, LocalFunction(function), inputs, outputs, (NULL,) * replicas, **settings)


def spawned(
    name: str, function: str, reads: str, makes: str, devices: Sequence[Device] = CORES[:1], **settings: Any
) -> StagePlacement:
    """A stage in processes, which runs a function of this file."""
    inputs, outputs = tuple(map(spec, reads.split())), tuple(map(spec, makes.split()))
    module = PythonFunction(f"pipelines:{function}", ("pipelines",))
    return StagePlacement(name, module, inputs, outputs, tuple(devices), **settings)


class Telling(LocalFunction):
    """Adds 1 if it was told that others have work on its cores."""

    def load(
        self, threads: int, device: str, shared: bool, streams: int = 1
    ) -> Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
        return lambda inputs: [inputs[0] + shared]


class Gate:
    """A function that holds every request until it is opened, and notes the order in which they came."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.entered = threading.Semaphore(0)
        self.seen: list[int] = []

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(int(x[0]))
        self.entered.release()
        self.opened.wait(30)
        return x + 1


class Once:
    """A function during which the worker dies, a number of times, on one request."""

    def __init__(self, number: int, times: int) -> None:
        self.number, self.left = number, times

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x[0] == self.number and self.left:
            self.left -= 1
            raise SimulatedDeath
        return x + 1


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def increment(x: torch.Tensor) -> torch.Tensor:
    return x + 1


def add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x + y


def slow_increment(x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.002)
    return x + 1


def fail_on_7(x: torch.Tensor) -> torch.Tensor:
    if x[0] == 7:
        raise ValueError("seven is not for me")
    return x + 1


def die_on_7(x: torch.Tensor) -> torch.Tensor:
    if x[0] == 7:
        os.kill(os.getpid(), 9)
    return x + 1


def hang_on_7(x: torch.Tensor) -> torch.Tensor:
    if x[0] == 7:
        time.sleep(600)
    return x + 1


def die(x: torch.Tensor) -> torch.Tensor:
    os._exit(3)


def exhaust(x: torch.Tensor) -> torch.Tensor:
    if x[0] == 7:
        return torch.empty(1 << 50)
    return x + 1


@torch.library.custom_op("pipelines::wobble", mutates_args=())
def wobble(x: torch.Tensor, strength: float) -> torch.Tensor:
    """An operator that torch does not bring, and no runtime has."""
    return x + strength * torch.sin(x)


@wobble.register_fake
def _(x: torch.Tensor, strength: float) -> torch.Tensor:
    return torch.empty_like(x)


class Wobbling(torch.nn.Module):
    """A custom operator between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Layer, operator, layer."""
        result: torch.Tensor = self.after(wobble(self.before(x), 0.5))
        return result

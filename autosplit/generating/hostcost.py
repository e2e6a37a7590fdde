"""The time of a step beside its stages: the host's processor time for the answer of a step and the next step of its sequences.

Rings, the choice of the next step and the work for each of its sequences are in it. Where all cores are devices, a device
computes nothing while the host works there. So all of this time counts, and not only the part for which its stage waits: the
rest is taken from another stage. It is measured with generators on all devices at once, whose one stage only reads memory, for
as long as the model's step takes: as beside a model, the host's data leave the caches, and its work takes three times as long.
"""

import time
from concurrent.futures import Future
from contextlib import ExitStack
from functools import cache

import torch

from autosplit.generating.generators import Generator
from autosplit.generating.sequences import Capacity
from autosplit.generating.steps import TOKENS
from autosplit.running.modules import PythonFunction
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.shapes.batching import Bucket
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import parse_device

NUM_STEPS, WARM_UP = 48, 4
"""Steps that are timed, and steps before them."""

MOST_US = 20_000
"""Most microseconds for which a stage reads: by then it has read more than the caches of a core hold."""

BLOCK, NUM_BLOCKS = 1 << 18, 64
"""Elements of a MiB, and the MiB that a stage reads in turn."""

_memory: list[torch.Tensor] = []


def read_memory(ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, sampling: torch.Tensor) -> torch.Tensor:
    """The stage: read memory for as many microseconds of processor time as the first token says, which is the next one, too."""
    until_ns = time.thread_time_ns() + 1000 * int(ids[0])
    if not _memory:
        _memory.append(torch.ones(NUM_BLOCKS, BLOCK))
    block = 0
    while time.thread_time_ns() < until_ns:
        _memory[0][block % NUM_BLOCKS].sum()
        block += 1
    return ids


@cache
def measure_host(cores: tuple[str, ...], num_sequences: int, step_us: int) -> float:
    """The host's seconds of processor time for a step, measured once for these arguments in a process.

    Each further sequence of a step adds 1 or 2 hundredths to them, so the steps have one size.

    Args:
        cores: devices of one core each, on which stages compute at once.
        num_sequences: the sequences of a step.
        step_us: microseconds of a step of the model.
    Raises: WorkerError: a worker died.
    """
    word = min(step_us, MOST_US)
    bucket, capacity = Bucket(0, {TOKENS: num_sequences}, 0.0), Capacity(num_sequences, NUM_STEPS + 1, MOST_US + 1)
    with ExitStack() as opened:
        pipelines = [opened.enter_context(_pipeline(core, num_sequences)) for core in cores]
        generators = [opened.enter_context(Generator(one, [bucket], capacity, num_stages=1)) for one in pipelines]

        def run(num_steps: int) -> None:
            futures = list[Future[list[int]]]()
            for generator in generators:
                futures += [generator.submit([word], max_new_tokens=num_steps) for _ in range(num_sequences)]
            for future in futures:
                future.result()

        run(WARM_UP)
        begun_s = time.process_time()
        run(NUM_STEPS)
        return (time.process_time() - begun_s) / (NUM_STEPS * len(generators))


def _pipeline(core: str, num_tokens: int) -> Pipeline:
    """A pipeline of steps on a core whose stage reads memory."""
    names = ("ids", "slots", "positions")
    stage = StagePlacement(
        "read_memory",
        PythonFunction(f"{__name__}:read_memory", (__name__,)),
        inputs=(
            *(TensorSpec(name, (num_tokens,), (1,), "int64") for name in names),
            TensorSpec("sampling", (num_tokens, 5), (5, 1), "float64"),
        ),
        outputs=(TensorSpec("tokens", (num_tokens,), (1,), "int64"),),
        devices=(parse_device(core),),
        threads=1,
    )
    return Pipeline([stage], [*names, "sampling"], ["tokens"])

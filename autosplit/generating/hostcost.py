"""The time of a step beside its stages: the host's processor time for the answer of a step and the next step of its sequences.

Rings, the choice of the next step, the work for each of its sequences and the rows of its tokens (``rewriting``) are in it. Where
all cores are devices, a device computes nothing while the host works there. So all of this time counts, and not only the part for
which its stage waits: the rest is taken from another stage. It is measured with pipelines on all devices at once, whose one stage
only reads memory, for as long as the model's step takes: as beside a model, the host's data leave the caches, and its work takes
three times as long.

Before the first step the host takes in the sequences, which is measured there, too.
"""

import time
from contextlib import ExitStack
from functools import cache
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from autosplit.generating.generators import Generator
from autosplit.generating.rewriting import EMBEDDED
from autosplit.generating.sequences import Capacity
from autosplit.generating.steps import TOKENS
from autosplit.running.modules import PythonFunction
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.shapes.batching import Bucket
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import parse_device

NUM_STEPS, WARM_UP, ROUND = 48, 4, 8
"""Steps that are timed, steps before them, and steps of a round. The median of the rounds counts: other threads of this process
may work in one of them (the mean of all steps was 5.31 ms once, and 0.6 to 0.9 ms otherwise)."""

NUM_STARTS = 9
"""Times that sequences are taken in, of which the median counts."""

MOST_US = 20_000
"""Most microseconds for which a stage reads: by then it has read more than the caches of a core hold."""

BLOCK, NUM_BLOCKS = 1 << 18, 64
"""Elements of a MiB, and the MiB that a stage reads in turn."""

_memory: list[torch.Tensor] = []


class HostTime(NamedTuple):
    """The host's seconds of processor time for a step, and before the first step of sequences that come at once."""

    step_s: float
    start_s: float = 0.0


FREE = HostTime(0.0)
"""A host that takes no time."""


def read_memory(ids: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
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
def measure_host(cores: tuple[str, ...], num_sequences: int, step_us: int, row_size: int = 0) -> HostTime:
    """The host's seconds of processor time, measured once for these arguments in a process.

    Each further sequence of a step adds 1 or 2 hundredths to them, so the steps have one size.

    Args:
        cores: devices of one core each, on which stages compute at once.
        num_sequences: the sequences of a step.
        step_us: microseconds of a step of the model.
        row_size: elements of the row that the host looks up for each token; 0 where it looks up none.
    Raises: WorkerError: a worker died.
    """
    word, table = min(step_us, MOST_US), torch.ones(1, row_size).expand(MOST_US + 1, row_size) if row_size else None
    capacity = Capacity(num_sequences, WARM_UP + NUM_STEPS, MOST_US + 1, table=table)
    bucket = Bucket(0, {TOKENS: num_sequences}, 0.0)
    with ExitStack() as opened:
        first, *others = [opened.enter_context(_pipeline(core, num_sequences, row_size)) for core in cores]
        beside = [(one, [bucket]) for one in others]
        generator = opened.enter_context(Generator(first, [bucket], capacity, num_stages=1, beside=beside))
        at_s = list[float]()

        def note(number: int, token: int) -> None:
            if number == 0:
                at_s.append(time.process_time())

        prompts = [[word]] * generator.capacity.max_sequences
        generator.generate(prompts, max_new_tokens=WARM_UP + NUM_STEPS, on_token=note)
        rounds_s = [end_s - begun_s for begun_s, end_s in pairwise(at_s[WARM_UP - 1 :: ROUND])]
        step_s, firsts_s = median(rounds_s) / (ROUND * len(cores)), list[float]()
        for _ in range(NUM_STARTS):
            at_s.clear()
            begun_s = time.process_time()
            generator.generate(prompts, max_new_tokens=2, on_token=note)
            firsts_s.append(at_s[0] - begun_s)
        return HostTime(step_s, max(0.0, median(firsts_s) - step_s))


def _pipeline(core: str, num_tokens: int, row_size: int) -> Pipeline:
    """A pipeline of steps on a core whose stage reads memory."""
    inputs = [
        *(TensorSpec(name, (num_tokens,), (1,), "int64") for name in ("ids", "slots", "positions")),
        TensorSpec("sampling", (num_tokens, 5), (5, 1), "float64"),
        *([TensorSpec(EMBEDDED, (num_tokens, row_size), (row_size, 1), "float32")] if row_size else []),
    ]
    stage = StagePlacement(
        "read_memory",
        PythonFunction(f"{__name__}:read_memory", (__name__,)),
        inputs=tuple(inputs),
        outputs=(TensorSpec("tokens", (num_tokens,), (1,), "int64"),),
        devices=(parse_device(core),),
        threads=1,
    )
    return Pipeline([stage], [spec.name for spec in inputs], ["tokens"])

"""The outputs of the unsplit model in f32 eager, which a plan's outputs are compared with."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import fx

from autosplit.tracing.capturing import Traced
from autosplit.tracing.verifying import distinct_inputs

NUM_DISTINCT = 4
"""Different inputs that are sent in turn, so that answers in a wrong order are noticed; a slow model gets two."""

SLOW_S = 0.1
"""A model whose pass takes longer than these seconds is slow, and gets as few requests as possible."""

Microbatch = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """Microbatches and the model's outputs in f32 eager. Each op runs with its stage's threads, whose number can change bits."""

    traced: Traced
    threads: Mapping[str, int]
    work: Sequence[Microbatch]
    expected: Sequence[Microbatch]

    @staticmethod
    def of(traced: Traced, threads: Mapping[str, int]) -> "Reference":
        """Run the unsplit model; ops that ``threads`` does not name run with torch's number of threads."""
        eager = _Threaded(traced, threads)
        first, *others = distinct_inputs(traced.example_inputs, NUM_DISTINCT)
        work, expected = [first], list[Microbatch]()
        before = torch.get_num_threads()
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                expected.append(tuple(eager.run(*first)))
                for inputs in others[:1] if time.perf_counter() - start > SLOW_S else others:
                    with suppress(Exception):  # it may take integers in one order only, such as offsets
                        expected.append(tuple(eager.run(*inputs)))
                        work.append(inputs)
        finally:
            torch.set_num_threads(before)
        return Reference(traced, threads, work, expected)


class _Threaded(fx.Interpreter):
    """Runs the unsplit program op by op, with a number of threads for each."""

    def __init__(self, traced: Traced, threads: Mapping[str, int]) -> None:
        super().__init__(traced.program)
        self._threads = threads

    def run_node(self, n: fx.Node) -> object:
        wanted = self._threads.get(n.name)
        if wanted is not None and wanted != torch.get_num_threads():
            torch.set_num_threads(wanted)
        return super().run_node(n)

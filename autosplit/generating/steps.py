"""A decoder traced as a family of steps: one variant for each number of tokens, over one copy of the weights and caches."""

import math
from dataclasses import replace

import torch
from torch import nn

from autosplit.arguments import checked
from autosplit.errors import UsageError
from autosplit.generating.decoders import Step, cached
from autosplit.generating.sampling import Sampling
from autosplit.tracing.family import At, Family, trace_family
from autosplit.tracing.loading import load_model
from autosplit.values.shapes import Sizes, Traffic

TOKENS = "tokens"
"""The dimension of a step: its number of tokens."""

CHUNK = 128
"""Most tokens of a prompt in one step, beside those of sequences that go on."""


@checked
def step_family(model: nn.Module, max_sequences: int = 16, max_length: int = 1024, *, sizes: Sizes | None = None) -> Family:
    """Trace a decoder as a family of steps.

    Args:
        model: a causal language model of transformers, or a module that calls ``autosplit.KVCache`` (see ``decoders``).
        max_sequences: sequences side by side.
        max_length: tokens of a sequence, prompt and new ones.
        sizes: numbers of tokens that a step may have; by default up to a token of each sequence beside a chunk of a prompt.
    Returns: a family with the dimension ``tokens``. Its graph takes ids, slots, positions and sampling, and gives the next tokens
        (see ``decoders.Step``). The example of up to ``max_sequences`` tokens is one of each sequence, in the middle of the
        caches; that of more is a chunk of a prompt.
    Raises: UsageError: a number is below 1. ModelError: as ``cached``. TraceError: as ``trace_family``.
    """
    if min(max_sequences, max_length) < 1:
        raise UsageError(f"max_sequences is {max_sequences} and max_length is {max_length}; both are at least 1")
    allowed = {TOKENS: sizes or range(1, max_sequences + min(CHUNK, max_length) + 1)}
    step = Step(cached(model, max_sequences, max_length), max_sequences, max_length).eval()

    def inputs_at(at: At) -> tuple[torch.Tensor, ...]:
        count = at[TOKENS]
        order = torch.arange(count)
        decodes = count <= max_sequences
        slots = order + 1 if decodes else torch.zeros_like(order)
        positions = torch.full_like(order, max_length // 2) if decodes else order % max_length
        return order % 2, slots, positions, torch.tensor([Sampling().row], dtype=torch.float64).repeat(count, 1)

    loaded = replace(load_model(step, inputs=inputs_at({TOKENS: allowed[TOKENS][-1]})), name=type(model).__name__)
    axes = {name: {0: TOKENS} for name in ("ids", "slots", "positions", "sampling")}
    return trace_family(loaded, axes, allowed, inputs_at)


def step_traffic(prompt: int, new: int, max_sequences: int = 16) -> Traffic:
    """How often steps of each size come, while as many sequences as may are under way and a new one follows each that ends.

    Args:
        prompt, new: tokens of a sequence.
        max_sequences: sequences side by side.

    In the time of one sequence, ``new`` steps, each of the ``max_sequences`` sequences has all chunks of its prompt once. A chunk
    runs beside the tokens of the others.

    >>> step_traffic(prompt=128, new=64, max_sequences=4).counts
    {(4,): 60.0, (132,): 4.0}
    """
    chunks = max_sequences * math.ceil(prompt / CHUNK)
    size = max_sequences + min(prompt, CHUNK)
    return Traffic((TOKENS,), {(max_sequences,): float(max(new - chunks, 0)), (size,): float(chunks)})

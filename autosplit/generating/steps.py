"""A decoder traced as a family of steps: one variant for each number of tokens, over one copy of the weights and caches."""

import math
from dataclasses import replace

import torch
from torch import nn

from autosplit.arguments import checked
from autosplit.errors import UsageError, raise_faults
from autosplit.generating.decoders import DecoderStep, cached
from autosplit.generating.sampling import Sampling
from autosplit.tracing.family import At, Family, trace_family
from autosplit.tracing.loading import load_model
from autosplit.values.shapes import Traffic

TOKENS = "tokens"
"""The dimension of a step: its number of tokens."""

CHUNK = 128
"""Most tokens of a prompt in one step, beside those of sequences that go on."""

PADDED = "the scheduler of the steps pads them, with tokens of slot 0"


@checked
def step_family(model: nn.Module, max_sequences: int = 16, max_length: int = 1024, chunk: int = CHUNK) -> Family:
    """Trace a decoder as a family of steps.

    Args:
        model: a causal language model of transformers, or a module that calls ``autosplit.KVCache`` (see ``decoders``).
        max_sequences: sequences side by side.
        max_length: tokens of a sequence, prompt and new ones.
        chunk: most tokens of a prompt in one step, beside a token of each sequence.
    Returns: a family with the dimension ``tokens`` and a variant for each of ``step_sizes``. Its graph takes ids, slots,
        positions and sampling, and gives the next tokens (see ``DecoderStep``). The example of up to ``max_sequences`` tokens is
        one of each sequence, in the middle of the caches; that of more is a chunk of a prompt.
    Raises: UsageError: a number is below 1. ModelError: as ``cached``. TraceError: as ``trace_family``.
    """
    given = {"max_sequences": max_sequences, "max_length": max_length, "chunk": chunk}
    raise_faults(UsageError, "no steps", [f"{name} is {number}, and at least 1" for name, number in given.items() if number < 1])
    allowed = {TOKENS: step_sizes(max_sequences, chunk)}
    step = DecoderStep(cached(model, max_sequences, max_length), max_sequences, max_length).eval()

    def inputs_at(at: At) -> tuple[torch.Tensor, ...]:
        count = at[TOKENS]
        order = torch.arange(count)
        decodes = count <= max_sequences
        slots = order + 1 if decodes else torch.zeros_like(order)
        positions = torch.full_like(order, max_length // 2) if decodes else order % max_length
        return order % 2, slots, positions, torch.tensor([Sampling().row], dtype=torch.float64).repeat(count, 1)

    loaded = replace(load_model(step, inputs=inputs_at({TOKENS: allowed[TOKENS][-1]})), name=type(model).__name__)
    axes = {name: {0: TOKENS} for name in ("ids", "slots", "positions", "sampling")}
    family = trace_family(loaded, axes, allowed, inputs_at)
    family = replace(family, out_dims={name: {} for name in family.graph.outputs}, unpaddable={TOKENS: PADDED})
    return family.only([{TOKENS: size} for size in allowed[TOKENS][::-1]])


def step_sizes(max_sequences: int, chunk: int = CHUNK) -> tuple[int, ...]:
    """The numbers of tokens for which there are variants: powers of two up to a token of each sequence, a chunk, and both.

    >>> step_sizes(max_sequences=6, chunk=100)
    (1, 2, 4, 6, 100, 106)
    """
    powers = [1 << power for power in range(max_sequences.bit_length())]
    return tuple(sorted({*powers, max_sequences, chunk, max_sequences + chunk}))


def step_traffic(prompt: int, new: int, max_sequences: int = 16, chunk: int = CHUNK) -> Traffic:
    """How often steps of each size come, while as many sequences as may are under way and a new one follows each that ends.

    Args:
        prompt, new: tokens of a sequence.
        max_sequences: sequences side by side.
        chunk: most tokens of a prompt in one step.

    In the time of one sequence, ``new`` steps, each of the ``max_sequences`` sequences has all chunks of its prompt once. A chunk
    runs beside the tokens of the others.

    >>> step_traffic(prompt=128, new=64, max_sequences=4).counts
    {(4,): 60.0, (132,): 4.0}
    """
    chunks = max_sequences * math.ceil(prompt / chunk)
    return Traffic((TOKENS,), {(max_sequences,): float(max(new - chunks, 0)), (max_sequences + chunk,): float(chunks)})

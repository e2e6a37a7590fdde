"""A decoder traced as a family of steps: one variant for each number of tokens, over one copy of the weights and caches."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace

import torch
from torch import nn

from autosplit.arguments import checked
from autosplit.devices import forkserver
from autosplit.errors import UsageError
from autosplit.generating.decoders import DecoderStep, cached
from autosplit.generating.sampling import Sampling
from autosplit.tracing.family import At, Family, trace_family
from autosplit.tracing.loading import load_model
from autosplit.values.sequences import Sequences
from autosplit.values.shapes import Traffic

TOKENS = "tokens"
"""The dimension of a step: its number of tokens."""

CHUNK = 128
"""Most tokens of a prompt in one step, beside those of sequences that go on."""

FOR_WORKERS = ("autosplit.generating.rows", "autosplit.generating.sampling")
"""Modules that every worker of a generator needs; ``rows`` with numba takes most of the time and memory of its start."""

PADDED = "the scheduler of the steps pads them, with tokens of slot 0"


@dataclass(frozen=True, eq=False)
class StepFamily(Family):
    """The traces of a step at several numbers of tokens.

    Attributes:
        sequences: those that the caches hold, and for which a plan is made.
        module: the model that was made into a step.
    """

    sequences: Sequences = field(default_factory=Sequences)
    module: nn.Module | None = field(repr=False, default=None)

    def own_names(self, found: Mapping[str, int]) -> dict[str, int]:
        """A map of modules and weights of the step by their names in ``module``, without what only the step has."""
        prefix = "decoder.model." if hasattr(self.module, "set_attn_implementation") else "decoder."
        return {name.removeprefix(prefix): value for name, value in found.items() if not name or name.startswith(prefix)}


@checked
def step_family(
    model: nn.Module,
    max_sequences: int = 16,
    max_length: int = 1024,
    chunk: int = CHUNK,
    *,
    prompt: int = 128,
    new: int = 64,
) -> StepFamily:
    """Trace a decoder as a family of steps.

    Args:
        model: a causal language model of transformers, or a module that calls ``autosplit.KVCache`` (see ``decoders``).
        max_sequences: sequences side by side.
        max_length: tokens of a sequence, prompt and new ones.
        chunk: most tokens of a prompt in one step, beside a token of each sequence.
        prompt, new: tokens of a usual prompt and of its answer; of more than ``max_length`` the first ones count.
    Returns: a family with the dimension ``tokens`` and a variant for each of ``step_sizes``. Its graph takes ids, slots,
        positions and sampling, and gives the next tokens (see ``DecoderStep``). The example of up to ``max_sequences`` tokens is
        one of each sequence, in the middle of a usual answer; that of more is a chunk of a prompt.
    Raises: UsageError: a number is below 1. ModelError: as ``cached``. TraceError: as ``trace_family``.
    """
    forkserver.preload(*FOR_WORKERS)
    prompt = min(prompt, max(max_length, 1))
    sequences = Sequences(prompt, min(new, max(max_length - prompt + 1, 1)), max_sequences, max_length)
    if chunk < 1:
        raise UsageError(f"chunk is {chunk}, and at least 1")
    allowed, middle = {TOKENS: step_sizes(max_sequences, chunk)}, min(prompt + sequences.new // 2, max_length - 1)
    step = DecoderStep(cached(model, max_sequences, max_length), max_sequences, max_length).eval()

    def inputs_at(at: At) -> tuple[torch.Tensor, ...]:
        count = at[TOKENS]
        order = torch.arange(count)
        decodes = count <= max_sequences
        slots = order + 1 if decodes else torch.zeros_like(order)
        positions = torch.full_like(order, middle) if decodes else order % max_length
        return order % 2, slots, positions, torch.tensor([Sampling().row], dtype=torch.float64).repeat(count, 1)

    loaded = replace(load_model(step, inputs=inputs_at({TOKENS: allowed[TOKENS][-1]})), name=type(model).__name__)
    axes = {name: {0: TOKENS} for name in ("ids", "slots", "positions", "sampling")}
    family = trace_family(loaded, axes, allowed, inputs_at)
    family = replace(family, out_dims={name: {} for name in family.graph.outputs}, unpaddable={TOKENS: PADDED})
    family = family.only([{TOKENS: size} for size in allowed[TOKENS][::-1]])
    given = {one.name: getattr(family, one.name) for one in fields(Family)}
    return StepFamily(**given, sequences=sequences, module=model)


def step_sizes(max_sequences: int, chunk: int = CHUNK) -> tuple[int, ...]:
    """The numbers of tokens for which there are variants: powers of two up to a token of each sequence, a chunk, and both.

    >>> step_sizes(max_sequences=6, chunk=100)
    (1, 2, 4, 6, 100, 106)
    """
    powers = [1 << power for power in range(max_sequences.bit_length())]
    return tuple(sorted({*powers, max_sequences, chunk, max_sequences + chunk}))


def step_traffic(sequences: Sequences, num_groups: int = 1, chunk: int = CHUNK) -> Traffic:
    """How often steps of each size come, while as many sequences as may are under way and a new one follows each that ends.

    Args:
        sequences: the sequences.
        num_groups: groups into which they are divided, as many as there are devices.
        chunk: most tokens of a prompt in one step, beside those of sequences that go on.

    In the time of one sequence each group has ``new`` steps, and all prompts are computed once. A step of the largest size takes
    a token of each sequence of a group, and tokens of prompts for the rest.

    >>> step_traffic(Sequences(prompt=128, new=64, max_sequences=4)).counts
    {(4,): 60.0, (132,): 4.0}
    """
    group, largest = sequences.largest_group(num_groups), sequences.max_sequences + chunk
    prefills = sequences.max_sequences * sequences.prompt / (largest - group)
    return Traffic((TOKENS,), {(group,): max(num_groups * sequences.new - prefills, 0.0), (largest,): prefills})

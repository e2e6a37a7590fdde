"""A model traced as a family of steps: one variant for each number of tokens, over one copy of the weights and caches.

Of an encoder-decoder, the variants of up to a token of each sequence hold tokens of answers alone. A larger one holds
``max_sequences`` such tokens, and rows of sources, which the encoder reads.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn

from autosplit.arguments import checked
from autosplit.devices import forkserver
from autosplit.errors import UsageError
from autosplit.generating.decoders import DecoderStep, cached
from autosplit.generating.encoders import EncoderDecoderStep, cached_encoder_decoder
from autosplit.generating.rewriting import EMBEDDED, table_of, without_lookup, without_source
from autosplit.generating.sampling import Sampling
from autosplit.generating.sources import Source
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import At, Family, trace_family
from autosplit.tracing.loading import load_model
from autosplit.values.sequences import Sequences

TOKENS = "tokens"
"""The dimension of a step: its number of tokens."""

CHUNK = 128
"""Most tokens of a prompt in one step, beside those of sequences that decode."""

ROWS = "rows"
"""Another dimension of the steps of an encoder-decoder, which follows from the number of tokens: rows of sources."""

OF_TOKENS = ("ids", "slots", "positions", "sampling")
"""The inputs of a step that hold a row for each token."""

OF_SOURCES = ("source", "source_slots", "source_positions")
"""The inputs of a step that hold a row for each row of a source."""

FOR_WORKERS = ("autosplit.generating.rows", "autosplit.generating.sampling", "autosplit.backends.rowloops")
"""Modules that every worker of a generator needs; those with numba take most of the time and memory of its start."""

PADDED = "the scheduler of the steps pads them, with tokens of slot 0"


@dataclass(frozen=True, eq=False)
class StepFamily(Family):
    """The traces of a step at several numbers of tokens.

    Attributes:
        sequences: those that the caches hold, and for which a plan is made.
        module: the model that was made into a step.
        source: the kind of prompts of a model with an encoder; None where prompts are tokens of the decoder.
        table: the weight whose rows the host gives to a step (see ``rewriting``); '' where a stage looks them up.
    """

    sequences: Sequences = field(default_factory=Sequences)
    module: nn.Module | None = field(repr=False, default=None)
    source: Source | None = None
    table: str = ""

    @property
    def notes(self) -> tuple[str, ...]:
        """As of any family, without those on padding, of which users of a generator see nothing."""
        return self.variants[0].notes

    @property
    def prefix(self) -> str:
        """What stands before the name of a module or weight of ``module`` in the step."""
        return "decoder.model." if hasattr(self.module, "set_attn_implementation") else "decoder."

    def own_names(self, found: Mapping[str, int]) -> dict[str, int]:
        """A map of modules and weights of the step by their names in ``module``, without those that only the step has."""
        named = {name: value for name, value in found.items() if not name or name.startswith(self.prefix)}
        return {name.removeprefix(self.prefix): value for name, value in named.items()}


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
        model: a causal language model of transformers, a T5 or Whisper, or a module that calls ``autosplit.KVCache`` (see
            ``decoders`` and ``encoders``).
        max_sequences: sequences side by side.
        max_length: tokens of a sequence, prompt and new ones; with an encoder tokens of an answer, and of a prompt.
        chunk: most tokens of a prompt in one step, beside a token of each sequence; an encoder reads whole prompts.
        prompt, new: tokens of a usual prompt and of its answer; of more than ``max_length`` the first ones count.
    Returns: a family with the dimension ``tokens`` and a variant for each of ``step_sizes``. Its graph takes ids, slots,
        positions and sampling, and gives the next tokens (see ``DecoderStep`` and ``EncoderDecoderStep``). The example of up to
        ``max_sequences`` tokens is one of each sequence, in the middle of a usual answer; that of more has such a token of half
        of the sequences, and beside them usual prompts, or the middle of a longer one. Where a table of embeddings is the head's,
        too, the graph takes the rows of the ids as well (see ``rewriting``).
    Raises: UsageError: a number is below 1. ModelError: as ``cached`` and ``cached_encoder_decoder``. TraceError: as
        ``trace_family``.
    """
    forkserver.preload(*FOR_WORKERS)
    prompt = min(prompt, max(max_length, 1))
    sequences = Sequences(prompt, min(new, max(max_length - prompt + 1, 1)), max_sequences, max_length)
    if chunk < 1:
        raise UsageError(f"chunk is {chunk} tokens, and must be at least 1")
    if has_encoder(model):
        return _with_encoder(model, sequences)
    allowed, middle = {TOKENS: step_sizes(max_sequences, chunk)}, min(prompt + sequences.new // 2, max_length - 1)
    step = DecoderStep(cached(model, max_sequences, max_length), max_sequences, max_length).eval()

    def inputs_at(at: At) -> tuple[torch.Tensor, ...]:
        order = torch.arange(at[TOKENS])
        decoding = len(order) if len(order) <= max_sequences else max_sequences // 2
        of_prompts = order - decoding
        number = (of_prompts // prompt).clamp(max=max_sequences - decoding - 1)
        start = max(0, prompt - len(order) + decoding) // 2  # the middle one of the chunks of a long prompt
        places = (of_prompts - number * prompt + start) % max_length
        slots = torch.where(order < decoding, order, decoding + number) + 1
        return order % 2, slots, torch.where(order < decoding, middle, places), _greedy(len(order))

    loaded = replace(load_model(step, inputs=inputs_at({TOKENS: allowed[TOKENS][-1]})), name=type(model).__name__)
    family = trace_family(loaded, {name: {0: TOKENS} for name in OF_TOKENS}, allowed, inputs_at)
    family = family.only([{TOKENS: size} for size in allowed[TOKENS][::-1]])
    table = table_of(family.variants[0])
    if table:
        variants, dims = tuple(map(without_lookup, family.variants)), {**family.dims, EMBEDDED: {0: TOKENS}}
        family = Family(variants, family.sizes, allowed, dims, {}, family.shapes)
    return _steps_of(family, sequences, model, table=table)


def has_encoder(model: nn.Module) -> bool:
    """Whether an encoder of the model reads the prompts, so that an answer has the whole length of the caches."""
    return getattr(getattr(model, "config", None), "is_encoder_decoder", False)


def _steps_of(
    family: Family, sequences: Sequences, model: nn.Module, source: Source | None = None, table: str = ""
) -> StepFamily:
    """A family as one of steps, which are padded by their scheduler alone."""
    family = replace(family, out_dims={name: {} for name in family.graph.outputs}, unpaddable={TOKENS: PADDED})
    given: dict[str, Any] = {one.name: getattr(family, one.name) for one in fields(Family)}
    return StepFamily(**given, sequences=sequences, module=model, source=source, table=table)


def _with_encoder(model: nn.Module, sequences: Sequences) -> StepFamily:
    """The steps of an encoder-decoder; errors as for ``step_family``."""
    most, length = sequences.max_sequences, sequences.max_length
    step = EncoderDecoderStep(cached_encoder_decoder(model, most, length), most, length).eval()
    source, middle = step.decoder.source, min(sequences.new // 2, length - 1)
    seen, rows = source.num_rows(sequences.prompt), source_sizes(source)
    decoding = step_sizes(most)
    allowed = {TOKENS: decoding, ROWS: (1, *rows)}

    def inputs_at(at: At) -> tuple[torch.Tensor, ...]:
        order, places = torch.arange(at[TOKENS]), torch.arange(at[ROWS])
        own = (order % 2, order + 1, torch.full_like(order, middle), _greedy(len(order)), torch.full_like(order, seen))
        return *own, torch.from_numpy(source.empty(len(places))), torch.zeros_like(places), places

    loaded = replace(load_model(step, inputs=inputs_at({TOKENS: most, ROWS: rows[-1]})), name=type(model).__name__)
    axes = {name: {0: TOKENS} for name in (*OF_TOKENS, "seen")} | {name: {0: ROWS} for name in OF_SOURCES}
    inner = trace_family(loaded, axes, allowed, inputs_at)
    silent: dict[int, Traced] = {}

    def make(sizes: At, num_draws: int = 0) -> Traced:
        count = sizes[TOKENS]
        if count > most:
            return inner.make({TOKENS: most, ROWS: count - most}, num_draws)
        if count not in silent:
            sources = inner.graph.inputs[-len(OF_SOURCES) :]
            silent[count] = without_source(inner.make({TOKENS: count, ROWS: 1}, num_draws), sources)
        return silent[count]

    sizes = (*decoding, *(most + count for count in rows))
    at = tuple({TOKENS: size} for size in sizes[::-1])
    dims = {name: {0: TOKENS} for name in axes}
    found = Family(tuple(map(make, at)), at, {TOKENS: sizes}, dims, {}, dims, make=make)
    return _steps_of(found, sequences, model, source)


def _greedy(num_tokens: int) -> torch.Tensor:
    """The input ``sampling`` of tokens whose next one is the likeliest."""
    return torch.tensor([Sampling().row], dtype=torch.float64).repeat(num_tokens, 1)


def source_sizes(source: Source) -> tuple[int, ...]:
    """The numbers of rows for which there are variants: a sound has one, texts a quarter and a sixteenth of the longest one, too.

    >>> source_sizes(Source(100, 4, 1, vocabulary=9)), source_sizes(Source(1500, 4, 1, num_bins=80))
    ((7, 25, 100), (1500,))
    """
    shares = (16, 4, 1) if source.is_text else (1,)
    return tuple(sorted({max(-(-source.max_rows // share), 2) for share in shares}))


def step_sizes(max_sequences: int, chunk: int = 0) -> tuple[int, ...]:
    """The numbers of tokens for which there are variants: powers of two up to a token of each sequence, a chunk, and both.

    Between them lies a quarter of a chunk, for a prompt that waits alone.

    >>> step_sizes(max_sequences=6, chunk=100), step_sizes(max_sequences=6)
    ((1, 2, 4, 6, 25, 100, 106), (1, 2, 4, 6))
    """
    powers = [1 << power for power in range(max_sequences.bit_length())]
    chunks = {size for size in (chunk // 4, chunk) if size > max_sequences} | ({chunk} if chunk else set())
    return tuple(sorted({*powers, max_sequences, max_sequences + chunk} | chunks))

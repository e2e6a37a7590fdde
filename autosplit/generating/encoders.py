"""Turn an encoder-decoder of transformers (T5, Whisper) into a step: prompts run through the encoder beside tokens of answers.

::

    source [M]    encoder -> keys and values of each cross-attention, kept by slot: once for each sequence
    ids    [N]    decoder: attends to its own earlier tokens, and to the rows of its source -> logits

The rows of several sources may stand in one step: each attends to those of its own slot. In a step without a source M is 1, a row
of slot 0.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch.nn.functional import conv1d, embedding, gelu, scaled_dot_product_attention

from autosplit.compat.models import distance_buckets
from autosplit.errors import ModelError
from autosplit.generating.attention import KVCache
from autosplit.generating.decoders import (
    CACHE,
    LENGTH,
    WAY_OUT,
    CachedDecoder,
    DecoderStep,
    Tokens,
    given,
    in_steps,
    require_same,
    running,
    use_attention,
)
from autosplit.generating.sampling import SAMPLE
from autosplit.generating.sources import Source

ATTENTION = "autosplit_encoder_decoder"
"""The name of our attention among those of transformers."""

KINDS = ("t5", "whisper")
"""The ``model_type`` of the models that become steps."""


class _Rows(NamedTuple):
    """The rows of a step's sources.

    Attributes:
        slots, positions: of each row, ``[M]``.
        together: whether two rows are of one sequence, ``[M, M]``.
        last: the last place of its source for each token of an answer, ``[N]``.
    """

    slots: torch.Tensor
    positions: torch.Tensor
    together: torch.Tensor
    last: torch.Tensor


_sources: ContextVar[_Rows] = ContextVar("rows of the sources of the step that runs")


class CachedEncoderDecoder(CachedDecoder):
    """A copy of an encoder-decoder of transformers, over the same weights, whose layers keep keys and values.

    Args:
        model: the model; it is not changed.
        max_sequences: sequences side by side.
        max_length: tokens of an answer, and of a prompt that is a text.
    Raises: ModelError: with the class that cannot be expressed, and the classes that can.

    Attributes:
        source: the kind of prompts.
        never, not_first, no_language: whether an answer never holds a token, does not begin with it, or does not have it where a
            language is detected, ``[vocabulary]``; None without such.
    """

    source: Source
    never: torch.Tensor | None
    not_first: torch.Tensor | None
    no_language: torch.Tensor | None

    def forward(  # type: ignore[override]
        self,
        ids: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        seen: torch.Tensor,
        source: torch.Tensor,
        source_slots: torch.Tensor,
        source_positions: torch.Tensor,
    ) -> torch.Tensor:
        """Logits ``[min(N, max_sequences), vocabulary]`` of the first tokens of a step; see ``EncoderDecoderStep``."""
        together = source_slots[:, None] == source_slots
        with given(running, Tokens(slots, positions)), given(_sources, _Rows(source_slots, source_positions, together, seen - 1)):
            if self.source.is_text:
                hidden = self.model.encoder(input_ids=source[None]).last_hidden_state
                places = {}
            else:
                hidden = _encoded_sound(self.model.model.encoder, source, source_positions)
                places = {"decoder_position_ids": positions[None]}
            logits: torch.Tensor = self.model(
                encoder_outputs=(hidden,), decoder_input_ids=ids[None], use_cache=False, **places
            ).logits
        return logits

    def without_suppressed(self, logits: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The logits with minus infinity for tokens that an answer does not hold after these positions."""
        if self.never is not None:
            logits = logits.masked_fill(self.never, float("-inf"))
        for place, refused in ((self.source.num_start - 1, self.not_first), (0, self.no_language)):
            if refused is not None:
                there = positions.index_select(0, torch.arange(logits.shape[0])) == place
                logits = logits.masked_fill(there[:, None] & refused, float("-inf"))
        return logits

    def _make_caches(self) -> None:
        self.source = source_of(self.model, self.max_sequences, self.max_length)
        settings, vocabulary = self.model.generation_config, range(self.model.config.vocab_size)
        refused = {
            "never": getattr(settings, "suppress_tokens", None) or (),
            "not_first": getattr(settings, "begin_suppress_tokens", None) or (),
            "no_language": {*vocabulary} - {*settings.lang_to_id.values()} if None in self.source.start else (),
        }
        for name, tokens in refused.items():
            known = [token for token in tokens if token in vocabulary]
            marks = torch.zeros(len(vocabulary), dtype=torch.bool).index_fill_(0, torch.tensor(known, dtype=torch.int64), True)
            self.register_buffer(name, marks if known else None, persistent=False)
        use_attention(self.model, ATTENTION, _attend_in_layer)
        caches: list[tuple[Any, int]] = []
        for part in self.model.modules():
            if not hasattr(part, "is_causal"):
                continue
            if part.is_decoder:
                caches.append((part, self.max_length if part.is_causal else self.source.max_rows))
            if getattr(part, "has_relative_attention_bias", False):
                part.compute_bias = _bias_of(part, self.max_length)
        for part, length in caches:
            heads, dim = (part.n_heads, part.key_value_proj_dim) if self.source.is_text else (part.num_heads, part.head_dim)
            dtype = next(part.parameters()).dtype
            setattr(part, CACHE, KVCache(self.max_sequences, length, heads, dim, dtype=dtype))


def source_of(model: Any, max_sequences: int, max_length: int) -> Source:
    """The kind of prompts of a model. Raises: ModelError: its kind is not known."""
    config, settings = model.config, model.generation_config
    if config.model_type not in KINDS:
        raise ModelError(
            f"model '{type(model).__name__}' has an encoder, and of encoder-decoders only T5 and Whisper run with caches so far. "
            f"{WAY_OUT}"
        )
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    begins = [getattr(one, name, None) for name in names for one in (settings, config)]
    start: list[int | None] = [token for token in begins if token is not None][:1]
    if config.model_type == "t5":
        return Source(max_length, max_sequences, 1, tuple(start), vocabulary=config.vocab_size)
    start += _after_beginning(settings, config)
    return Source(config.max_source_positions, max_sequences, len(start), tuple(start), num_bins=config.num_mel_bins)


def _after_beginning(settings: Any, config: Any) -> list[int | None]:
    """The tokens behind the first one of an answer of Whisper: the language, the task, and that there are no timestamps.

    As in ``generate`` of transformers, forced tokens count where the settings name neither a language nor a task. None stands for
    a language that is to be detected.
    Raises: ModelError: the language or the task is not one of the model.
    """
    languages, tasks = (getattr(settings, name, None) or {} for name in ("lang_to_id", "task_to_id"))
    language, task = (getattr(settings, name, None) for name in ("language", "task"))
    forced = getattr(settings, "forced_decoder_ids", None) or getattr(config, "forced_decoder_ids", None) or ()
    found: list[int | None] = []
    if language is None and task is None:
        found += [token for _, token in sorted(forced, key=itemgetter(0)) if languages or token is not None]
    if languages and not found:
        found = [None if language is None else _token_of(language, languages, f"<|{language.lower()}|>")]
    if tasks and (language, task) != (None, None):
        found.append(_token_of(task or "transcribe", tasks, ""))
    end = getattr(settings, "no_timestamps_token_id", None)
    return found if end is None or end in found else [*found, end]


def _token_of(name: str, known: Mapping[str, int], other: str) -> int:
    """The token of a language or a task. Raises: ModelError: there is none."""
    token = known.get(name, known.get(other))
    if token is None:
        raise ModelError(f"the generation config of the model names '{name}', and its tokens are of {', '.join(sorted(known))}")
    return token


def _encoded_sound(encoder: Any, source: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The rows ``[1, M, size]`` of Whisper's encoder for windows ``[M, num_bins, WINDOW]`` of frames.

    Its first convolution gives three columns for a window, and its second one makes a row of them. The first column of the first
    row lies before the sound, where the second convolution sees zeros.
    """
    columns = gelu(conv1d(source, encoder.conv1.weight, encoder.conv1.bias))
    before = (positions[:, None, None] == 0) & (torch.arange(columns.shape[2]) == 0)
    rows = gelu(conv1d(columns.masked_fill(before, 0.0), encoder.conv2.weight, encoder.conv2.bias)).squeeze(2)
    hidden = (rows + encoder.embed_positions(positions))[None]
    for layer in encoder.layers:
        hidden = layer(hidden, None)
    found: torch.Tensor = encoder.layer_norm(hidden)
    return found


def _bias_of(layer: Any, max_length: int) -> Callable[..., torch.Tensor]:
    """The function in place of ``compute_bias`` of a layer of T5.

    Of a decoder: ``[heads, max_length]``, for each distance to an earlier token. Of an encoder: ``[1, heads, M, M]``, with minus
    infinity between rows of two sequences.
    """

    most = layer.relative_attention_max_distance  # all beyond it are in one bucket
    distances = -torch.arange(max_length) if layer.is_decoder else torch.arange(-most, most + 1)
    layer.register_buffer("buckets", distance_buckets(layer, distances, not layer.is_decoder), persistent=False)

    layer.register_buffer("places", torch.arange(max_length), persistent=False)

    def decoding(*_: Any, **__: Any) -> torch.Tensor:
        found: torch.Tensor = layer.relative_attention_bias(layer.buckets)
        return found.transpose(0, 1)

    def encoding(*_: Any, **__: Any) -> torch.Tensor:
        rows = _sources.get()
        positions = layer.places.index_select(0, rows.positions)  # so backends know that they are below max_length
        places = (positions - positions[:, None]).clamp(-most, most) + most
        bias = embedding(places, layer.relative_attention_bias(layer.buckets)).permute(2, 0, 1)[None]
        found: torch.Tensor = bias.masked_fill(~rows.together, float("-inf"))
        return found

    return decoding if layer.is_decoder else encoding


def _attend_in_layer(
    layer: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    position_bias: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of a layer: of the encoder among rows of a source, of the decoder through its cache."""
    if attention_mask is not None:
        raise ModelError(f"layer '{type(layer).__name__}' has an attention_mask, which no cache takes. {WAY_OUT}")
    rows, tokens = _sources.get(), running.get()
    if not layer.is_decoder:
        mask = rows.together if position_bias is None else position_bias
        return scaled_dot_product_attention(query, key, value, mask, scale=scaling).transpose(1, 2), None
    cache: KVCache = getattr(layer, CACHE)
    if layer.is_causal:
        return cache(query, key, value, tokens.slots, tokens.positions, scale=scaling, bias=position_bias), None
    return cache(query, key, value, tokens.slots, rows.last, scale=scaling, kept=(rows.slots, rows.positions)), None


def cached_encoder_decoder(model: Any, max_sequences: int, max_length: int) -> CachedEncoderDecoder:
    """The model as a step, tried on two sequences with sources of two lengths, whole and token by token.

    Raises: ModelError: as ``CachedEncoderDecoder``, or the logits differ.
    """
    found = CachedEncoderDecoder(model, max_sequences, max_length)
    source, numbers = found.source, torch.Generator().manual_seed(0)
    sequences = [ids[:max_length] for ids in (torch.arange(LENGTH), torch.arange(LENGTH).flip(0))][:max_sequences]
    if source.is_text:
        prompts = [torch.arange(LENGTH - 2 * number)[: source.max_rows] for number in range(len(sequences))]
    else:
        prompts = [torch.randn(source.num_bins, 2 * source.max_rows, generator=numbers) for _ in sequences]
    rows = [torch.from_numpy(source.rows(prompt)) for prompt in prompts]
    waiting = [rows]  # the sources stand in the first step alone

    def step(ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        some = waiting.pop() if waiting else []
        owners = [torch.full((len(one),), slot) for slot, one in enumerate(some, 1)]
        places = [torch.arange(len(one)) for one in some]
        given_rows = [torch.cat(parts) if parts else torch.zeros(1, dtype=torch.int64) for parts in (owners, places)]
        stood = torch.cat(some) if some else torch.from_numpy(source.empty(1))
        seen = torch.tensor([len(one) for one in rows])[slots - 1]
        logits: torch.Tensor = found(ids, slots, positions, seen, stood, *given_rows)
        return logits

    name = "input_ids" if source.is_text else "input_features"
    with torch.inference_mode():
        wanted = [
            model(**{name: prompt[None]}, decoder_input_ids=ids[None], use_cache=False).logits[0, -1]
            for prompt, ids in zip(prompts, sequences, strict=True)
        ]
        made = in_steps(step, sequences)
        for part in found.modules():
            if isinstance(part, KVCache):
                part.keys[: len(sequences) + 1] = part.values[: len(sequences) + 1] = 0
    require_same(type(model).__name__, made, torch.stack(wanted))
    return found


class EncoderDecoderStep(DecoderStep):
    """An encoder-decoder with the choice of next tokens at its end; arguments as for ``DecoderStep``."""

    decoder: CachedEncoderDecoder

    def forward(  # type: ignore[override]
        self,
        ids: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        sampling: torch.Tensor,
        seen: torch.Tensor,
        source: torch.Tensor,
        source_slots: torch.Tensor,
        source_positions: torch.Tensor,
    ) -> torch.Tensor:
        """The next tokens ``[min(N, max_sequences)]`` of the first tokens of a step; -1 where logits are not finite.

        Args:
            ids, slots, positions, sampling: tokens of answers, as for ``DecoderStep``.
            seen: int64 ``[N]``, the rows of the source of each token's sequence, at least 1.
            source: rows of sources, int64 ``[M]`` or float32 ``[M, num_bins, WINDOW]``.
            source_slots, source_positions: int64 ``[M]``. Padding is zeros, in slot 0.
        """
        logits = self.decoder(ids, slots, positions, seen, source, source_slots, source_positions)
        logits = self.decoder.without_suppressed(logits, positions)
        found: torch.Tensor = SAMPLE(logits, self.history, ids, slots, positions, sampling)
        return found

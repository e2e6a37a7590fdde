"""Turn a decoder into a step: a module that runs N tokens of any sequences and gives their next tokens.

A model of transformers gets an attention of ours (``AttentionInterface``), which finds the cache in the layer and the places of
the tokens beside the call. A module of the user's own calls ``autosplit.KVCache`` itself::

    class Mine(nn.Module):
        def forward(self, ids, slots, positions):   # each [N], int64
            ...
            x = self.cache(q, k, v, slots, positions)   # a KVCache for each layer
            ...
            return logits                            # [N, vocabulary], or rows of the first min(N, max_sequences) tokens alone
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import nn

from autosplit.compat.models import attention_of
from autosplit.errors import ModelError
from autosplit.generating.attention import KVCache, require_memory
from autosplit.generating.sampling import SAMPLE

ATTENTION = "autosplit"
"""The name of our attention among those of transformers; it has no entry in their table of masks, so none is made."""

CACHE = "kv_cache"
"""The attribute of an attention layer that holds its cache."""

REFUSED = ("s_aux", "position_bias", "head_mask", "block_table")
"""Arguments of attentions of transformers that change scores in ways that the operator lacks."""

LENGTH = 6
"""Tokens of the sequences on which a decoder is tried."""

TOLERANCE = 1e-3
"""Largest error of logits with a cache against those without, as a share of the largest logit, in f32; 30 times that below."""

WAY_OUT = (
    "Give a module of your own that calls autosplit.KVCache, or run the model without a cache, which computes whole sequences "
    "again for each token: autosplit.run."
)


_sym_min: Any = torch.sym_min  # it has no types


class Tokens(NamedTuple):
    """The places of the tokens of a step."""

    slots: torch.Tensor
    positions: torch.Tensor


running: ContextVar[Tokens] = ContextVar("tokens of the step that runs")
_sizes: ContextVar[tuple[int, int]] = ContextVar("sequences and length of the caches that layers get at their first call")


class CachedDecoder(nn.Module):
    """A copy of a causal language model of transformers, over the same weights, whose layers keep keys and values.

    Args:
        model: the model; it is not changed.
        max_sequences: sequences side by side.
        max_length: tokens of a sequence.
    Raises: ModelError: with the class that cannot be expressed, and the classes that can.
    """

    def __init__(self, model: Any, max_sequences: int, max_length: int) -> None:
        super().__init__()
        _require_decoder(model, max_length)
        shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
        self.model = copy.deepcopy(model, shared).eval()
        _turn_weights(self.model)
        self.max_sequences, self.max_length = max_sequences, max_length
        self.model.get_output_embeddings().register_forward_pre_hook(self._first_rows)
        self._make_caches()
        if not any(isinstance(part, KVCache) for part in self.model.modules()):
            raise ModelError(
                f"model '{type(model).__name__}' computes no attention through AttentionInterface of transformers. {WAY_OUT}"
            )

    def forward(self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Logits ``[min(N, max_sequences), vocabulary]`` of the first tokens of a step."""
        with given(running, Tokens(slots, positions)):
            logits: torch.Tensor = self.model(input_ids=ids[None], position_ids=positions[None], use_cache=False).logits
        return logits

    def _make_caches(self) -> None:
        """Let each layer attend through a cache, which it gets at its first call."""
        use_attention(self.model, ATTENTION, _attend_in_layer)
        with torch.no_grad(), given(_sizes, (self.max_sequences, self.max_length)):
            self(*[torch.zeros(1, dtype=torch.int64)] * 3)

    def _first_rows(self, head: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The input ``[min(N, max_sequences), size]`` of the head for those tokens alone.

        Without the batch of one: torch views three dimensions as two for a product, by a rule that does not hold for one token.
        """
        hidden, *others = args
        rows = torch.arange(_sym_min(hidden.shape[1], self.max_sequences), device=hidden.device)
        return hidden.squeeze(0).index_select(0, rows), *others


def _turn_weights(model: nn.Module) -> None:
    """Replace each ``Conv1D`` of GPT-2, whose weight is that of a linear layer turned, by such a layer, as in other models."""
    from transformers.pytorch_utils import Conv1D

    for name, part in list(model.named_modules()):
        if isinstance(part, Conv1D):
            linear = nn.Linear(1, 1, device="meta")
            linear.in_features, linear.out_features = part.weight.shape
            linear.weight, linear.bias = nn.Parameter(part.weight.detach().T.contiguous()), part.bias
            model.set_submodule(name, linear)


def cached(model: nn.Module, max_sequences: int, max_length: int) -> nn.Module:
    """A module ``forward(ids, slots, positions) -> logits`` of a decoder: a model of transformers, or one that is such a module.

    It is tried on two short sequences, whole and token by token, and must give the same logits.
    Raises: ModelError: a part of the model cannot be expressed, a cache has other sizes, or the logits differ.
    """
    name = type(model).__name__
    if hasattr(model, "set_attn_implementation"):
        found: nn.Module = CachedDecoder(model, max_sequences, max_length)
    else:
        found = model
        _require_caches(model, max_sequences, max_length)

    def last_logits(ids: torch.Tensor) -> torch.Tensor:
        """The logits of the last token of a sequence that is computed whole."""
        if found is not model:
            logits: torch.Tensor = model(input_ids=ids[None], use_cache=False).logits[0, -1]
            return logits
        order = torch.arange(len(ids)).flip(0)
        return _logits(found, ids[order], torch.ones_like(ids), order)[0]

    sequences = [torch.arange(LENGTH), torch.arange(LENGTH).flip(0)][:max_sequences]
    sequences = [ids[:max_length] for ids in sequences]
    with torch.inference_mode():
        wanted = torch.stack([last_logits(ids) for ids in sequences])
        made = in_steps(found, sequences)
        for part in found.modules():
            if isinstance(part, KVCache):  # a trace reads rows that it did not write, and finds zeros as a worker does
                part.keys[:, :, :LENGTH] = part.values[:, :, :LENGTH] = 0
    require_same(name, made, wanted)
    return found


def require_same(name: str, made: torch.Tensor, wanted: torch.Tensor) -> None:
    """Raises: ModelError: the logits of a model in steps are not those that it computes of whole sequences, or not finite."""
    if not (wanted.isfinite().all() and made.isfinite().all()):  # torch's attention gives 0 for NaN in queries
        raise ModelError(f"model '{name}' computes logits that are not finite; check its weights and its precision")
    error, largest = float((made - wanted).abs().max()), float(wanted.abs().max())
    allowed = TOLERANCE * (1 if wanted.dtype == torch.float32 else 30)
    if not error <= allowed * largest:
        raise ModelError(
            f"model '{name}' computes other logits token by token than whole (by {error:.2g}, the largest is {largest:.2g}): a "
            f"part of it beside attention mixes tokens, or its attention sees more than earlier tokens. {WAY_OUT}"
        )


def in_steps(step: Callable[..., torch.Tensor], sequences: Sequence[torch.Tensor]) -> torch.Tensor:
    """The logits of the last tokens of sequences of one length: their first half in one step, then a step a token."""
    length, slots = len(sequences[0]), torch.arange(1, len(sequences) + 1)
    half = max(1, length // 2)
    for start, end in ((0, half), *((place, place + 1) for place in range(half, length))):
        positions = torch.arange(start, end).flip(0).repeat_interleave(len(slots))
        ids = torch.stack([one[start:end].flip(0) for one in sequences], 1).flatten()
        made = step(ids, slots.repeat(end - start), positions)
    return made[: len(slots)]


def _logits(found: nn.Module, *tokens: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = found(*tokens)
    return logits


def _require_caches(model: nn.Module, max_sequences: int, max_length: int) -> None:
    """Raises: ModelError: the module holds no cache, or one of other sizes."""
    caches = [part for part in model.modules() if isinstance(part, KVCache)]
    name = type(model).__name__
    if not caches:
        raise ModelError(f"model '{name}' holds no autosplit.KVCache, so it keeps nothing between steps. {WAY_OUT}")
    for part in caches:
        slots, _, length, _ = part.keys.shape
        if (slots, length) != (max_sequences + 1, max_length):
            raise ModelError(
                f"model '{name}' holds a cache for {slots - 1} sequences of {length} tokens, and {max_sequences} of {max_length} "
                "are asked for; give it a KVCache(max_sequences, max_length, ...)"
            )


def _require_decoder(model: Any, max_length: int) -> None:
    """Raises: ModelError: it has no head, or too few positions."""
    name, config = type(model).__name__, model.config
    if model.get_output_embeddings() is None:
        raise ModelError(f"model '{name}' has no output embeddings, so it gives no next tokens; use its class for CausalLM")
    longest = getattr(config, "max_target_positions", getattr(config.get_text_config(), "max_position_embeddings", None))
    if longest is not None and max_length > longest:
        raise ModelError(
            f"model '{name}' takes {longest} positions, and max_length is {max_length}; give max_length={longest} "
            f"(--generate max_length={longest})"
        )


def use_attention(model: Any, name: str, attention: Callable[..., Any]) -> None:
    """Let each layer attend by a function of this name. Raises: ModelError: a class computes attention by itself."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
    model.set_attn_implementation(name)
    if attention_of(model) != name:
        raise ModelError(f"model '{type(model).__name__}' computes attention by itself, without AttentionInterface. {WAY_OUT}")


def _attend_in_layer(
    layer: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """The attention of a layer of transformers, through its cache; the layer gets one at its first call."""
    faults = [name for name in REFUSED if others.get(name) is not None]
    faults += ["attention_mask"] * (attention_mask is not None)
    faults += ["attention in both directions"] * (not getattr(layer, "is_causal", True) or others.get("is_causal") is False)
    if faults:
        raise ModelError(f"layer '{type(layer).__name__}' has {', '.join(faults)}, which no cache takes. {WAY_OUT}")
    if not hasattr(layer, CACHE):
        setattr(layer, CACHE, KVCache(*_sizes.get(), key.shape[1], key.shape[3], value.shape[3], key.dtype))
    tokens = running.get()
    cache: KVCache = getattr(layer, CACHE)
    return cache(query, key, value, *tokens, scale=scaling, window=sliding_window, softcap=softcap), None


@contextmanager
def given(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """Set a context variable for a block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


class DecoderStep(nn.Module):
    """A decoder with the choice of next tokens at its end.

    Args:
        decoder: as made by ``cached``.
        max_sequences: sequences side by side.
        max_length: tokens of a sequence.
    Raises: UsageError: the caches of all layers are larger than the memory of this machine.
    """

    history: torch.Tensor

    def __init__(self, decoder: nn.Module, max_sequences: int, max_length: int) -> None:
        super().__init__()
        self.decoder, self.max_sequences = decoder, max_sequences
        caches = [part for part in decoder.modules() if isinstance(part, KVCache)]
        require_memory(sum(part.keys.nbytes + part.values.nbytes for part in caches), max_sequences, max_length)
        self.register_buffer("history", torch.zeros(max_sequences + 1, max_length, dtype=torch.int64), persistent=False)

    def forward(self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, sampling: torch.Tensor) -> torch.Tensor:
        """The next tokens ``[min(N, max_sequences)]`` of the first tokens of a step; -1 where logits are not finite.

        Args:
            ids, slots, positions: int64 ``[N]``. Padding is zeros, in slot 0.
            sampling: float64 ``[N, 5]``, ``Sampling.row`` of each token.
        """
        logits = _logits(self.decoder, ids, slots, positions)
        if not isinstance(self.decoder, CachedDecoder):  # which gives no others
            logits = logits.index_select(0, torch.arange(_sym_min(len(ids), self.max_sequences), device=logits.device))
        found: torch.Tensor = SAMPLE(logits, self.history, ids, slots, positions, sampling)
        return found

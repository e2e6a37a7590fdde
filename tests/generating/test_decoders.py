"""Decoders as steps give the tokens of ``generate``; what cannot be a step is refused in a sentence."""

from contextlib import nullcontext

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import autosplit
from autosplit.errors import ModelError, UsageError
from autosplit.generating.decoders import CachedDecoder, DecoderStep, cached
from tests.generating.decodermodels import DECODERS, SMALL, decoder, generated, greedy, prompts

SEQUENCES, LENGTH = 3, 80


@pytest.mark.parametrize("name", DECODERS)
def test_tokens_of_prompts_of_mixed_lengths_equal_generate(name):
    """64 tokens for each prompt, past the window of models that have one; the model itself stays as it is.

    ``generate`` makes the first ones. All of them are the likeliest ones where the model reads prompt and tokens at once,
    which is much faster.
    """
    model = decoder(name)
    asked = prompts(3, 11, 7)
    found = cached(model, SEQUENCES, LENGTH)
    with torch.inference_mode():
        made = greedy(lambda *tokens: found(*tokens).argmax(-1), asked, 64)
        for prompt, tokens in zip(asked, made, strict=True):
            likeliest = model(torch.tensor([prompt + tokens])).logits[0].argmax(-1)
            assert tokens == likeliest[len(prompt) - 1 : -1].tolist()
    assert generated(model, asked[1], 8) == made[1][:8]
    assert not any(state.any() for state in cached(model, SEQUENCES, LENGTH).buffers() if state.dim() == 4)
    ours, its = ({id(weight) for weight in one.parameters()} for one in (found, model))
    assert len(ours) == len(its) and len(ours - its) == sum(isinstance(part, Conv1D) for part in model.modules())


def test_the_head_runs_on_the_rows_whose_next_token_is_wanted():
    step = CachedDecoder(decoder("LlamaForCausalLM"), SEQUENCES, LENGTH)
    for tokens, rows in ((1, 1), (3, 3), (20, 3)):
        with torch.inference_mode():
            assert step(*[torch.zeros(tokens, dtype=torch.int64)] * 3).shape == (rows, 97)


class Own(nn.Module):
    """A decoder of a user's own: one layer of attention between an embedding and a head."""

    def __init__(self, sequences=SEQUENCES, length=LENGTH, mixes=False, bias=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head, self.mixes = nn.Embedding(97, 16), nn.Linear(16, 97), mixes
        self.cache = autosplit.KVCache(sequences, length, num_heads=2, head_dim=8)
        self.bias = bias

    def forward(self, ids, slots, positions):
        hidden = self.embed(ids)
        heads = hidden.unflatten(1, (2, 8)).transpose(0, 1)[None]
        hidden = hidden + self.cache(heads, heads, heads, slots, positions)[0].flatten(1)
        return self.head(hidden + hidden.mean(0) * self.mixes) + self.bias


def test_a_module_of_the_users_own_is_a_step():
    """Tokens by the step equal those of the same module with plain attention over whole sequences."""
    module = cached(Own(), SEQUENCES, LENGTH)
    asked = prompts(2, 9)

    def plain(ids):
        heads = module.embed(torch.tensor(ids)).unflatten(1, (2, 8)).transpose(0, 1)[None]
        attended = nn.functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
        return int(module.head((heads + attended)[0, :, -1].flatten()).argmax())

    with torch.inference_mode():
        made = greedy(lambda *tokens: module(*tokens).argmax(-1), asked, 5)
        for prompt, found in zip(asked, made, strict=True):
            for token in found:
                assert token == plain(prompt)
                prompt.append(token)


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: Own(mixes=True), "'Own' computes other logits token by token than whole"),
        (lambda: Own(length=9), f"'Own' holds a cache for 3 sequences of 9 tokens, and 3 of {LENGTH} are asked for"),
        (lambda: nn.Linear(2, 2), "'Linear' holds no autosplit.KVCache"),
        (lambda: Own(bias=float("inf")), "'Own' computes logits that are not finite"),
        (
            lambda: _with_nan_queries(_of("Llama", max_position_embeddings=128)),
            "'LlamaForCausalLM' computes logits that are not finite",
        ),
        (
            lambda: _of("Llama", max_position_embeddings=64),
            r"takes 64 positions, and max_length is 80; give max_length=64 \(--generate max_length=64\)",
        ),
        (lambda: _of("GptOss", num_local_experts=2, head_dim=8, num_key_value_heads=2), "layer 'GptOssAttention' has s_aux"),
        (lambda: _of("Bloom", n_layer=1, n_head=2), "'BloomForCausalLM' computes attention by itself"),
        (lambda: _of("Mamba", state_size=4), "'MambaForCausalLM' computes no attention through AttentionInterface"),
        (lambda: transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1)), "has no output embeddings"),
    ],
)
def test_what_cannot_be_a_step_is_refused(model, reason):
    with pytest.raises(ModelError, match=reason) as refusal:
        cached(model().eval(), SEQUENCES, LENGTH)
    assert any(word in str(refusal.value).lower() for word in ("give", "use", "check"))


def test_caches_beyond_the_memory_of_the_machine_are_refused(monkeypatch):
    """One layer's before torch asks for them, those of all layers before they fill."""
    with pytest.raises(UsageError, match=r"for 1000000 sequences of 1000000 tokens take .*, and this machine has .* of memory"):
        autosplit.KVCache(10**6, 10**6, 1, 64)
    decoder = cached(Own(), SEQUENCES, LENGTH)
    cache_bytes = decoder.cache.keys.nbytes + decoder.cache.values.nbytes
    for num_bytes, refused in ((cache_bytes, False), (cache_bytes - 1, True)):
        monkeypatch.setattr("autosplit.generating.attention.memory_limit_bytes", lambda num_bytes=num_bytes: num_bytes)
        with pytest.raises(UsageError, match=f"for {SEQUENCES} sequences of {LENGTH} tokens") if refused else nullcontext():
            DecoderStep(decoder, SEQUENCES, LENGTH)


def _of(family, **fields):
    config = getattr(transformers, f"{family}Config")(**{**SMALL, "num_hidden_layers": 1, **fields})
    return getattr(transformers, f"{family}ForCausalLM")(config)


def _with_nan_queries(model):
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.weight[0] = float("nan")
    return model

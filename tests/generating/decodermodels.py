"""Tiny decoders of transformers with random weights, and their tokens by ``generate``."""

import os
import random
import signal
from contextlib import suppress
from typing import Any

import torch
import transformers

SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2}
WINDOW = {**GROUPED, "sliding_window": 7}
GEMMA = {**WINDOW, "head_dim": 8, "query_pre_attn_scalar": 8}

DECODERS = {
    "LlamaForCausalLM": GROUPED,
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "MistralForCausalLM": WINDOW,
    "Gemma2ForCausalLM": GEMMA,
    "Gemma3ForCausalLM": GEMMA,
    "GPT2LMHeadModel": {"vocab_size": 97, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "GPTNeoXForCausalLM": SMALL,
    "PhiForCausalLM": SMALL,
    "OPTForCausalLM": {**SMALL, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "MixtralForCausalLM": {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Class to the fields of its config."""


def decoder(name: str, **fields: Any) -> torch.nn.Module:
    """A decoder of this class, with further fields of its config; no token ends its sequences."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(**DECODERS[name], **fields, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    return model_class(config).eval()


def prompts(*lengths: int) -> list[list[int]]:
    """Prompts of these lengths."""
    numbers = torch.Generator().manual_seed(1)
    return [torch.randint(1, 97, (length,), generator=numbers).tolist() for length in lengths]


def generated(model: torch.nn.Module, prompt: list[int], new: int) -> list[int]:
    """The greedy tokens after a prompt, by ``generate`` of transformers."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return found[0, len(prompt) :].tolist()


def greedy(step, asked: list[list[int]], new: int) -> list[list[int]]:
    """The tokens after prompts that run side by side: whole prompts in one step, then a token of each in each step.

    ``step`` takes ids, slots and positions, and returns a tensor with the next token of each of the first rows.
    """
    last = [(ids[-1], slot, len(ids) - 1) for slot, ids in enumerate(asked, 1)]
    rows = last + [(token, slot, place) for slot, ids in enumerate(asked, 1) for place, token in enumerate(ids[:-1])]
    made: list[list[int]] = [[] for _ in asked]
    for _ in range(new):
        tokens = step(*(torch.tensor(column) for column in zip(*rows, strict=True)))
        for found, token in zip(made, tokens.tolist(), strict=False):
            found.append(token)
        rows = [(found[-1], row[1], row[2] + len(found)) for found, row in zip(made, last, strict=True)]
    return made


def answers_under_kills(generator, asked, num_new):
    """The new tokens after each prompt, while a worker is killed before each answer is awaited, unless it is dead still."""
    futures, chosen = [generator.submit(prompt, max_new_tokens=num_new) for prompt in asked], random.Random(0)
    for future in futures:
        with suppress(ProcessLookupError):
            os.kill(chosen.choice(generator.pipeline.pids), signal.SIGKILL)
        future.result()
    return [future.result() for future in futures]

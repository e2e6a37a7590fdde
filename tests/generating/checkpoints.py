"""A tiny checkpoint with a tokenizer, in a folder."""

from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.generating.decodermodels import SMALL

SENTENCES = ["a plan is cut into stages", "each stage runs on a core", "keys and values stay in the stages: 中文 é"]
TEMPLATE = "{% for one in messages %}{{ one.role }}: {{ one.content }}\n{% endfor %}assistant:"


def tokenizer() -> PreTrainedTokenizerFast:
    """Byte pairs of a few sentences, so that any text can be written."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False)
    found.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=found, eos_token="<end>", chat_template=TEMPLATE)


def save_checkpoint(folder: Path) -> LlamaForCausalLM:
    """A Llama with random weights, saved beside its tokenizer."""
    import torch

    texts = tokenizer()
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**SMALL, "num_hidden_layers": 1, "vocab_size": len(texts)}, bos_token_id=None, eos_token_id=texts.eos_token_id
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    texts.save_pretrained(folder)
    return model

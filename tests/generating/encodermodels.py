"""Tiny encoder-decoders of transformers with random weights, whose answers depend on their prompts, and ``generate`` of them."""

import torch
import transformers

ENCODERS = {
    "T5ForConditionalGeneration": {
        "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0,
        "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, "pad_token_id": 0,
    },
    "WhisperForConditionalGeneration": {
        "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_mel_bins": 6, "pad_token_id": 0,
        "max_source_positions": 12, "max_target_positions": 64, "decoder_start_token_id": 1, "bos_token_id": None,
        "init_std": 0.4,
    },
}  # fmt: skip
"""Class to the fields of its config."""


def encoder_decoder(name: str) -> torch.nn.Module:
    """A model of this class; no token ends its sequences. Its weights are such that tokens vary."""
    model_class = getattr(transformers, name)
    config = model_class.config_class(**ENCODERS[name], eos_token_id=None)
    torch.manual_seed(0)
    model = model_class(config).eval()
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn(head.weight.shape))
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if name.startswith("T5") and ".block." in weight_name and weight.dim() == 2:
                weight *= 9.0 if "relative" in weight_name else 3.0
    if name.startswith("Whisper"):  # of several languages; of tokens that it would take otherwise
        settings = model.generation_config
        settings.suppress_tokens, settings.begin_suppress_tokens = [30], [73]
        settings.is_multilingual, settings.return_timestamps, settings.no_timestamps_token_id = True, False, 96
        settings.lang_to_id, settings.task_to_id = {"<|en|>": 40, "<|de|>": 41, "<|la|>": 42}, {"transcribe": 50, "translate": 51}
        settings.forced_decoder_ids = [[1, None], [2, 50]]
    return model


def sources(name: str, *lengths: int) -> list[list[int] | torch.Tensor]:
    """Prompts of these lengths, or as many sounds."""
    numbers, fields = torch.Generator().manual_seed(2), ENCODERS[name]
    if "num_mel_bins" in fields:
        shape = fields["num_mel_bins"], 2 * fields["max_source_positions"]
        return [torch.randn(shape, generator=numbers) for _ in lengths]
    return [torch.randint(1, 97, (length,), generator=numbers).tolist() for length in lengths]


def answered(model: torch.nn.Module, prompt: list[int] | torch.Tensor, new: int) -> list[int]:
    """The greedy tokens of an answer, by ``generate`` of transformers."""
    given = prompt[None] if isinstance(prompt, torch.Tensor) else torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(given, max_new_tokens=new, do_sample=False)
    return found[0, -new:].tolist()

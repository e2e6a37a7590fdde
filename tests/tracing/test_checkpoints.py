"""Checkpoints: their own weights run; what is missing, pickled, or needs code of others is refused in a sentence."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers

import autosplit
from autosplit.errors import ModelError
from autosplit.tracing.loading import load_model

SMALL = transformers.BertConfig(
    hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64, vocab_size=100, max_position_embeddings=16
)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Path, Any]:
    """A checkpoint of a small BERT, and the model."""
    torch.manual_seed(7)
    model = transformers.BertForSequenceClassification(SMALL).eval()
    model.save_pretrained(tmp_path / "bert")
    return tmp_path / "bert", model


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_a_checkpoint_runs_with_its_own_weights_and_the_trace_says_so(
    saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = saved
    monkeypatch.chdir(folder.parent)
    for spec in (f"transformers:{folder}", "transformers:./bert?attn_implementation=eager", "transformers:bert"):
        traced = autosplit.trace(spec, batch=2, seq_len=5)
        ids, mask = torch.randint(100, (2, 5)), torch.ones(2, 5, dtype=torch.int64)
        with torch.inference_mode():
            assert torch.allclose(traced.run(input_ids=ids, attention_mask=mask)[0], model(ids, mask).logits, atol=1e-5)
        assert traced.source.spec == spec and traced.graph.name == "BertForSequenceClassification"
        assert any("weights: those of 'transformers:" in note and "in 1 safetensors files" in note for note in traced.notes)


def test_random_weights_are_said_loudly_and_first() -> None:
    traced = autosplit.trace("transformers:BertModel?hidden_size=32&num_hidden_layers=1&num_attention_heads=2&vocab_size=90")
    assert traced.notes[0].startswith("RANDOM WEIGHTS: 'transformers:BertModel' has no trained weights")
    assert not autosplit.trace("autosplit.examples.mlp:mlp?depth=2&width=8").notes


def test_what_is_not_a_whole_checkpoint_is_refused(saved: tuple[Path, Any]) -> None:
    folder, model = saved
    spec = f"transformers:{folder}"
    edit(folder, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"(?s)does not hold all weights of BertFor.*it lacks 'bert.encoder.layer.1.att"):
        load_model(spec)
    edit(folder, num_hidden_layers=1, vocab_size=101)
    with pytest.raises(ModelError, match=r"(?s)another shape than its config says|cannot be loaded"):
        load_model(spec)
    edit(folder, vocab_size=100, architectures=["NobodysModel"], auto_map={"AutoModel": "theirs.NobodysModel"})
    with pytest.raises(ModelError, match="no model class 'NobodysModel'"):
        load_model(spec)
    edit(folder, architectures=None)
    with pytest.raises(ModelError, match="names no architecture: None"):
        load_model(spec)
    edit(folder, architectures=["BertModel"], attn_implementation="somebody/kernel")
    with pytest.raises(ModelError, match="may not bring code from a model hub"):
        load_model(spec)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="no safetensors file, and pickled weights, which can run code, are not read"):
        load_model(spec)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"is not a checkpoint: .*config.json' does not exist"):
        load_model(spec)
    with pytest.raises(ModelError, match="there is no folder '/no/such/place'"):
        load_model("transformers:/no/such/place")


def test_the_hub_is_asked_for_safetensors_alone(saved: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, model = saved
    asked: list[Any] = []

    def fetched(repository: str, **settings: Any) -> str:
        asked.append((repository, settings["revision"], *settings["allow_patterns"], *settings["ignore_patterns"]))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetched)
    found = load_model("hub:org/name@abc123", seq_len=4)
    assert torch.equal(found.module.classifier.weight, model.classifier.weight)  # type: ignore[union-attr, arg-type]
    assert "those of 'hub:org/name@abc123'" in found.notes[0]
    assert asked == [("org/name", "abc123", "config.json", "*.safetensors", "*.safetensors.index.json", "*/*")]

    def offline(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route to the host. Set this and that.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match=r"cannot be fetched: no route to the host; without a network, give a folder"):
        load_model("hub:org/name")

import builtins
import logging
import sys
from pathlib import Path

import psutil
import pytest
import torch
from torch import nn

from autosplit.compat.torchparts import FakeTensor, FakeTensorMode
from autosplit.errors import MissingExtraError, ModelError
from autosplit.examples.mlp import mlp
from autosplit.tracing import architectures
from autosplit.tracing.architectures import Given
from autosplit.tracing.loading import WITHOUT_WEIGHTS, call_of, load_model

TEXT = "hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64&vocab_size=100"
SPECS = {
    "ResNetForImageClassification": ("depths=1,1&hidden_sizes=8,16&embedding_size=8&image_size=32", {"pixel_values"}),
    "MobileNetV2Model": ("image_size=64&depth_multiplier=0.35", {"pixel_values"}),
    "ConvNextModel": ("image_size=64&hidden_sizes=8,16&depths=1,1&num_stages=2", {"pixel_values"}),
    "SwinModel": ("image_size=32&patch_size=2&embed_dim=16&depths=2,2&num_heads=2,2&window_size=4", {"pixel_values"}),
    "ViTModel": ("hidden_size=32&num_hidden_layers=1&num_attention_heads=2&image_size=32", {"pixel_values"}),
    "BertModel": (TEXT, {"input_ids", "attention_mask"}),
    "LlamaModel": (TEXT, {"input_ids", "attention_mask"}),
    "GPT2Model": ("n_embd=32&n_layer=1&n_head=2&vocab_size=100", {"input_ids", "attention_mask"}),
    "XLNetModel": ("d_model=32&n_layer=1&n_head=2&d_inner=64&vocab_size=100", {"input_ids", "attention_mask"}),
    "T5Model": ("d_model=32&num_layers=1&num_heads=2&d_kv=16&vocab_size=100", {"input_ids", "decoder_input_ids"}),
    "PatchTSTModel": ("d_model=16&num_hidden_layers=1&num_attention_heads=2&ffn_dim=32&num_input_channels=3", {"past_values"}),
    "Idefics3VisionTransformer": (
        "hidden_size=32&num_hidden_layers=1&num_attention_heads=2&image_size=32&patch_size=8",
        {"pixel_values"},
    ),
    "WhisperEncoder": ("d_model=32&encoder_layers=1&encoder_attention_heads=2", {"input_features"}),
    "LasrEncoder": ("hidden_size=32&num_hidden_layers=1&num_attention_heads=2", {"input_features"}),
    "Wav2Vec2BertModel": ("hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64", {"input_features"}),
    "ASTModel": ("hidden_size=32&num_hidden_layers=1&num_attention_heads=2&intermediate_size=64", {"input_values"}),
}


def output_of(model):
    with torch.inference_mode():
        return model.module(*model.args, **model.kwargs)


@pytest.mark.parametrize("name", SPECS)
def test_transformers_model_runs_on_its_inputs(name):
    options, expected = SPECS[name]
    model = load_model(f"transformers:{name}?{options}", batch=2)
    assert model.name == name
    assert set(model.kwargs) == expected
    assert all(tensor.shape[0] == 2 for tensor in model.kwargs.values())
    output = output_of(model)[0]
    assert output.std() > 1e-2
    assert not torch.allclose(output[0], output[1], atol=1e-4)


def test_a_model_whose_images_come_with_grids_gets_text_alone():
    text = '{"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100}'
    seen = '{"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0]}'
    model = load_model(f"transformers:Qwen3VLModel?text_config={text}&vision_config={seen}", seq_len=8)
    assert list(model.kwargs) == ["input_ids", "attention_mask"]


def test_a_sound_has_the_channels_of_the_config():
    options = "audio_channels=2&hidden_size=16&num_filters=2&upsampling_ratios=8,5&num_lstm_layers=1&codebook_size=8"
    model = load_model(f"transformers:EncodecModel?{options}", batch=3)
    assert model.kwargs["input_values"].shape == (3, 2, 16000)
    assert output_of(model).audio_values.shape == (3, 2, 16000)


def test_transformers_weights_are_the_same_each_time():
    spec = f"transformers:BertModel?{TEXT}"
    torch.manual_seed(1)
    first, second = load_model(spec), load_model(spec)
    assert torch.equal(output_of(first)[0], output_of(second)[0])


def test_a_model_and_its_inputs_have_the_dtype_that_is_asked_for():
    images = "num_channels=3&embedding_size=8&hidden_sizes=[8,8,8,8]&depths=[1,1,1,1]&hidden_act=relu"
    for spec in (f"transformers:BertModel?{TEXT}", f"transformers:ResNetModel?{images}"):
        model = load_model(f"{spec}&dtype=bfloat16")
        floats = [one for one in (*model.module.parameters(), *model.kwargs.values()) if one.is_floating_point()]
        assert {one.dtype for one in floats} == {torch.bfloat16}
    assert torch.get_default_dtype() == torch.float32


def test_sequence_length_and_its_limit():
    spec = f"transformers:BertModel?{TEXT}&max_position_embeddings=64"
    assert load_model(spec).kwargs["input_ids"].shape == (1, 64)
    assert load_model(spec, seq_len=10).kwargs["attention_mask"].shape == (1, 10)
    with pytest.raises(ModelError, match="takes 1 to 64 tokens, not 65"):
        load_model(spec, seq_len=65)
    with pytest.raises(ModelError, match="leave the sequence length out"):
        load_model("transformers:ViTModel?" + SPECS["ViTModel"][0], seq_len=5)


def test_use_cache_is_off_unless_asked_for():
    spec = "transformers:GPT2Model?" + SPECS["GPT2Model"][0]
    assert load_model(spec).module.config.use_cache is False
    assert load_model(spec + "&use_cache=true").module.config.use_cache is True


def test_so_is_that_of_a_part():
    text = '"model_type": "persimmon", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 100'
    spec = f"transformers:FuyuModel?image_size=60&text_config={{{text}"
    assert load_model(spec + "}").module.config.text_config.use_cache is False
    assert load_model(spec + ', "use_cache": true}').module.config.text_config.use_cache is True


def test_tokens_hold_as_many_of_an_image_as_it_has_features():
    text = '"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 100'
    text += ', "model_type": "gemma", "head_dim": 16, "num_key_value_heads": 2'
    vision = text + ', "model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14'
    parts = f"text_config={{{text}}}&vision_config={{{vision}}}"
    spec = f"transformers:PaliGemmaModel?image_token_index=99&projection_dim=32&{parts}"
    model = load_model(spec, batch=2)
    ids = model.kwargs["input_ids"]
    assert (ids == 99).sum(1).tolist() == [4, 4]  # 2 x 2 patches, and none by chance
    assert ids.shape == model.kwargs["attention_mask"].shape == (2, 4 + 128)
    assert output_of(model)[0].std() > 1e-2
    assert load_model(spec, seq_len=5).kwargs["input_ids"].shape == (1, 5)
    with pytest.raises(ModelError, match=r"takes 5 to \d+ tokens, not 4"):
        load_model(spec, seq_len=4)


def test_class_whose_packages_are_missing_is_not_unknown(monkeypatch):
    import transformers

    monkeypatch.setattr(transformers, "BertModel", type("Placeholder", (), {"_backends": ["torchaudio"]}))
    with pytest.raises(MissingExtraError, match="'transformers:BertModel' needs packages that are not installed: torchaudio"):
        load_model("transformers:BertModel")


def test_attention_implementation_is_sdpa_unless_asked_otherwise():
    spec = f"transformers:BertModel?{TEXT}"
    assert load_model(spec).module.config._attn_implementation == "sdpa"
    assert load_model(spec + "&attn_implementation=eager").module.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("transformers:BertModell", "close names: 'BertModel'"),
        ("transformers:BertConfig", "no model class 'BertConfig'"),
        ("transformers:BertModel?num_hiden_layers=2", "no field 'num_hiden_layers'; close names: 'num_hidden_layers'"),
        ("transformers:BertModel?num_hidden_layers=two", "takes a whole number, not 'two'"),
        ("transformers:BertModel?num_attention_heads=5", "cannot be built from this config"),
        (f"transformers:BertModel?{TEXT}&pad_token_id=100", "cannot be built from this config: Padding_idx"),
        (f"transformers:Blip2QFormerModel?{TEXT}", "takes 'query_embeds', for which no example.*'file.py:function'"),
        (
            "transformers:Gemma4AudioModel?hidden_size=32&num_hidden_layers=1&num_attention_heads=2",
            "takes 'input_features', for which",
        ),
        ("transformers:LevitModel?image_size=32&patch_size=8&depths=1,1,1", "fails on the inputs made up for it: The size of"),
        ("transformers:BertModel?vocab_size", "not name=value pairs"),
        ("autosplit.examples.mlp:mlp?depth=2&width=8&depth=3", r"takes each option once .*\n.*'depth' is given as 2 and as 3"),
        ("models/mine.py:net", r"there is no file 'models/mine\.py' here$"),
        ("no_such_package:model", "No module named 'no_such_package'"),
        ("autosplit.examples.mlp:mpl", "close names: 'mlp'"),
        ("autosplit.examples.mlp:mlp?widht=3", "close names: 'width'"),
        ("autosplit.examples.unet:Block", "needs values for channels_in, channels_out"),
        ("autosplit.examples.unet:unet?size=9", "unet' failed: RuntimeError: Sizes of tensors must match"),
        ("builtins:print", "and \\(module, example inputs\\) is expected"),
        ("resnet50", r"is not a spec: .*ends in \.pt2$"),
        (sys.executable, r"is not a spec: .*workload file needs search --format$"),
        (__file__, r"is not a spec: name a function of the file .*test_loading\.py:function'$"),
        (sys.prefix, r"is not a spec: a checkpoint is named as 'transformers:/"),
        ("no_such_file.pt2", "does not exist"),
    ],
)
def test_bad_spec_names_what_is_wrong(spec, message):
    with pytest.raises(ModelError, match=message):
        load_model(spec)


@pytest.mark.parametrize(
    ("spec", "inputs"),
    [
        (
            f"transformers:Blip2QFormerModel?{TEXT}&encoder_hidden_size=32",
            {"query_embeds": torch.ones(1, 4, 32), "encoder_hidden_states": torch.ones(1, 5, 32)},
        ),
        ("transformers:LevitModel?image_size=32&patch_size=8&depths=1,1,1", torch.ones(2, 3, 64, 64)),
    ],
)
def test_no_inputs_are_made_up_where_they_are_given(spec, inputs):
    model = load_model(spec, inputs=inputs)
    assert model.way_out == "" and model.kwargs == (inputs if isinstance(inputs, dict) else {})
    model.module(*model.args, **model.kwargs)
    if not model.args:
        return
    with pytest.raises(ModelError, match="fails on its example inputs, with which its batch norms are calibrated"):
        load_model(spec, inputs=torch.ones(2, 3, 8, 8))


def test_a_spec_has_the_same_weights_whoever_gives_the_inputs():
    spec = "transformers:ResNetModel?embedding_size=8&hidden_sizes=8,16&depths=1,1&image_size=32"
    own, given = load_model(spec).module.state_dict(), load_model(spec, inputs=torch.ones(1, 3, 64, 64)).module.state_dict()
    assert all(torch.equal(own[name], given[name]) for name in own)


def test_model_larger_than_the_memory_is_refused_before_it_is_built(monkeypatch):
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 2**20})())
    with pytest.raises(ModelError, match=r"^model '\S+' has .* MiB of weights, and 1\.0 MiB of memory are free"):
        load_model("transformers:BertModel?num_hidden_layers=1")


def test_missing_transformers_gives_the_command(monkeypatch):
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "transformers":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.delitem(sys.modules, "transformers", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(MissingExtraError, match=r"pip install 'autosplit\[transformers\]'"):
        architectures.build("BertModel", {}, 1, None)


def test_function_takes_typed_options_and_batch(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\n"
        "def plain(): return torch.nn.Linear(3, 3).eval(), (torch.zeros(2, 3),)\n"
        "def text(batch=1, seq_len=4): return torch.nn.Embedding(9, 3).eval(), {'input': torch.zeros(batch, seq_len).long()}\n"
    )
    monkeypatch.chdir(tmp_path)
    assert load_model("my_models:plain").args[0].shape == (2, 3)
    assert load_model("my_models:text", batch=3, seq_len=7).kwargs["input"].shape == (3, 7)
    with pytest.raises(ModelError, match="leading sizes are \\[2\\], and batch 4 was asked for"):
        load_model("my_models:plain", batch=4)
    with pytest.raises(ModelError, match="no argument 'seq_len'"):
        load_model("my_models:plain", seq_len=4)
    assert load_model("autosplit.examples.mlp:mlp?width=8&depth=2").args[0].shape == (1, 8)


MINE = "import torch\nfrom beside import WIDTH\ndef net(): return torch.nn.Linear(WIDTH, 3).eval(), (torch.zeros(2, WIDTH),)\n"


def test_a_function_that_converts_its_module_needs_its_weights_also_where_none_are_asked_for(tmp_path):
    """``autosplit evaluate`` of a plan in bf16 failed: "Couldn't swap Linear.weight"."""
    file = tmp_path / "halved.py"
    file.write_text("import torch\ndef halved():\n    return torch.nn.Linear(2, 2).eval().bfloat16(), (torch.ones(1, 2),)\n")
    assert load_model(f"{file}:halved", weights=False).module.weight.dtype == torch.bfloat16
    with pytest.raises(ModelError, match="has no function 'whole'"):
        load_model(f"{file}:whole", weights=False)


def test_only_code_that_fails_on_fake_weights_has_the_models_own(tmp_path, monkeypatch):
    """Any other fault of a spec loaded the model a second time; and tensors of a module that was imported stayed fake."""
    made = []
    monkeypatch.setattr("autosplit.tracing.architectures.build", lambda *args: made.append(args[-1]) or _refuse())
    with pytest.raises(ModelError, match="too large"):
        load_model("transformers:LlamaModel", weights=False)
    assert made == [False]
    file = tmp_path / "tables.py"
    file.write_text(
        "import torch\nTABLE = torch.ones(2)\ndef net():\n    made = torch.nn.Linear(2, 2).eval()\n"
        "    made.register_buffer('table', TABLE)\n    return made, (torch.ones(1, 2),)\n"
    )
    planned, whole = (load_model(f"{file}:net", weights=weights) for weights in (False, True))
    assert WITHOUT_WEIGHTS in planned.notes and isinstance(planned.module.weight, FakeTensor)
    assert type(whole.module.table) is torch.Tensor and not whole.notes
    torch.export.save(torch.export.export(whole.module, whole.args), tmp_path / "net.pt2")
    assert WITHOUT_WEIGHTS not in load_model(tmp_path / "net.pt2", trust=True, weights=False).notes


def _refuse():
    raise ModelError("too large")


def test_a_function_may_be_named_by_its_file(tmp_path, monkeypatch):
    """Whatever the file is called and wherever it is, and with what it imports: neighbours, and others of its package."""
    for folder, width in ((tmp_path / "one", 3), (tmp_path / "two", 4)):
        folder.mkdir()
        (folder / "json.py").write_text(MINE.replace("from beside import WIDTH", f"WIDTH = {width}"))
    package = tmp_path / "package_of_nets"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "beside.py").write_text("WIDTH = 5\n")
    (package / "nets.py").write_text(MINE.replace("from beside", "from .beside"))
    (tmp_path / "beside.py").write_text("WIDTH = 6\n")
    (tmp_path / "detectors.py").write_text(MINE)
    monkeypatch.chdir(tmp_path / "one")
    widths = {"json.py": 3, str(tmp_path / "two" / "json.py"): 4, "../package_of_nets/nets.py": 5, "../detectors.py": 6}
    for path, width in widths.items():
        assert load_model(f"{path}:net").args[0].shape == (2, width)
        assert load_model(f"{path}:net").source.spec == f"{path}:net"
    with pytest.raises(ModelError, match=r"there is no file '../detector.py' here; close names: 'detectors.py'$"):
        load_model("../detector.py:net")
    with pytest.raises(ModelError, match=r"file '../detectors.py' has no function 'nets'; close names: 'net'$"):
        load_model("../detectors.py:nets")


def test_exported_program_from_a_file_and_as_an_object(tmp_path):
    module, inputs = mlp(2, width=4, depth=2)
    program = torch.export.export(module, inputs, strict=False)
    torch.export.save(program, tmp_path / "net.pt2")
    for model in (load_model(tmp_path / "net.pt2", batch=2, trust=True), load_model(program)):
        assert torch.equal(model.args[0], inputs[0])
    assert load_model(tmp_path / "net.pt2", trust=True).name == "net"
    with pytest.raises(ModelError, match="batch 3 was asked for"):
        load_model(tmp_path / "net.pt2", batch=3, trust=True)
    (tmp_path / "half.pt2").write_bytes((tmp_path / "net.pt2").read_bytes()[:500])
    with pytest.raises(ModelError, match="cannot be read as an exported program"):
        load_model(tmp_path / "half.pt2", trust=True)
    for inputs, named in ((torch.zeros(3, 4), r"float32 \[3, 4\]"), (torch.zeros(2, 4).double(), r"float64 \[2, 4\]")):
        with pytest.raises(ModelError, match=rf"is torch.{named}, and torch.float32 \[2,4\] was exported"):
            load_model(program, inputs=inputs)
    both = torch.export.export(nn.Bilinear(4, 3, 2).eval(), (), {"input1": torch.ones(2, 4), "input2": torch.ones(2, 3)})
    assert load_model(both, inputs={"input2": torch.zeros(2, 3), "input1": torch.zeros(2, 4)}).args == ()
    with pytest.raises(ModelError, match=r"'input2' is torch.float32 \[2, 4\]"):
        load_model(both, inputs={"input2": torch.zeros(2, 4), "input1": torch.zeros(2, 4)})
    with pytest.raises(ModelError, match="takes no options"):
        load_model(f"{tmp_path}/net.pt2?width=3")


ODD_INPUTS = {
    "three": ((torch.zeros(2, 4),), {}, 1),
    "one": ((torch.zeros(2, 4),),),
    "a number": (5, {}),
    "a list of names": ((torch.zeros(2, 4),), [1]),
    "no items": ((torch.zeros(0, 4),), {}),
    "sparse": ((torch.zeros(2, 4).to_sparse(),), {}),
}


@pytest.mark.parametrize("odd", ODD_INPUTS.values(), ids=ODD_INPUTS)
def test_odd_example_inputs_of_an_exported_program_are_refused_in_a_sentence(odd: object, tmp_path: Path) -> None:
    batch = {0: torch.export.Dim("batch")}
    program = torch.export.export(nn.Linear(4, 4).eval(), (torch.zeros(2, 4),), dynamic_shapes=(batch,), strict=False)
    program._example_inputs = odd
    torch.export.save(program, tmp_path / "net.pt2")
    for model in (program, tmp_path / "net.pt2"):
        with pytest.raises(
            ModelError, match=r"export it again, or give example inputs|a dense tensor is expected|sizes are \[0\], and batch 3"
        ):
            load_model(model, batch=3, trust=True)
        assert load_model(model, inputs=torch.zeros(3, 4), trust=True).args[0].shape == (3, 4)


class Payload:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.write_text, (self.path, "code ran"))


def test_an_exported_program_is_not_unpickled_unless_it_is_trusted(tmp_path, monkeypatch):
    module, inputs = mlp(2, width=4, depth=2)
    program = torch.export.export(module, inputs, strict=False)
    program._example_inputs = ((*inputs, Payload(tmp_path / "proof")), {})
    torch.export.save(program, tmp_path / "net.pt2")
    (tmp_path / "proof").unlink(missing_ok=True)
    with pytest.raises(ModelError, match=r"runs whatever code its maker put in; give --trust \(trust=True in Python\)"):
        load_model(tmp_path / "net.pt2")
    assert not (tmp_path / "proof").exists()
    monkeypatch.setattr(logging.getLogger("torch._export.serde.serialize"), "disabled", True)  # its warning has a wrong format
    torch.export.load(tmp_path / "net.pt2")
    assert (tmp_path / "proof").exists()  # so the file really is hostile


@pytest.mark.parametrize("options", ["attn_implementation=kernels-community/flash-attn", "attn_implementation=flash_attention_2"])
def test_a_spec_brings_no_code_from_a_hub(options):
    with pytest.raises(ModelError, match=r"(?s)may not bring code from a model hub.*: use eager, sdpa, flex_attention"):
        load_model(f"transformers:BertModel?{TEXT}&{options}")
    nested = '{"attn_implementation": "kernels-community/flash-attn"}'
    with pytest.raises(ModelError, match=r"text_config.attn_implementation="):
        load_model(f"transformers:LlavaModel?text_config={nested}")


def test_module_needs_inputs_and_eval_mode():
    net = nn.Linear(3, 3)
    with pytest.raises(ModelError, match="without example inputs"):
        load_model(net.eval())
    with pytest.raises(ModelError, match=r"training mode.*Call its eval\(\) first"):
        load_model(net.train(), inputs=torch.zeros(1, 3))
    assert net.training
    net.eval()
    assert load_model(net, inputs=torch.zeros(1, 3)).args[0].shape == (1, 3)
    assert load_model(net, inputs={"input": torch.zeros(1, 3)}).name == "Linear"
    with pytest.raises(ModelError, match="at least 1, not 0"):
        load_model(net, batch=0)
    with pytest.raises(ModelError, match=r"not a tuple; example inputs go in inputs=\(tensor, ...\)"):
        load_model(net, (torch.zeros(1, 3),))


def test_what_is_no_model_is_said_to_be_none(tmp_path, monkeypatch):
    with pytest.raises(ModelError, match=r"here it is \(Linear.*; a pair .* inputs=inputs"):
        load_model((nn.Linear(3, 3).eval(), torch.zeros(1, 3)))
    with pytest.raises(ModelError, match=r"here it is 7$"):
        load_model(7)
    with pytest.raises(ModelError, match=r"here it is <function .*; make a function the forward of a torch.nn.Module"):
        load_model(lambda x: x)
    (tmp_path / "net_of_mine.py").write_text("from torch import nn\nnet = nn.Linear(3, 3).eval()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModelError, match=r"'net_of_mine:net' is a module; name a function .* returns \(net, example inputs\)"):
        load_model("net_of_mine:net")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda: torch.eye(2).to_sparse(), "torch.sparse_coo on cpu"),
        (lambda: torch.nested.nested_tensor([[1.0]]), "nested on cpu"),
        (lambda: FakeTensorMode().from_tensor(torch.ones(2)), "FakeTensor"),
    ],
)
def test_inputs_that_are_not_dense_are_refused_by_their_place(make, kind):
    with pytest.raises(ModelError, match=rf"input\[1\]\['x'\] is {kind}, and a dense tensor is expected"):
        load_model(nn.Identity().eval(), inputs=(torch.ones(1), {"x": make()}))


def test_tensors_inside_torch_func_are_refused():
    with pytest.raises(
        ModelError, match=r"input\[0\] is a tensor inside torch.func \(vmap, grad or functionalize\), and a dense"
    ):
        torch.func.vmap(lambda x: load_model(nn.Identity().eval(), inputs=(x,)))(torch.ones(2, 3))


def test_example_inputs_are_given_as_to_torch_export():
    x, y = torch.zeros(1), torch.ones(1)
    assert call_of((x,), {"y": y}, None) == Given((x,), {"y": y})
    assert call_of(None, None, {"y": y}) == {"y": y}
    model = load_model(nn.Identity().eval(), inputs=Given((x,), {"y": y}))
    assert (model.args, model.kwargs) == ((x,), {"y": y})
    assert load_model(nn.Identity().eval(), inputs=x).args == load_model(nn.Identity().eval(), inputs=call_of(x, None, None)).args
    with pytest.raises(ModelError, match="given twice"):
        call_of((x,), None, (x,))
    with pytest.raises(ModelError, match="not 4; a batch size is given as batch=4"):
        call_of(4, None, None)

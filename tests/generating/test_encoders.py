"""T5 and Whisper as generators on two worker processes: the tokens of ``generate``, also where workers are killed."""

import wave
from types import SimpleNamespace

import pytest
import torch
import transformers

import autosplit
from autosplit.errors import ModelError, UsageError
from autosplit.generating.bounds import read_bytes
from autosplit.generating.encoders import _after_beginning
from autosplit.generating.sources import read_sound
from autosplit.generating.steps import step_family
from autosplit.values.plan import UNKNOWN, Plan, Stage
from tests.generating.decodermodels import answers_under_kills
from tests.generating.encodermodels import ENCODERS, answered, encoder_decoder, sources

SEQUENCES, LENGTH, NEW = 2, 40, 32


@pytest.fixture(scope="module", params=ENCODERS)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def model(name):
    return encoder_decoder(name)


@pytest.fixture(scope="module")
def family(model):
    return step_family(model, SEQUENCES, LENGTH, prompt=8, new=8)


@pytest.fixture(scope="module")
def generator(family):
    """The first stage holds the encoder and a layer of the decoder."""
    ops = [op.name for op in family.graph.ops]
    layer = [number for number, op in enumerate(family.graph.ops) if op.operator.startswith("autosplit.attend")][1] + 1
    stages = tuple(
        Stage(f"cpu:{number}", tuple(some), (f"cpu:{number}",)) for number, some in enumerate((ops[:layer], ops[layer:]))
    )
    with autosplit.open_generator(family, Plan(family.variants[0].source, family.graph.hash, "", stages, UNKNOWN)) as opened:
        yield opened


def test_answers_to_prompts_of_mixed_lengths_are_those_of_generate(name, model, generator):
    """More prompts than places in the caches, so that each place has several owners."""
    asked = sources(name, 5, 23, 1, 40, 9)
    wanted = [answered(model, prompt, NEW) for prompt in asked]
    assert generator.generate(asked, max_new_tokens=NEW) == wanted
    assert len({token for tokens in wanted for token in tokens}) > 20
    assert len(set(map(tuple, wanted))) == len(wanted)
    assert list(generator.stream(asked[1], max_new_tokens=5)) == wanted[1][:5]


def test_a_sound_in_a_file_is_heard_in_the_language_that_is_told_or_detected(name, model, generator, tmp_path):
    if name.startswith("T5"):
        return
    samples = (3000 * torch.randn(2, 3000, generator=torch.Generator().manual_seed(1))).short()
    with wave.open(str(tmp_path / "sound.wav"), "wb") as file:
        file.setparams((2, 2, 16000, 0, "NONE", ""))
        file.writeframes(samples.T.contiguous().numpy().tobytes())
    sound = read_sound(tmp_path / "sound.wav")
    assert torch.equal(sound, samples.float().mean(0) / 2**15)
    extract = transformers.WhisperFeatureExtractor(feature_size=6)
    given = {"sampling_rate": 16000, "max_length": 24 * 160, "return_tensors": "pt"}
    features = extract(sound.numpy(), **given).input_features[0]
    wanted = answered(model, features, 6)
    assert generator.generate([sound, features], max_new_tokens=6) == [wanted, wanted]
    told = {language: generator.generate([sound], start=[1, language, 50, 96], max_new_tokens=6)[0] for language in (40, 41, 42)}
    assert wanted in told.values()
    assert len(set(map(tuple, told.values()))) > 1
    for settings, start in (({"language": "de"}, [41, 50, 96]), ({"language": "<|la|>", "task": "translate"}, [42, 51, 96])):
        assert _after_beginning(SimpleNamespace(**{**vars(model.generation_config), **settings}), model.config) == start


def test_killed_workers_lose_no_token(name, model, generator):
    asked = sources(name, 4, 12, 30, 7)
    wanted = [answered(model, prompt, 12) for prompt in asked]
    restarts = generator.pipeline.restarts
    assert answers_under_kills(generator, asked, 12) == wanted
    assert generator.pipeline.restarts > restarts


def test_a_token_reads_its_answer_in_one_cache_and_its_source_in_another(family):
    """Half of an answer of 8 tokens, after those with which it begins; of a source all rows, with and without a prompt beside."""
    read = list(read_bytes(family, 2, decodes=True).values())
    own, source = family.source.num_start + 4, family.source.num_rows(8)
    assert [other / one for one, other in zip(read[::2], read[1::2], strict=True)] == pytest.approx([source / own] * 2)
    assert read == list(read_bytes(family, 2, decodes=False).values())
    assert read_bytes(family, 4, decodes=True) == {op: 2 * one for op, one in read_bytes(family, 2, decodes=True).items()}


def test_a_step_without_a_source_reads_no_weight_of_the_encoder(family):
    """All variants have the ops, values and weights of one graph, so that one plan fits them."""
    largest, small = family.variants[0], family.at({"tokens": 1})
    assert [(op.name, op.inputs, op.weights) for op in small.graph.ops] == [
        (op.name, op.inputs, op.weights) for op in largest.graph.ops
    ]

    def read(traced):
        nodes = traced.program.graph.nodes
        return {str(source.target) for node in nodes for source in node.all_input_nodes if source.op == "get_attr"}

    of_encoder = {weight for weight in read(largest) if ".encoder." in weight}
    of_cross = {weight for weight in read(largest) if any(part in weight for part in ("EncDec", "encoder_attn."))}
    assert of_encoder
    assert not of_encoder & read(small)
    assert len(of_cross & read(small)) < len(of_cross)  # of queries and outputs alone
    assert family.at({"tokens": SEQUENCES}).run(*family.at({"tokens": SEQUENCES}).example_inputs).shape == (SEQUENCES,)


def test_an_answer_has_the_whole_length_beside_its_prompt(model, family, monkeypatch):
    """They were counted together."""
    monkeypatch.setattr("autosplit.modeltrace.step_family", lambda *_, **__: family)
    usual = f"prompt=30,new=20,max_sequences={SEQUENCES},max_length={LENGTH}"
    assert autosplit.trace(model, generate=usual).sequences.new == 20


def test_what_is_no_prompt_is_refused(name, generator):
    if name.startswith("T5"):
        with pytest.raises(UsageError, match=f"{LENGTH + 1} tokens, and the caches hold {LENGTH}"):
            generator.submit([1] * (LENGTH + 1))
        with pytest.raises(UsageError, match="97 is no token id"):
            generator.submit([97])
    else:
        with pytest.raises(UsageError, match=r"the features of a sound \[6, 24\], or its samples, but is torch"):
            generator.submit(torch.zeros(6, 23))
        with pytest.raises(UsageError, match="begins with 4 tokens, and 2 are given"):
            generator.submit(torch.zeros(6, 24), start=[1, 2])
        with pytest.raises(UsageError, match=r"the sound lasts 1 s, and the model takes 0\.24 s"):
            generator.submit(torch.zeros(16000))
    room = LENGTH + 1 - generator.capacity.source.num_start
    with pytest.raises(UsageError, match=f"leaves room for {room} new ones, and max_new_tokens is {LENGTH + 1}"):
        generator.submit(sources(name, 4)[0], max_new_tokens=LENGTH + 1)


def test_other_encoder_decoders_are_refused():
    small = {"d_model": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 1, "decoder_attention_heads": 1}
    config = transformers.BartConfig(vocab_size=97, encoder_ffn_dim=8, decoder_ffn_dim=8, **small)
    with pytest.raises(
        ModelError, match="'BartForConditionalGeneration' has an encoder, and of encoder-decoders only T5 and Whisper"
    ):
        step_family(transformers.BartForConditionalGeneration(config).eval(), SEQUENCES, LENGTH)

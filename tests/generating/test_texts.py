"""Text from tokens as they come, and the plan of a generator as a file that is served."""

import random
from dataclasses import replace

import pytest
from generating.caches import BUCKETS, Pipeline, expected
from servedplans import Served, listening
from webservice.generators import LIMITS
from webservice.generators import tokenizer as words_tokenizer

import autosplit
from autosplit.errors import ModelError, UsageError
from autosplit.generating.generators import Generator
from autosplit.generating.sequences import Capacity
from autosplit.generating.steps import step_family
from autosplit.generating.texts import Texts, load_texts
from autosplit.serving.hostmanager import HostManager
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.planfile import write_plan
from autosplit.values.sequences import Sequences
from autosplit.values.shapes import Shapes
from autosplit.webservice.application import Application
from autosplit.webservice.repository import Repository
from tests.generating.checkpoints import SENTENCES, save_checkpoint, tokenizer
from tests.generating.decodermodels import generated


def read(texts, ids, stops=()):
    reader = texts.reader(stops)
    pieces = [reader.add(one) for one in ids]
    return [*pieces, reader.end()]


def test_pieces_join_to_the_text_and_hold_no_half_character():
    texts = Texts(tokenizer())
    for text in [*SENTENCES, "ü", "a 文", ""]:
        pieces = read(texts, texts.ids(text))
        assert "".join(pieces) == text
        assert "\ufffd" not in "".join(pieces)


def test_any_tokens_have_a_text():
    texts, numbers = Texts(tokenizer()), random.Random(0)
    for _ in range(50):
        ids = [numbers.randrange(320) for _ in range(40)]
        assert "".join(read(texts, ids)) == texts.decoded(ids)


@pytest.mark.parametrize("stop", ["stage", "in", "ut into s", " a plan"])
def test_a_stop_word_ends_the_text_whatever_tokens_it_falls_into(stop):
    texts = Texts(tokenizer())
    ids = texts.ids(" a plan is cut into stages, in stages")
    assert read(texts, ids, stop) == read(texts, ids, [stop])
    assert "".join(read(texts, ids, ["nowhere", stop])) == " a plan is cut into stages, in stages".partition(stop)[0]
    assert "".join(read(texts, ids, ["stagesX"])) == " a plan is cut into stages, in stages"


@pytest.mark.parametrize("stop", ["", 5], ids=repr)
def test_a_stop_is_a_text_with_characters(stop):
    with pytest.raises(UsageError, match=f"stop has {stop!r}, and texts are needed"):
        Texts(tokenizer()).reader(["a", stop])


def test_a_token_that_ends_a_text_is_not_in_it():
    texts = Texts(tokenizer(), ends=(5,))
    assert read(texts, [*texts.ids("plan"), 5])[-2:] == ["", ""]


def test_a_generator_streams_text():
    texts, pipeline = Texts(words_tokenizer()), Pipeline(3, 80)
    with Generator(pipeline, BUCKETS, Capacity(3, 80, 97), 2, texts=texts) as generator:
        wanted = expected([5, 6], 6)
        assert "".join(generator.stream_text("w5 w6", max_new_tokens=6)) == texts.decoded(wanted)
        stop = texts.decoded(wanted[3:4])
        assert "".join(generator.stream_text("w5 w6", stop=[stop], max_new_tokens=70)) == texts.decoded(wanted[:3])
        others, calls = [expected([7], 6), expected([8], 2)], []
        note = lambda number, token: calls.append((number, token)) or number == 1  # noqa: E731
        assert generator.generate([[7], [8]], stop=[stop], on_token=note, max_new_tokens=6) == [others[0], others[1][:1]]
        assert generator.generate([[5, 6]], stop=[stop], max_new_tokens=70) == [wanted[:4]]
        assert {*calls} == {(0, token) for token in others[0]} | {(1, others[1][0])} and not generator.stats().num_failed
        end = wanted[2]
        assert "".join(generator.stream_text("w5 w6", eos=end, max_new_tokens=6)) == texts.decoded(wanted[:3])
    with (
        Generator(pipeline, BUCKETS, Capacity(3, 80, 97), 2) as generator,
        pytest.raises(UsageError, match="no tokenizer at hand"),
    ):
        generator.stream_text("w5")
    pipeline.close()


def test_a_folder_without_a_tokenizer_and_one_with_a_broken_one(tmp_path):
    spec = f"transformers:{tmp_path}"
    assert load_texts(spec) is None
    assert load_texts("transformers:LlamaForCausalLM?num_hidden_layers=2") is None
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be read"):
        load_texts(spec)


def test_the_plan_of_a_generator_is_served_with_texts(tmp_path, monkeypatch):
    """A plan file becomes text over HTTP: the tokens of the model's own ``generate``. Steps are traced once for all."""
    model = save_checkpoint(tmp_path / "model")
    spec = f"transformers:{tmp_path / 'model'}"
    family, traced = step_family(model, 2, 64, 2), []
    monkeypatch.setattr(
        "autosplit.modeltrace.step_family", lambda module, *sizes, **usual: traced.append((type(module), *sizes, usual)) or family
    )
    ops = [op.name for op in family.graph.ops]
    sizes = Shapes({}, {"tokens": "1,2,4"}, {"tokens": (1, 2, 4)})
    stages = (Stage("all", tuple(ops), ("cpu:0",)),)
    plan = Plan(Source(spec), family.graph.hash, "", stages, UNKNOWN, shapes=sizes, sequences=Sequences(8, 8, 2, 64))
    write_plan(plan, family.graph, tmp_path / "tiny.yaml")
    twice = replace(plan, stages=(Stage("all", tuple(ops), ("cpu:0", "cpu:1")),))
    write_plan(twice, family.graph, tmp_path / "twice.yaml")
    with HostManager() as host:
        repository = Repository(host, {name: tmp_path / f"{name}.yaml" for name in ("tiny", "twice")})
        repository.load("tiny").result()
        application = Application(host, repository, LIMITS)
        with listening(application) as url:
            served = Served(family.variants[0], application, url)
            said = [{"role": "user", "content": "a plan is cut"}]
            body = {"model": "tiny", "messages": said, "max_tokens": 8, "temperature": 0}
            status, answer = served.call("POST", "/v1/chat/completions", body)
            texts = load_texts(spec)
            wanted = generated(model, texts.ids("user: a plan is cut\nassistant:"), 8)
            assert status == 200, answer
            assert answer["choices"][0]["token_ids"] == wanted
            assert answer["choices"][0]["message"]["content"] == texts.decoded(wanted)
            assert served.call("GET", "/v2/health/ready")[0] == 200
            repository.load("tiny").result()
            assert served.call("POST", "/v1/chat/completions", body)[1]["choices"] == answer["choices"]
            assert [worker["network"] for worker in host.health()["workers"]] == ["tiny/2"]
            repository.load("twice").result()
            pairs = served.call("POST", "/v1/chat/completions", {**body, "model": "twice", "messages": said})[1]
            assert pairs["choices"] == answer["choices"]
            networks = [worker["network"] for worker in host.health()["workers"]]
            assert sorted(networks) == ["tiny/2", "twice/1", "twice/1/1"]
            assert served.call("POST", "/v2/repository/models/twice/unload", {})[0] == 200
            assert served.call("POST", "/v2/repository/models/tiny/unload", {})[0] == 200
            assert not host.health()["workers"]
            assert served.call("POST", "/v1/chat/completions", body)[0] == 404
        repository.close()
    assert traced == [(type(model), 2, 64, {"prompt": 8, "new": 8})] * 3
    loaded = autosplit.load(tmp_path / "tiny.yaml")
    [note] = loaded.family.notes
    assert note.startswith(f"weights: those of '{spec}'")
    with pytest.raises(UsageError, match="open_generator"):
        loaded.open()

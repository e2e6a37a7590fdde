import json
from types import SimpleNamespace

import pytest
from generating.caches import BUCKETS, VOCABULARY, Pipeline, expected
from typer.testing import CliRunner
from webservice.generators import tokenizer

from autosplit import cli
from autosplit.generating.generators import Generator
from autosplit.generating.sequences import Capacity
from autosplit.generating.texts import Texts
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.plan import PYTHON_OBJECT, UNKNOWN, Plan, Stage
from autosplit.values.planfile import write_plan

SPEC = ["generate", "transformers:LlamaForCausalLM", "--devices", "cpu:0", "--backend", "eager"]


@pytest.fixture
def asked(monkeypatch):
    """What the command asks for; its generator runs over caches without a model."""
    found = {}

    def generator(model, machine, constraints, **options):
        found.update(options, model=model, num_stages=constraints.num_stages)
        opened = Generator(Pipeline(3, 80), BUCKETS, Capacity(3, 80, VOCABULARY), 1, texts=Texts(tokenizer()))
        opened.generate([[1]], max_new_tokens=1)  # what ran before the prompts is not counted
        return opened

    monkeypatch.setattr("autosplit.generation.generator", generator)
    monkeypatch.setattr("autosplit.commands.generating.start", lambda backends: 0.0)
    return found


def test_one_prompt_is_streamed(asked):
    done = CliRunner().invoke(cli.app, [*SPEC, "--prompt-ids", "1,2,3", "--max-new-tokens", "5", "--stages", "2"])
    assert done.exit_code == 0, done.output
    assert [int(word) for word in done.stdout.split()] == expected([1, 2, 3], 5)
    assert (asked["prompt"], asked["new"], asked["num_stages"]) == (3, 5, 2)
    assert "1 sequences, 5 tokens" in done.stderr


def test_text_is_streamed_and_cannot_steer_the_terminal(asked, monkeypatch):
    monkeypatch.setattr("autosplit.generating.texts.load_texts", lambda spec: Texts(tokenizer()))
    monkeypatch.setattr(Texts, "decoded", lambda self, ids: "".join(f"\x1b{one}" for one in ids))
    done = CliRunner().invoke(cli.app, [*SPEC, "--prompt", "w5 w6", "--max-new-tokens", "3"])
    assert done.exit_code == 0, done.output
    assert done.stdout == "".join(f"\\x1b{one}" for one in expected([5, 6], 3)) + "\n"
    assert asked["prompt"] == 2


def test_a_text_ends_each_answer_and_stands_in_none(asked, monkeypatch):
    texts = Texts(tokenizer())
    monkeypatch.setattr("autosplit.generating.texts.load_texts", lambda spec: texts)
    one, other = expected([5, 6], 30), expected([7], 30)
    words = [*SPEC, "--prompt", "w5 w6", "--stop", texts.decoded(one[3:4]), "--max-new-tokens", "30"]
    done = CliRunner().invoke(cli.app, words)
    assert done.stdout == texts.decoded(one[:3]) + "\n" and "1 sequences, 4 tokens" in done.stderr
    several = [*words, "--prompt", "w7", "--stop", texts.decoded(other[1:2]), "--json"]
    data = json.loads(CliRunner().invoke(cli.app, several).stdout)
    assert data["answers"] == [one[:4], other[:2]] and data["texts"] == [texts.decoded(one[:3]), texts.decoded(other[:1])]


def test_several_prompts_and_json(asked):
    words = [*SPEC, "--prompt-ids", "1 2", "--prompt-ids", "9", "--max-new-tokens", "4", "--eos", "500"]
    wanted = [expected([1, 2], 4), expected([9], 4)]
    done = CliRunner().invoke(cli.app, words)
    assert [[int(word) for word in line.split()] for line in done.stdout.splitlines()] == wanted
    data = json.loads(CliRunner().invoke(cli.app, [*words, "--json"]).stdout)
    assert data["answers"] == wanted
    assert data["stats"]["num_tokens"] == 8


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        ([], "give --prompt-ids 1,2,3"),
        (["--prompt", "a text"], "the model has no tokenizer at hand"),
        (["--prompt", "a text", "--prompt-ids", "1"], "of one kind alone"),
        (["--sound", "none.wav"], "sound 'none.wav' cannot be read: "),
        (["--prompt-ids", "1,x"], "'1,x' is not ids of tokens"),
        (["--prompt-ids", "1", "--eos", "end"], "--eos 'end' is not ids"),
        (["--prompt-ids", "1", "--stop", "end"], "--stop is for answers in text"),
        (["--prompt-ids", "1", "--temperature", "-1"], "temperature must be at least 0"),
        (
            ["--prompt-ids", "1,2", "--generate", "max_length=8"],
            "prompt 2 and new 64 are beyond max_length 8; give max_length=65",
        ),
        (["--prompt-ids", "1,2", "--generate", "slots=8"], "'slots=8' is not one of prompt, new"),
        (["--prompt-ids", "1", "--cluster", "auto"], "leave out --cluster"),
        (["--prompt-ids", "1", "--plan", "none.yaml", "--stages", "2"], "the model runs; leave out --stages, --backend"),
        (["--prompt-ids", "1", "--prompt-ids", ""], "a prompt is empty; give at least one token"),
    ],
)
def test_flags_are_refused_before_a_model_is_loaded(asked, words, fault):
    done = CliRunner().invoke(cli.app, [*SPEC, *words])
    assert done.exit_code == 1
    assert fault in " ".join(done.stderr.split())
    assert not asked


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--generate", "prompt=x"], "'prompt=x' is not one of prompt, new"),
        (["--generate", "prompt=8", "--seq-len", "3", "--simulate", "9"], "leave out --simulate, --seq-len"),
        (["--generate", "prompt=8", "--objective", "pareto"], "give --objective throughput or latency"),
        (["--generate", "prompt=8", "--max-latency", "50ms"], "leave out --max-latency"),
    ],
)
def test_sequences_are_refused_before_a_model_is_loaded(words, fault):
    done = CliRunner().invoke(cli.app, ["search", SPEC[1], *words])
    assert done.exit_code == 1 and fault in " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--prompt-ids", "1,97"], "97 is no token id"),
        (["--prompt-ids", "1", "--max-new-tokens", "99"], "max_length 80 leaves room for 80 new ones"),
    ],
)
def test_a_prompt_that_a_plan_cannot_take_is_refused_before_it_is_opened(monkeypatch, words, fault):
    monkeypatch.setattr("autosplit.commands.generating._planned", lambda path: SimpleNamespace(devices=["cpu:0"]))
    monkeypatch.setattr("autosplit.commands.generating.load_plan", lambda *_, **given: SimpleNamespace(family=None, plan=None))
    monkeypatch.setattr("autosplit.generating.opening.capacity_of", lambda family: Capacity(3, 80, VOCABULARY))
    monkeypatch.setattr("autosplit.generating.opening.open_generator", None)
    done = CliRunner().invoke(cli.app, [*SPEC[:2], "--plan", "plan.yaml", *words])
    assert done.exit_code == 1 and fault in " ".join(done.stderr.split())


def test_a_folder_in_place_of_a_spec_is_told_its_spec():
    done = CliRunner().invoke(cli.app, ["generate", ".", "--prompt", "a text"])
    assert done.exit_code == 1 and "a checkpoint is named as 'transformers:.'" in done.stderr


def test_a_plan_of_other_requests_is_refused(tmp_path):
    values = {name: Value(name, (1,), "float32", 4) for name in "xy"}
    graph = Graph("one", ("x",), ("y",), (Op("a", "aten.relu", "", ("x",), ("y",), (), "a"),), values, {})
    plan = Plan(PYTHON_OBJECT, graph.hash, "", (Stage("one", ("a",), ("cpu:0",)),), UNKNOWN)
    write_plan(plan, graph, tmp_path / "plan.yaml")
    for words in (
        ["run", tmp_path / "plan.yaml", "--generate", "new=3"],
        [*SPEC[:2], "--prompt-ids", "1", "--plan", tmp_path / "plan.yaml"],
    ):
        done = CliRunner().invoke(cli.app, list(map(str, words)))
        assert done.exit_code == 1
        assert "is not of a generator; search one with --generate" in " ".join(done.stderr.split())

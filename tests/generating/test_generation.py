"""Sequences of any lengths at once on two worker processes: each gets the tokens of the model alone."""

from types import SimpleNamespace

import psutil
import pytest
import torch

import autosplit
from autosplit.generating.rewriting import EMBEDDED
from autosplit.generating.steps import step_family
from autosplit.values.plan import UNKNOWN, Plan, Stage
from tests.generating.decodermodels import answers_under_kills, decoder, generated, prompts

SEQUENCES, LENGTH = 3, 40


@pytest.fixture(scope="module")
def llama():
    """Its head multiplies by the table of its embeddings."""
    return decoder("LlamaForCausalLM", tie_word_embeddings=True)


@pytest.fixture(scope="module")
def family(llama):
    return step_family(llama, SEQUENCES, LENGTH, chunk=13)


@pytest.fixture(scope="module")
def generator(family):
    ops = [op.name for op in family.graph.ops]
    at = [number for number, op in enumerate(family.graph.ops) if "layers.0.mlp" in op.module][-1] + 1
    stages = tuple(Stage(f"cpu:{number}", tuple(some), (f"cpu:{number}",)) for number, some in enumerate((ops[:at], ops[at:])))
    with autosplit.open_generator(family, Plan(family.variants[0].source, family.graph.hash, "", stages, UNKNOWN)) as opened:
        yield opened
    assert not [pid for pid in opened.pipeline.pids if psutil.pid_exists(pid)]


def test_prompts_of_mixed_lengths_get_the_tokens_of_the_model(llama, generator):
    asked = prompts(3, 25, 1, 9, 5, 14)
    assert generator.generate(asked, max_new_tokens=8) == [generated(llama, prompt, 8) for prompt in asked]
    assert list(generator.stream(asked[1], max_new_tokens=5)) == generated(llama, asked[1], 5)
    assert len(set(generator.pipeline.pids)) == 2


def test_one_stage_holds_the_table_and_the_host_gives_its_rows(llama, generator):
    graph, table = generator.graph, llama.model.embed_tokens.weight
    held = [{name for op in stage.ops for name in graph.ops[graph.index[op]].weights} for stage in generator.plan.stages]
    assert [sum(graph.weights[name].shape == tuple(table.shape) for name in names) for names in held] == [0, 1]
    assert torch.equal(generator.capacity.table, table)
    spans = [(one.path, *(int(end, 16) for end in one.addr.split("-"))) for one in psutil.Process().memory_maps(grouped=False)]
    [path] = [path for path, begin, end in spans if begin <= generator.capacity.table.data_ptr() < end]
    assert path.removesuffix(" (deleted)").endswith("weights.safetensors")  # the worker's own copy
    assert graph.inputs == ("ids", "slots", "positions", "sampling", EMBEDDED)
    assert [op.weights for op in graph.ops if op.module == "decoder.model.model.embed_tokens"] == [()]


def test_draws_are_the_same_alone_and_beside_others(generator):
    drawn = {"temperature": 1.5, "seed": 5, "max_new_tokens": 10}
    alone = generator.submit([4, 5, 6], **drawn).result()
    together = generator.generate([[4, 5, 6], [4, 5, 6], [1] * 30, [2]], **drawn)
    assert together[0] == alone
    assert together[1] != alone


def test_killed_workers_lose_no_token(llama, generator):
    asked = prompts(2, 11, 4, 7, 20)
    wanted = [generated(llama, prompt, 12) for prompt in asked]
    restarts = generator.pipeline.restarts
    assert answers_under_kills(generator, asked, 12) == wanted
    assert generator.pipeline.restarts > restarts


def test_limits_are_those_of_the_model(generator):
    with pytest.raises(autosplit.UsageError, match=f"{LENGTH + 1} tokens, and the caches hold {LENGTH}"):
        generator.submit([1] * (LENGTH + 1))


def test_usual_sequences_that_do_not_fit_are_refused_before_anything_is_traced(llama, monkeypatch):
    monkeypatch.setattr("autosplit.modeltrace.step_family", None)
    with pytest.raises(autosplit.UsageError, match="prompt 30 and new 20 are beyond max_length 40; give max_length=49"):
        autosplit.generator(llama, "cpu:0", max_length=40, prompt=30, new=20, setup=autosplit.Setup(progress=False))


def test_prompts_that_do_not_fit_are_refused_before_anything_is_measured(llama, family, monkeypatch):
    monkeypatch.setattr("autosplit.generation.trace", lambda model, generate: family)
    monkeypatch.setattr("autosplit.generation.measure", None)
    vocabulary, setup = llama.config.vocab_size, autosplit.Setup(progress=False)
    with pytest.raises(autosplit.UsageError, match=f"{vocabulary} is no token id; ids are 0 to {vocabulary - 1}$"):
        autosplit.generator(llama, "cpu:0", prompts=[[1], [vocabulary]], setup=setup)
    with pytest.raises(autosplit.UsageError, match="leaves room for 11 new ones, and max_new_tokens is 12"):
        autosplit.generator(llama, "cpu:0", prompts=[[1] * 30], max_new_tokens=12, setup=setup)


def test_a_backend_without_caches_is_refused_before_anything_is_traced():
    """It compiled for half an hour, all but the ops of attention, and then there was no plan."""
    setup = autosplit.Setup(backends="eager,inductor", precision="bf16", progress=False)
    with pytest.raises(autosplit.UsageError, match=r"^'inductor' cannot run a generator: .* name eager, onnxruntime or"):
        autosplit.generator("transformers:LlamaForCausalLM", "cpu:0", setup=setup)


def test_hosts_and_exported_programs_are_refused_before_anything_is_measured():
    setup = autosplit.Setup(progress=False)
    object.__setattr__(setup, "hosts", SimpleNamespace())
    with pytest.raises(autosplit.UsageError, match="leave out the hosts"):
        autosplit.generator("transformers:LlamaForCausalLM", "cpu:0", setup=setup)
    with pytest.raises(autosplit.UsageError, match="give the module that it was made of"):
        autosplit.generator("whole.pt2", "cpu:0", setup=autosplit.Setup(progress=False))

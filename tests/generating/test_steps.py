"""Steps in two worker processes: the tokens of the module itself, also where workers are killed between steps and within them."""

import os
import signal
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from pipelines import wait_until
from simulated import cuda

from autosplit.backends import conformance
from autosplit.backends.trials import REFUSED
from autosplit.backends.workspace import Workspace
from autosplit.bundling.bundler import write_bundle
from autosplit.deploying.networks import deploy, machine_of_plan, place
from autosplit.errors import BackendError, PlanError, UsageError
from autosplit.generating.sampling import Sampling
from autosplit.generating.steps import step_family
from autosplit.running.modules import StageFolder
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.splitting import load_stage, save_stage, split
from autosplit.values.plan import UNKNOWN, Plan, Stage
from tests.generating.decodermodels import decoder, generated, greedy, prompts

SEQUENCES, LENGTH, CHUNK, NEW = 3, 40, 21, 12
SIZES = (1, 2, 3, 24)


@pytest.fixture(scope="module")
def llama():
    return decoder("LlamaForCausalLM")


@pytest.fixture(scope="module")
def family(llama):
    return step_family(llama, SEQUENCES, LENGTH, CHUNK)


@pytest.fixture(scope="module")
def cut(family):
    """The ops of two stages, each with a layer."""
    ops = [op.name for op in family.graph.ops]
    at = [number for number, op in enumerate(family.graph.ops) if "layers.0.mlp" in op.module][-1] + 1
    return ops[:at], ops[at:]


@pytest.fixture(scope="module")
def engine(family, cut):
    stages = tuple(Stage(f"stage{number}", tuple(ops), ("cpu:0",)) for number, ops in enumerate(cut))
    plan = Plan(family.variants[0].source, family.graph.hash, "", stages, UNKNOWN)
    with ExitStack() as opened:
        workspace, host = opened.enter_context(Workspace()), opened.enter_context(HostManager())
        yield deploy(host, "steps", family, plan, machine_of_plan(plan), workspace)


def padded(ids, slots, positions):
    """The inputs of a step, padded to the least variant that holds them."""
    size = min(size for size in SIZES if size >= len(ids))
    sampling = torch.tensor([Sampling().row], dtype=torch.float64).repeat(size, 1)
    return [*(torch.nn.functional.pad(one, (0, size - len(one))) for one in (ids, slots, positions)), sampling]


def test_tokens_equal_generate_while_each_worker_is_killed_between_steps(llama, engine):
    """The caches are memory of the host: a worker that is killed after each third step loses nothing."""
    asked, count = prompts(3, 9, 5), 0

    def step(*tokens):
        nonlocal count
        [found] = engine.run(padded(*tokens))
        if count % 3 == 2:
            os.kill(engine.pids[count // 3 % 2], signal.SIGKILL)
        count += 1
        return found

    assert greedy(step, asked, NEW) == [generated(llama, prompt, NEW) for prompt in asked]
    wait_until(lambda: engine.restarts == NEW // 3)  # the last one is counted when its worker is ready


def test_a_step_that_runs_again_after_its_worker_was_killed_gives_the_same_tokens(llama, engine):
    """Both groups of sequences are under way when a worker is killed, so that their steps are replayed."""
    asked = prompts(4, 8)

    def step(*tokens):
        futures = [engine.submit_unbounded(padded(*(column[at : at + 1] for column in tokens))) for at in range(2)]
        os.kill(engine.pids[len(asked[0]) % 2], signal.SIGKILL)
        return torch.cat([future.result(60)[0] for future in futures])

    for prompt, slot in zip(asked, (1, 2), strict=True):
        places = torch.arange(len(prompt) - 1)
        engine.run(padded(torch.tensor(prompt[:-1]), torch.full_like(places, slot), places))
    tokens = [prompt[-1] for prompt in asked]
    wanted = [generated(llama, prompt, 4) for prompt in asked]
    for number in range(4):
        positions = torch.tensor([len(prompt) - 1 for prompt in asked])
        tokens = step(torch.tensor(tokens), torch.tensor([1, 2]), positions).tolist()
        assert tokens == [found[number] for found in wanted]
        for prompt, token in zip(asked, tokens, strict=True):
            prompt.append(token)


def test_what_keeps_nothing_between_calls_refuses_states(family, cut, tmp_path, monkeypatch):
    """Each other op counts as refused once it is tried; to try those of a decoder, inductor would compile them."""
    monkeypatch.setattr(conformance, "known_faults", lambda backend, cases: {key: {REFUSED: "it was tried"} for key in cases})
    traced = family.variants[0]
    stages = tuple(Stage(f"stage{number}", tuple(ops), ("cpu:0",)) for number, ops in enumerate(cut))
    plan = Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN)
    with pytest.raises(BackendError, match="stage 'stage0' keeps states, and a part of a bundle keeps none"):
        write_bundle({"steps": (traced, plan)}, tmp_path / "bundle", trust=True)
    writing = {op.name for op in family.graph.ops if op.operator.startswith("autosplit.")}
    assert {op for op, reason in conformance.refused(traced, "inductor").items() if "writes to a state" in reason} == writing
    assert not writing & conformance.refused(traced, "onnxruntime").keys()  # torch runs them, between files of the runtime
    twice = replace(plan, stages=(replace(stages[0], devices=("cpu:0", "cpu:1")), stages[1]))
    with Workspace() as workspace, pytest.raises(PlanError, match="stage 'stage0' has 2 replicas and keeps states"):
        place(traced, twice, machine_of_plan(twice), workspace)


def test_states_are_in_no_file_and_count_as_weights(family, cut, tmp_path):
    first, last = split(family.variants[0], cut)
    assert [len(stage.states) for stage in (first, last)] == [2, 3]
    save_stage(first, tmp_path / "stage")
    state_bytes = sum(first.weights[name].nbytes for name in first.states)
    assert state_bytes == 2 * (SEQUENCES + 1) * 2 * LENGTH * 8 * 4
    assert (tmp_path / "stage" / "weights.safetensors").stat().st_size < first.weight_bytes - state_bytes / 2
    assert family.graph.stage_bytes(cut[0]) == first.weight_bytes
    again = load_stage(tmp_path / "stage")
    assert again.states == first.states
    assert not any(again.weights[name].any() for name in again.states)
    with (
        cuda(),
        pytest.raises(BackendError, match=r"keeps states such as 'decoder.* in memory of the host; put its ops on cores"),
    ):
        StageFolder(tmp_path / "stage").load(1, "cuda:0", shared=True)


def test_variants_have_the_sizes_of_the_traffic(family):
    """The example of a step up to a token of each sequence is one of each; that of more is prompts beside half of them."""
    assert [at["tokens"] for at in family.sizes] == [24, 21, 5, 3, 2, 1]
    assert not family.table  # its head has weights of its own
    chunk, _, _, decode = (variant.example_inputs for variant in family.variants[:4])
    assert (chunk[1].tolist(), chunk[2].tolist()) == ([1] + [2] * 23, [LENGTH - 1, *range(8, 31)])
    assert (decode[1].tolist(), decode[2].tolist()) == ([1, 2, 3], [LENGTH - 1] * 3)
    with pytest.raises(UsageError, match="max_sequences is 0"):
        step_family(decoder("LlamaForCausalLM"), 0)

"""A plan for both phases of a language model, its forecast, its rounds beside the usual ways, its file and its exports."""

import json
import os
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import autosplit
from autosplit.devices.discovering import as_machine
from autosplit.errors import InfeasibleError, UsageError
from autosplit.generating.bounds import phase_rows
from autosplit.generating.firsttokens import first_step, token_error
from autosplit.generating.forecast import forecast
from autosplit.generating.hostcost import HostTime
from autosplit.generating.phases import mixed_phases, traffic_on
from autosplit.generating.steps import step_family
from autosplit.generating.trials import GENERATE, NO_PLAN, _generated
from autosplit.measuring.store import open_store
from autosplit.memory.stages import count, footprints_of
from autosplit.planning.givensplits import read_given
from autosplit.tracing import splitting
from autosplit.tracing.aliasing import values_of
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_device
from autosplit.values.samples import Samples
from autosplit.values.sequences import Sequences
from tests.generating.decodermodels import decoder, generated, prompts
from tests.generating.encodermodels import answered, encoder_decoder, sources

WHISPER = "WhisperForConditionalGeneration"
[SOUND] = sources(WHISPER, 1)
SEQUENCES = Sequences(prompt=12, new=5, max_sequences=2, max_length=40)


@pytest.fixture(scope="module")
def llama():
    return decoder("LlamaForCausalLM")


@pytest.fixture(scope="module")
def family(llama):
    return autosplit.trace(llama, generate=SEQUENCES)


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def found(family, store):
    """The whole way on two cores."""
    setup = autosplit.Setup(backends="eager", progress=False, store=store)
    budget = autosplit.Budget(search_s=0, num_rounds=2)
    return autosplit.auto(family, "cpu:0,cpu:1", setup=setup, budget=budget)


@pytest.fixture(scope="module")
def split_plan(found):
    """Two stages, whichever plan was chosen."""
    [plan] = [one.plan for name, one in found.report.outcomes.items() if name == "even split (eager)"] or [found.search.plan]
    assert len(plan.stages) == 2
    return plan


def test_every_way_runs_the_same_sequences_in_the_same_rounds(found):
    outcomes = found.report.outcomes
    assert {"plan", "all cores (eager)", GENERATE} <= set(outcomes)
    assert {"replicas (eager)", "even split (eager)"} <= {*outcomes, *found.report.left_out}
    assert all(one.token_rates.tokens_per_s > 0 and one.token_rates.first_token_s > 0 for one in outcomes.values())
    assert all(not one.fault for one in outcomes.values())
    told = outcomes["plan"].predicted_token_rates
    assert 0 < told.first_token_s < SEQUENCES.new / told.tokens_per_s * SEQUENCES.max_sequences
    assert outcomes[GENERATE].predicted_token_rates is None
    assert any("the host is predicted to take" in note for note in found.report.notes)
    assert found.report.chosen != GENERATE
    assert found.plan.sequences == SEQUENCES
    row = found.report.rows()[0]
    assert {"tokens_per_s", "predicted_tokens_per_s", "first_token_s", "predicted_first_token_s", "per_token_s"} <= set(row)
    data = found.report.to_dict()["outcomes"]["plan"]
    assert data["token_rates"]["tokens_per_s"] == outcomes["plan"].throughput_per_s
    assert data["predicted_token_rates"]["per_token_s"] == told.per_token_s


def test_the_memory_of_workers_that_ran_is_known_to_the_next_plan(found, family, store):
    """The account of a plan before it ran counts all variants; then it is what was measured, in the store, too."""
    ran = {name: one for name, one in found.report.outcomes.items() if name != GENERATE}
    for outcome in ran.values():
        for stage in outcome.plan.stages:  # the account has the largest replica of the first run; 64 pages more or less are noise
            held_bytes = max(worker.held_bytes for worker in outcome.stats.stages if worker.stage == stage.name)
            assert stage.memory.measured
            assert stage.memory.held_bytes == pytest.approx(held_bytes, rel=0.05, abs=256 << 10)
    stored, phases = open_store(store).load(family.graph), found.profile.phases
    again = mixed_phases(
        family, {**phases, max(phases): stored}, traffic_on(family, found.machine), HostTime(found.profile.host_s)
    )
    measured = {(setting.backend, setting.threads) for setting in again.measured}  # a store has these, and no union of cores
    kept = [one for one in ran.values() if {(stage.backend, stage.threads) for stage in one.plan.stages} <= measured]
    assert kept
    for outcome in kept:
        counted = count(family.graph, outcome.plan, values_of(family.variants[0]), footprints_of(again))
        assert [one.memory.held_bytes for one in counted.stages] == [one.memory.held_bytes for one in outcome.plan.stages]


def test_what_is_faster_but_no_plan_is_said(found):
    """A verdict names ``generate`` where it is ahead, and keeps a plan that runs."""
    from autosplit.reports.judging import decide

    rates = {"plan": (1.0, 1.1), GENERATE: (1e6, 1.1e6)}  # the real ones may be of one round, which tells nothing
    outcomes = {name: replace(found.report.outcomes[name], rounds_per_s=rounds) for name, rounds in rates.items()}
    verdict = decide(outcomes, "throughput", False, lambda plan, seconds: [NO_PLAN])
    assert verdict.chosen == "plan"
    assert NO_PLAN in verdict.sentence


def test_the_model_s_own_generate_has_its_cache_also_where_a_spec_turned_it_off(llama):
    lengths = list[int]()
    hook = llama.register_forward_pre_hook(lambda _, args, given: lengths.append(given["input_ids"].shape[1]), with_kwargs=True)
    try:
        with patch.object(llama.config, "use_cache", False), patch.object(llama.generation_config, "use_cache", False):
            _generated(llama, [[1, 2, 3]] * 2, 4, lambda: None, None)
    finally:
        hook.remove()
    assert lengths == [3, 1, 1, 1]


def test_the_model_s_own_generate_takes_the_likeliest_token_also_where_it_ends_a_text(llama):
    wanted = _generated(llama, [[1, 2, 3]], 4, lambda: None, None)
    with patch.object(llama.generation_config, "eos_token_id", wanted[0][0]):
        assert _generated(llama, [[1, 2, 3]], 4, lambda: None, None) == wanted


def test_a_plan_file_is_opened_again(found, llama, family, split_plan, tmp_path):
    path = tmp_path / "plan.yaml"
    autosplit.write_plan(split_plan, family.graph, path)
    loaded = autosplit.load(path, llama)
    assert (loaded.family.sequences, loaded.plan.sequences) == (SEQUENCES, SEQUENCES)
    with pytest.raises(UsageError, match=r"open it with autosplit\.open_generator"):
        loaded.open()
    asked, told = prompts(4, 7, 3), list[tuple[float, str]]()
    progress = lambda step, share, text: told.append((share, text))  # noqa: E731
    with autosplit.open_generator(loaded.family, loaded.plan, loaded.machine, progress=progress) as generator:
        assert generator.generate(asked, max_new_tokens=4) == [generated(llama, prompt, 4) for prompt in asked]
    assert told == sorted(told) and [told[0][0], told[-1][0]] == [0, 1]
    assert told[-2] == (0.85, "loading the stages") and len(told) == 2 + 2 * len(family.variants)


def test_a_generator_runs_the_stages_that_were_measured(llama, family, monkeypatch):
    """It saved and prepared them again. Its trace is the one that is there: another takes most of the time."""
    monkeypatch.setattr("autosplit.generation.trace", lambda model, generate: {(llama, SEQUENCES): family}[model, generate])
    written = []
    write = splitting.write_weights
    monkeypatch.setattr(splitting, "write_weights", lambda path, *others: written.append(path) or write(path, *others))
    setup, given = autosplit.Setup(backends="eager", progress=False), {"max_sequences": 2, "max_length": 40}
    with autosplit.generator(llama, "cpu:0", Constraints(num_stages=1), prompt=12, new=5, setup=setup, **given) as generator:
        assert len(written) == 1
        [stage] = generator.pipeline.wiring.stages
        assert len([*stage.module.folder.parent.glob("*/stage.json")]) == len(stage.variants) + 1
        assert generator.generate([[3, 5]], max_new_tokens=4) == [generated(llama, [3, 5], 4)]


def test_replicas_give_the_same_tokens_and_share_the_sequences(found, llama, family):
    stage = replace(found.plan.stages[0], ops=tuple(op.name for op in family.graph.ops), devices=("cpu:0", "cpu:1"), threads=1)
    asked = prompts(3, 9, 6, 2)
    with autosplit.open_generator(family, replace(found.plan, stages=(stage,))) as generator:
        assert generator.generate(asked, max_new_tokens=4) == [generated(llama, prompt, 4) for prompt in asked]
        assert (len(generator.pipelines), generator.capacity.max_sequences) == (2, 2)


def test_a_generator_in_the_process_of_its_caller(found, llama, family):
    stage = replace(found.plan.stages[0], ops=tuple(op.name for op in family.graph.ops), devices=("cpu:0",), threads=1)
    asked = prompts(3, 9, 6)
    with autosplit.open_generator(family, replace(found.plan, stages=(stage,), process="caller")) as generator:
        assert generator.pipeline.pids == [os.getpid()]
        assert generator.generate(asked, max_new_tokens=4) == [generated(llama, prompt, 4) for prompt in asked]


def test_each_phase_has_a_bound(found, family, split_plan):
    rows = phase_rows(split_plan, family, found.machine, found.profile, bytes_per_s=1e9)
    assert [(row["phase"], row["tokens"]) for row in rows] == [("decode", 1)] * 2 + [("prefill", 130)] * 2
    assert all(row["predicted_s"] > 0 and row["cache_bytes"] > 0 for row in rows)
    assert found.profile.host_s > 0 and found.profile.start_s > 0
    assert [row["host_s"] for row in rows if row["stage"] == split_plan.stages[0].name] == [0.0, 0.0]
    slow = phase_rows(split_plan, family, found.machine, found.profile, bytes_per_s=1.0)
    assert {row["bound by"] for row in slow} == {"memory bandwidth"}
    held = sum(row["weight_bytes"] + row["cache_bytes"] for row in rows[:2])
    assert held == sum(family.graph.stage_bytes(stage.ops) for stage in split_plan.stages)


def test_a_plan_on_one_of_two_cores_has_no_busy_neighbour(found, family, split_plan):
    """Where devices are three times as fast beside idle ones, one stage on one core is, replicas are not, stages are at times."""

    def relieved(share):
        def of(profile):
            def alone(one):
                samples = Samples((share * one.whole.median_s,))
                return replace(one, alone=samples, provenance=replace(one.provenance, num_cores=2))

            return replace(profile, measured={setting: alone(one) for setting, one in profile.measured.items()})

        return replace(of(found.profile), phases={tokens: of(one) for tokens, one in found.profile.phases.items()})

    whole = replace(split_plan.stages[0], ops=tuple(op.name for op in family.graph.ops), threads=1)
    one = replace(split_plan, stages=(replace(whole, devices=("cpu:0",)),))
    beside = replace(split_plan, stages=(replace(whole, devices=("cpu:0", "cpu:1")),))
    plans, quick, slow = (one, beside, split_plan), relieved(1 / 3), relieved(1.0)
    (fast, usual), replicas, split = [[forecast(plan, family, found.machine, one) for one in (quick, slow)] for plan in plans]
    assert replicas[0] == replicas[1]
    assert split[1].per_token_s / 3 < split[0].per_token_s < split[1].per_token_s
    host_s = slow.host_s
    assert fast.per_token_s - host_s == pytest.approx((usual.per_token_s - host_s) / 3, rel=0.01)


def test_maps_of_modules_hold_for_a_generator(llama, family, split_plan, tmp_path):
    """The names are those of the model itself, of which the step is made."""
    told = autosplit.export(family, split_plan, tmp_path / "vllm", "vllm").notes
    assert told[0] == "layers of 'model.layers' on each rank: 1,1"
    assert "VLLM_PP_LAYER_PARTITION=1,1" in (tmp_path / "vllm" / "vllm.env").read_text()
    autosplit.export(family, split_plan, tmp_path / "accelerate", "accelerate")
    devices = json.loads((tmp_path / "accelerate" / "device_map.json").read_text())
    names = {name for name, _ in (*llama.named_modules(), *llama.named_parameters())}
    assert set(devices) <= names
    assert set(devices.values()) == {0, 1}
    with pytest.raises(UsageError, match="keep no state"):
        autosplit.export(family, split_plan, tmp_path / "none", "onnxruntime")


def test_the_split_of_another_tool_is_judged(family, tmp_path):
    """By the seconds of the largest step: numbers of layers, as vLLM takes them, and names of the user's model, as accelerate."""
    setup = autosplit.Setup(progress=False)
    judged = autosplit.judge(family, "1,1", "cpu:0,cpu:1", setup=setup, time_limit_s=1)
    modules = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers": 1, "model.norm": 1, "lm_head": 1}
    (tmp_path / "device_map.json").write_text(json.dumps(modules))
    split = read_given(str(tmp_path / "device_map.json"), family.graph, as_machine("cpu:0,cpu:1"), family.prefix)
    assert len(split.stages) == 2
    assert {len(plan.stages) for plan in judged.plans.values()} >= {2}
    assert all(row["items_per_s"] > 0 for row in judged.rows())


def test_plans_for_the_time_per_token_and_within_limits(family, found):
    """The plan with the least time per token is no slower than the one with the most tokens per second, by the same forecast."""

    def searched(sequences=SEQUENCES, **demands):
        asked = replace(family, sequences=sequences), found.profile, "cpu:0,cpu:1", autosplit.Constraints(**demands)
        return autosplit.search(*asked, setup=autosplit.Setup(progress=False), budget=autosplit.Budget(search_s=0, planner_s=0.3))

    fast, quick = searched().plan, searched(objective="latency").plan
    assert (fast.objective, quick.objective) == ("throughput", "latency")
    assert quick.prediction.latency_s <= fast.prediction.latency_s
    assert quick.prediction.throughput_per_s <= fast.prediction.throughput_per_s
    assert "tokens/s" in fast.summary() and "tokens/s" in fast.predicted()
    told = forecast(fast, family, found.machine, found.profile)
    assert (fast.prediction.throughput_per_s, fast.prediction.latency_s) == (told.tokens_per_s, told.per_token_s)
    easy = replace(SEQUENCES, per_token_s=60.0, first_token_s=600.0)
    assert searched(easy).plan.sequences == easy
    with pytest.raises(InfeasibleError, match=r"at most 1\.0 us from a token to the next one \(at best .*, or fewer sequences"):
        searched(replace(SEQUENCES, per_token_s=1e-6))


def test_what_a_generator_has_not_is_refused(family, found):
    gpu = Machine.of(map(parse_device, ("cpu:0", "cuda:0")))
    with pytest.raises(UsageError, match=r"in memory of this machine, for its cores; leave out cuda:0"):
        autosplit.measure(family, gpu)
    with pytest.raises(UsageError, match="max_error chooses precisions for requests of one size"):
        autosplit.search(family, found.profile, "cpu:0,cpu:1", setup=autosplit.Setup(max_error=0.1))
    with pytest.raises(UsageError, match="limits on its tokens in place of max_latency"):
        autosplit.search(family, found.profile, "cpu:0,cpu:1", autosplit.Constraints(max_latency_s=1.0))
    with pytest.raises(UsageError, match="has inputs and sizes of its own"):
        autosplit.trace(family.module, generate="prompt=3", sizes={"seq": "2..3"})


@pytest.mark.parametrize(
    ("name", "kind", "asked"), [("GPT2LMHeadModel", decoder, prompts(12)[0]), (WHISPER, encoder_decoder, SOUND)]
)
def test_a_first_token_is_judged_by_its_score(name, kind, asked):
    """One of two about as likely tokens refused a plan. A prompt of several steps beside a table on the host, and an encoder."""
    model = kind(name)
    settings, head = model.generation_config, model.get_output_embeddings()
    settings.suppress_tokens = settings.begin_suppress_tokens = None
    with torch.no_grad():
        head.weight[1::2] = head.weight[:-1:2] * (1 - 1e-5)  # each token but the last one has a twin
    family = step_family(model, 2, 40, 4, prompt=12, new=5)
    step = first_step(family, asked, None)
    likeliest = int(step.own[0][0][0])
    assert [likeliest] == (generated if kind is decoder else answered)(model, asked, 1)
    error, limit = token_error(step, likeliest ^ 1, ["f32"])
    assert 0 < error <= limit < token_error(step, (likeliest + 40) % 96, ["f32"])[0]

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn

from autosplit.backends.base import get_backend
from autosplit.backends.profiling import probe
from autosplit.measuring import stage_timer
from autosplit.measuring.stage_timer import LoadedStage, OpTimer, PassBudget, Timer, run_queue_s
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import StageProgram, save_stage, split
from autosplit.values.samples import Samples


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model("autosplit.examples.mlp:mlp?depth=4&width=16"))


@pytest.fixture(scope="module")
def program(traced: Traced) -> StageProgram:
    return split(traced, [[op.name for op in traced.graph.ops]])[0]


def test_every_op_is_timed_once_a_pass(traced: Traced, program: StageProgram) -> None:
    probe = OpTimer(program.module, threads=1)
    with torch.inference_mode():
        probe.sample(traced.example_inputs)
        probe.sample(traced.example_inputs)
    nodes = {node.name: node.samples_s for node in probe.nodes()}
    assert set(nodes) == {op.name for op in traced.graph.ops}
    assert all(len(samples) == 2 and min(samples) > 0 for samples in nodes.values())


def test_timed_passes_compute_what_the_model_computes(traced: Traced, program: StageProgram) -> None:
    probe = OpTimer(program.module, threads=torch.get_num_threads())
    with torch.inference_mode():
        outputs = probe.sample(traced.example_inputs)
        assert all(torch.equal(one, other) for one, other in zip(outputs, traced.program(*traced.example_inputs), strict=True))


@pytest.mark.parametrize("backend", ["eager", "onnxruntime"])
def test_rounds_interleave_whole_and_profiled_passes(backend: str, tmp_path, traced: Traced, program: StageProgram) -> None:
    save_stage(program, tmp_path / "stage")
    get_backend(backend).prepare(program, tmp_path / "stage")
    timer = Timer(LoadedStage(program, tmp_path / "stage", traced.example_inputs), backend, 1)
    assert len(timer.time(PassBudget(0.0, least=3, most=3)).whole_s) == 3
    timed = timer.time(PassBudget(0.01, least=2, most=5, overlap_s=0.01), ops=True)
    assert 2 <= len(timed.whole_s) <= 5
    assert timed.nodes and all(len(node.samples_s) == len(timed.whole_s) for node in timed.nodes)


class Halves(nn.Module):
    """May take and give bfloat16, which numpy does not have."""

    def __init__(self, made: torch.dtype) -> None:
        super().__init__()
        self.made = made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float().relu().to(self.made)


@pytest.mark.parametrize(("given", "made"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_what_a_profiler_cannot_be_given_is_timed_as_a_whole(tmp_path, given: torch.dtype, made: torch.dtype) -> None:
    model = trace(load_model(Halves(made).eval(), inputs=(torch.randn(4, 4).to(given),)))
    [stage] = split(model, [[op.name for op in model.graph.ops]])
    save_stage(stage, tmp_path / "stage")
    get_backend("onnxruntime").prepare(stage, tmp_path / "stage")
    loaded = LoadedStage(stage, tmp_path / "stage", model.example_inputs)
    timed = Timer(loaded, "onnxruntime", 1).time(PassBudget(0.0, least=2, most=2), ops=True)
    assert len(timed.whole_s) == 2 and timed.nodes == ()
    profiled = probe("openvino", tmp_path / "stage", 1)  # which takes tensors without numpy
    assert profiled is not None and torch.equal(profiled.sample(model.example_inputs)[0], model.run(*model.example_inputs))
    assert profiled.nodes()


@pytest.mark.parametrize(
    ("done", "elapsed_s", "more"),
    [
        (1, 2.1, True),
        (2, 0.9, True),
        (2, 2.1, False),
        (3, 0.9, True),
        (60, 1.9, False),
        (60, 0.2, True),
        (60, 0.3, False),
    ],
)
def test_rounds_end_by_time_or_number_but_overlap(done: int, elapsed_s: float, more: bool) -> None:
    assert PassBudget(2.0).more([1.0 + number % 3 for number in range(done)], elapsed_s) is more


@pytest.mark.parametrize(("done", "elapsed_s", "more"), [(4, 0.9, True), (5, 0.2, True), (5, 0.9, False)])
def test_rounds_end_once_the_median_is_certain(done: int, elapsed_s: float, more: bool) -> None:
    assert PassBudget(2.0).more([1.0, 1.001, 9.0, 1.0, 1.001][:done], elapsed_s) is more


EVEN = (1.0, 1.001, 0.999, 1.0, 1.001)


@pytest.mark.parametrize(
    ("earlier", "done", "more"),
    [
        (EVEN, [1.002] * 2, False),
        (EVEN, [1.4] * 2, False),
        ([1.9 * one for one in EVEN], [1.002] * 2, True),
        ([1.9 * one for one in EVEN], EVEN, False),
        ([1.0, 1.1, 0.9, 1.05, 0.95], [1.02, 0.97], True),
    ],
    ids=["as before", "slower, so it will not count", "faster, so it counts alone", "faster and certain", "uncertain before"],
)
def test_a_later_round_ends_once_it_is_certain_with_the_earlier_one(
    earlier: Sequence[float], done: Sequence[float], more: bool
) -> None:
    assert PassBudget(2.0, least=2, earlier=Samples(tuple(earlier))).more(done, 0.5) is more


def test_recorded_rounds_end_early_with_the_median_of_all_their_passes() -> None:
    """Of passes of seven models on three backends, recorded beside a busy neighbour."""
    recorded = [
        one["whole"]
        for path in sorted((Path(__file__).parents[2] / "profiles").glob("*/cpu-*.json"))
        for one in json.loads(path.read_text())["entries"]
        if one["whole"]
    ]
    errors, counts = list[float](), list[int]()
    for samples_s in (one for one in recorded if len(one) > 12):
        budget = PassBudget(math.inf, least=2, most=len(samples_s), overlap_s=0.0)
        counts.append(next(count for count in range(len(samples_s) + 1) if not budget.more(samples_s[:count], 1.0)))
        errors.append(abs(median(samples_s[: counts[-1]]) / median(samples_s) - 1))
    assert len(errors) > 20 and median(counts) < 10
    assert median(errors) < 0.01 and sorted(errors)[int(0.9 * len(errors))] < 0.03


def test_of_a_long_model_few_passes_are_made(traced: Traced, program: StageProgram, tmp_path: Path, monkeypatch) -> None:
    save_stage(program, tmp_path / "stage")
    budget, passes = PassBudget(0.1, least=2, overlap_s=0.0, least_long=1), []
    for long_s, num_passes in ((0.0, 1), (60.0, 3)):
        monkeypatch.setattr(stage_timer, "LONG_S", long_s)
        timer = Timer(LoadedStage(program, tmp_path / "stage", traced.example_inputs), "eager", 1)
        run = timer.run
        timer.run = lambda inputs, run=run: passes.append(time.sleep(0.1)) or run(inputs)  # type: ignore[func-returns-value, misc]
        passes.clear()
        timer.time(budget, wake=True)
        assert len(passes) == num_passes


def test_eager_times_are_positive(traced: Traced, program: StageProgram) -> None:
    with torch.inference_mode():
        seconds = OpTimer(program.module).least_s(traced.example_inputs)
    assert set(seconds) == {op.name for op in traced.graph.ops} and min(seconds.values()) > 0


def test_waits_never_shrink() -> None:
    first = run_queue_s(1)
    assert 0 <= run_queue_s(2) <= run_queue_s(1) and run_queue_s(1) >= first

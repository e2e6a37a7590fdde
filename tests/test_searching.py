import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.constraints import Constraints
from autosplit.loading import load_model
from autosplit.machine import Machine, parse_device
from autosplit.plan import Plan, Prediction, Source, Stage
from autosplit.profile import Profile
from autosplit.running.messages import Event
from autosplit.samples import Setting
from autosplit.searching import Job, Trial, _Hunt, corrected, shares_s
from autosplit.tracing import trace

SECOND = 1_000_000_000
SOURCE = Source("m", 1)


def plan(*stages: Stage) -> Plan:
    return Plan(SOURCE, "graph", "profile", stages, Prediction(1.0, 1.0, 1.0, 0.0, 1.0))


@given(st.lists(st.lists(st.integers(1, 50), min_size=1, max_size=6), min_size=1, max_size=3))
def test_what_workers_took_of_a_device_adds_up_to_when_it_was_busy(lengths: list[list[int]]) -> None:
    spans = [[(sum(own[:k]) * SECOND, sum(own[: k + 1]) * SECOND) for k in range(len(own))] for own in lengths]
    found = shares_s(spans)
    assert sum(map(sum, found)) == pytest.approx(max(map(sum, lengths)))
    for own, seconds in zip(lengths, found, strict=True):
        assert all(taken <= length + 1e-9 for taken, length in zip(seconds, own, strict=True))


class Ran:
    """A pipeline whose workers ran these spans, in seconds."""

    def __init__(self, *spans: tuple[int, int]) -> None:
        self.spans = spans

    def events(self) -> list[list[Event]]:
        return [[Event(0, 0, a * SECOND, a * SECOND, a * SECOND, b * SECOND, b * SECOND, 0)] for a, b in self.spans]


def test_stages_on_one_core_are_not_charged_for_each_other_and_know_which_neighbours_were_busy() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=3&width=8"))
    ops = [op.name for op in traced.graph.ops]
    seconds = {(op, device): 1.0 for op in ops for device in ("cpu:0", "cpu:1")}
    profile = Profile.given(traced.graph, seconds)
    cut = [ops[:1], ops[1:2], ops[2:]]
    placed = zip(cut, ("cpu:0", "cpu:1", "cpu:0"), strict=True)
    stages = [Stage(f"s{n}", tuple(part), (device,), "eager") for n, (part, device) in enumerate(placed)]
    seen = corrected(profile, plan(*stages), Ran((0, 4), (0, 3), (2, 6)))
    on_0, on_1 = Setting("cpu:0", "eager", 1), Setting("cpu:1", "eager", 1)
    assert [stage.samples.median_s for stage in seen.stages] == [3, 3, 3]
    assert [(stage.setting, stage.busy) for stage in seen.stages] == [(on_0, ("cpu:1",)), (on_1, ("cpu:0",)), (on_0, ("cpu:1",))]


def test_a_pipeline_and_replicas_of_the_best_backend_are_tried_first() -> None:
    job = Job(Machine.of([parse_device("cpu:0"), parse_device("cpu:1")]), SOURCE, Constraints(), ("eager", "onnxruntime"))
    hunt = _Hunt(job, None, None, 1.0, lambda share, text: None)
    hunt.trials.append(Trial({}, plan(Stage("s", ("op",), ("cpu:0", "cpu:1"), "onnxruntime")), 1.0, 1.0))
    tried = [(t["num_stages"], t["replicate"], t["backend"]) for t in hunt._first_trials()]
    assert tried == [(1, True, "onnxruntime"), (2, False, "onnxruntime"), (1, True, "onnxruntime")]

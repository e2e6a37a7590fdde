"""A run as a timeline: what workers noted, as actions that can be drawn beside the simulated ones."""

from itertools import pairwise

import pytest
from pipelines import increment, local, request, slow_increment

from autosplit.running.messages import WorkerEvent
from autosplit.running.pipeline import Pipeline
from autosplit.running.recording import actions_of, record
from autosplit.running.ring import DATA, ERROR
from autosplit.values.timeline import chrome_trace, lanes


def test_events_become_actions_from_the_first_request_on() -> None:
    milli = 1_000_000
    first = WorkerEvent(7, DATA, 0, 5 * milli, 10 * milli, 30 * milli, 40 * milli, 4 * milli)
    failed = WorkerEvent(8, ERROR, 0, 0, 0, 0, 0, 0)
    actions = actions_of([("a", 0, "host", [first, failed]), ("b", 1, "node-b", [first._replace(number=9)])])
    assert [(action.lane, action.request, action.kind) for action in actions] == [
        ("a.0", 0, "compute"),
        ("b.1", 2, "compute"),
        ("a.0", 0, "send"),
        ("b.1", 2, "send"),
    ]
    assert (actions[0].start_s, actions[0].end_s) == pytest.approx((0.0, 0.020))
    assert (actions[2].start_s, actions[2].end_s) == pytest.approx((0.024, 0.030))
    assert actions_of([("a", 0, "host", [failed])]) == ()


@pytest.mark.timeout(60)
def test_a_pipeline_is_recorded_while_it_runs() -> None:
    stages = [local("first", slow_increment, "x", "y", replicas=2), local("second", increment, "y", "z")]
    with Pipeline(stages, inputs=("x",), outputs=("z",)) as pipeline:
        pipeline.run_many([request(number) for number in range(6)])
        actions = record(pipeline, clear=True)
        assert record(pipeline) == ()
    assert sorted(lanes(actions)) == ["first.0", "first.1", "second.0"]
    computed = [action for action in actions if action.kind == "compute"]
    assert sorted(action.request for action in computed if action.stage == "second") == list(range(6))
    assert all(action.duration_s >= 0.002 for action in computed if action.stage == "first")
    for lane in lanes(actions):
        mine = sorted((action.start_s, action.end_s) for action in actions if action.lane == lane)
        assert all(one[1] <= other[0] + 1e-9 for one, other in pairwise(mine))
    assert len(chrome_trace(actions[:1], measured=actions)["traceEvents"]) > len(actions)

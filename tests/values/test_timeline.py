"""Timelines: the text form, Gantt rows, and a trace that a viewer can read."""

import itertools
import json

import pytest

from autosplit.errors import UsageError
from autosplit.values.timeline import MAX_COLUMNS, MAX_SLICES, Action, chrome_trace, grid, lanes

ACTIONS = [
    Action("a", 0, 0, 0.0, 1.0, "compute"),
    Action("a", 1, 1, 0.0, 2.0, "compute"),
    Action("a", 0, 0, 1.0, 1.5, "send"),
    Action("b", 0, 0, 1.5, 2.5, "compute"),
]


def test_replicas_of_a_stage_stand_together() -> None:
    assert lanes([ACTIONS[0], ACTIONS[3], ACTIONS[1]]) == ["a.0", "a.1", "b.0"]


def test_the_grid_shows_what_a_lane_does_in_the_middle_of_each_tick() -> None:
    assert grid(ACTIONS, tick_s=0.5).splitlines() == [
        "a.0 | 0 0 0 . .",
        "a.1 | 1 1 1 1 .",
        "b.0 | . . . 0 0",
    ]


def test_a_long_grid_is_cut_and_says_so() -> None:
    text = grid([Action("a", 0, k, float(k), k + 1.0, "compute") for k in range(MAX_COLUMNS + 5)])
    assert text.splitlines()[-1] == "… 5 more ticks of 1 s"


def test_an_empty_grid_and_a_bad_tick() -> None:
    assert grid([]) == "(nothing happened)"
    with pytest.raises(UsageError, match="tick_s must be positive, but is -1"):
        grid(ACTIONS, tick_s=-1)


def test_the_trace_is_json_with_predicted_beside_measured() -> None:
    trace = json.loads(json.dumps(chrome_trace(ACTIONS, measured=ACTIONS[:1])))
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "predicted", 2: "measured"}
    spans = [event for event in events if event["ph"] == "X"]
    assert len(spans) == 5
    assert spans[2] == {
        "name": "send",
        "ph": "X",
        "pid": 1,
        "tid": 1,
        "ts": 1e6,
        "dur": 0.5e6,
        "args": {"request": 0},
    }
    threads = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert all((span["pid"], span["tid"]) in threads for span in spans)


def test_arrows_follow_a_request_over_its_stages() -> None:
    path = [Action(stage, 0, 7, float(at), at + 0.5, "compute") for at, stage in enumerate("abc")]
    arrows = [event for event in chrome_trace([*path, path[0]._replace(request=8)])["traceEvents"] if event["ph"] in "stf"]
    assert [(event["ph"], event["ts"], event["tid"], event["id"]) for event in arrows] == [
        ("s", 0, 1, "predicted.7"),
        ("t", 1e6, 2, "predicted.7"),
        ("f", 2e6, 3, "predicted.7"),
    ]


def test_each_host_is_a_process_of_the_trace() -> None:
    path = [Action(stage, 0, 7, float(at), at + 0.5, "compute", f"node-{stage}") for at, stage in enumerate("ab")]
    events = chrome_trace(ACTIONS, measured=path)["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {1: "predicted", 2: "measured on node-a", 3: "measured on node-b"}
    lanes = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert (lanes[2, 1], lanes[3, 1]) == ("a.0", "b.0")
    arrows = [event for event in events if event["ph"] in "sf" and event["id"] == "measured.7"]
    assert [(event["ph"], event["pid"], event["tid"]) for event in arrows] == [("s", 2, 1), ("f", 3, 1)]


def test_spans_of_one_lane_do_not_overlap_in_the_trace() -> None:
    spans = [event for event in chrome_trace(ACTIONS)["traceEvents"] if event["ph"] == "X"]
    for lane in {span["tid"] for span in spans}:
        mine = sorted((span for span in spans if span["tid"] == lane), key=lambda span: span["ts"])
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(mine))


def test_a_trace_of_many_requests_stays_below_3_mb_and_keeps_the_latest() -> None:
    many = [Action(f"stage{at}", 0, k, k + at / 2, k + at / 2 + 0.4, "compute") for k in range(20_000) for at in range(2)]
    trace = chrome_trace(many, measured=many)
    kept = {event["args"]["request"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert len(json.dumps(trace)) < 3_000_000
    assert kept == set(range(20_000 - MAX_SLICES // 2, 20_000))

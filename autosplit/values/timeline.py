"""Timeline: actions of stages over time, from a simulation or a run, as text and as a Chrome trace. No torch."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from autosplit.errors import UsageError
from autosplit.values.machine import HOST

ActionKind = Literal["receive", "compute", "send"]
MAX_COLUMNS = 120
"""Largest number of columns of the text form. The text says how many further columns there are."""


MAX_SLICES = 6000
"""Most actions of one process of a Chrome trace, about 1.4 MB of JSON; actions of the earliest requests are left out."""


class Action(NamedTuple):
    """A stage replica at work on one request, from ``start_s`` to ``end_s`` seconds after the first request came."""

    stage: str
    replica: int
    request: int
    start_s: float
    end_s: float
    kind: ActionKind
    host: str = HOST
    """The host of the replica: ``host`` is the one that drives."""

    @property
    def lane(self) -> str:
        """The row of the action in a drawing: stage and replica."""
        return f"{self.stage}.{self.replica}"

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


Places = dict[tuple[str, str], tuple[int, int]]
"""Host and lane to their process and thread in a Chrome trace."""


def lanes(actions: Iterable[Action], host: str = "") -> list[str]:
    """The lanes, of one host if it is given, in the order of their first actions; replicas of one stage stand together."""
    seen: dict[str, set[int]] = {}
    for action in actions:
        if host in ("", action.host):
            seen.setdefault(action.stage, set()).add(action.replica)
    return [f"{stage}.{replica}" for stage, replicas in seen.items() for replica in sorted(replicas)]


def grid(actions: Sequence[Action], tick_s: float | None = None) -> str:
    """The actions as a table: a line for each stage replica, a column for each tick, and in it the number of the request.

    A cell shows the state in the middle of its tick; ``.`` means idle. Actions shorter than a tick may be missing.

    Args:
        tick_s: seconds of a column, by default the shortest computation.
    Raises: UsageError: ``tick_s`` is not positive.

    >>> print(grid([Action("a", 0, 0, 0, 1, "compute"), Action("b", 0, 0, 1, 2, "compute"), Action("a", 0, 1, 1, 2, "compute")]))
    a.0 | 0 1
    b.0 | . 0
    """
    if not actions:
        return "(nothing happened)"
    tick = _shortest_s(actions) if tick_s is None else tick_s
    if tick <= 0:
        raise UsageError(f"tick_s must be positive, but is {tick} s")
    makespan_s = max(action.end_s for action in actions)
    # A rounding error in a sum of durations must not open a column of its own.
    columns = max(1, int(makespan_s / tick + 1 - 1e-6))
    width = len(str(max(action.request for action in actions)))
    names = lanes(actions)
    margin = max(map(len, names))
    busy = {name: sorted((a for a in actions if a.lane == name), key=lambda a: a.start_s) for name in names}
    lines = []
    for name in names:
        starts = [action.start_s for action in busy[name]]
        cells = [_cell(busy[name], starts, (column + 0.5) * tick) for column in range(min(columns, MAX_COLUMNS))]
        lines.append(f"{name:<{margin}} | " + " ".join(f"{cell:>{width}}" for cell in cells))
    if columns > MAX_COLUMNS:
        lines.append(f"… {columns - MAX_COLUMNS} more ticks of {tick:.4g} s")
    return "\n".join(lines)


def _shortest_s(actions: Iterable[Action]) -> float:
    positive = [action.duration_s for action in actions if action.kind == "compute" and action.duration_s > 0]
    return min(positive, default=1.0)


def _cell(busy: Sequence[Action], starts: Sequence[float], moment_s: float) -> str:
    last = bisect_right(starts, moment_s) - 1
    return str(busy[last].request) if last >= 0 and moment_s < busy[last].end_s else "."


def chrome_trace(predicted: Iterable[Action], measured: Iterable[Action] | None = None) -> dict[str, Any]:
    """The actions in the Chrome trace event format, for https://ui.perfetto.dev or ``chrome://tracing``.

    Predicted and measured actions are processes of the trace, one for each host of a cluster, and stage replicas are threads.
    Arrows follow each request from stage to stage. Times in the trace are microseconds. Slices are named by their kind of action,
    so that a viewer adds them up.

    Args:
        predicted: actions of a simulation.
        measured: actions of a run, or None.
    Returns: plain data for ``json.dump``.

    >>> trace = chrome_trace([Action("a", 0, 0, 0.0, 0.5, "compute")])
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    ['compute']
    """
    events: list[dict[str, Any]] = []
    num_processes = 0
    for run, actions in (("predicted", predicted), ("measured", measured)):
        if actions is not None:
            kept = _latest(list(actions))
            places: Places = {}
            for host in dict.fromkeys(action.host for action in kept) or [HOST]:
                num_processes += 1
                own = {lane: thread for thread, lane in enumerate(lanes(kept, host), start=1)}
                events += _names(num_processes, run if host == HOST else f"{run} on {host}", own)
                places |= {(host, lane): (num_processes, thread) for lane, thread in own.items()}
            events += [*map(partial(_slice, places), kept), *_arrows(run, places, kept)]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _latest(actions: list[Action]) -> list[Action]:
    """The actions of the latest requests, each request whole, at most ``MAX_SLICES`` of them."""
    if len(actions) <= MAX_SLICES:
        return actions
    first = sorted((action.request for action in actions), reverse=True)[MAX_SLICES]
    return [action for action in actions if action.request > first]


def _names(process: int, name: str, threads: Mapping[str, int]) -> list[dict[str, Any]]:
    """The names and the order of a process and of its lanes."""
    events = [
        _metadata(process, 0, "process_name", {"name": name}),
        _metadata(process, 0, "process_sort_index", {"sort_index": process}),
    ]
    for lane, thread in threads.items():
        events.append(_metadata(process, thread, "thread_name", {"name": lane}))
        events.append(_metadata(process, thread, "thread_sort_index", {"sort_index": thread}))
    return events


def _slice(places: Places, action: Action) -> dict[str, Any]:
    process, thread = places[action.host, action.lane]
    return {
        "name": action.kind,
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": round(action.start_s * 1e6, 3),
        "dur": round(action.duration_s * 1e6, 3),
        "args": {"request": action.request},
    }


def _arrows(run: str, places: Places, actions: Iterable[Action]) -> list[dict[str, Any]]:
    """Flow events that join the computations of each request. A viewer attaches each to the slice at its time."""
    paths: dict[int, list[Action]] = {}
    for action in sorted(actions, key=lambda one: one.start_s):
        if action.kind == "compute":
            paths.setdefault(action.request, []).append(action)
    return [
        {
            "name": "request",
            "cat": "request",
            "ph": "s" if action is path[0] else "f" if action is path[-1] else "t",
            "bp": "e",
            "id": f"{run}.{request}",
            "pid": places[action.host, action.lane][0],
            "tid": places[action.host, action.lane][1],
            "ts": round(action.start_s * 1e6, 3),
        }
        for request, path in paths.items()
        for action in path
        if len(path) > 1
    ]


def _metadata(process: int, thread: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(arguments)}

"""Timeline: actions of stages over time, from a simulation or a run, as text and as a Chrome trace. No torch."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from autosplit.errors import UsageError

ActionKind = Literal["receive", "compute", "send"]
MAX_COLUMNS = 120
"""Largest number of columns of the text form. The text says how many further columns there are."""


MAX_SLICES = 6000
"""Most actions of one process of a Chrome trace, about 1.4 MB of JSON; actions of the earliest requests are left out."""


class Action(NamedTuple):
    """A stage replica at work on one request, from ``start_s`` to ``end_s`` seconds after the first request came.

    >>> Action("stage1", 0, 7, 0.5, 0.75, "compute").text()
    'stage1.0 compute 7'
    """

    stage: str
    replica: int
    request: int
    start_s: float
    end_s: float
    kind: ActionKind

    @property
    def lane(self) -> str:
        """The row of the action in a drawing: stage and replica."""
        return f"{self.stage}.{self.replica}"

    @property
    def duration_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s

    def text(self) -> str:
        """Lane, kind and request."""
        return f"{self.lane} {self.kind} {self.request}"


def lanes(actions: Iterable[Action]) -> list[str]:
    """The lanes in the order of their first actions; replicas of one stage stand together."""
    seen: dict[str, set[int]] = {}
    for action in actions:
        seen.setdefault(action.stage, set()).add(action.replica)
    return [f"{stage}.{replica}" for stage, replicas in seen.items() for replica in sorted(replicas)]


def grid(actions: Sequence[Action], tick_s: float | None = None) -> str:
    """The actions as a table: a line for each stage replica, a column for each tick, and in it the number of the request.

    A cell shows the state in the middle of its tick; ``.`` means idle. Actions shorter than a tick may be missing.

    Args:
        actions: the actions.
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

    Predicted and measured actions are two processes of the trace, and stage replicas are threads. Arrows follow each request
    from stage to stage. Times in the trace are microseconds. Slices are named by what they do, so that a viewer adds them up.

    Args:
        predicted: actions of a simulation.
        measured: actions of a run, or None.
    Returns: plain data for ``json.dump``.

    >>> trace = chrome_trace([Action("a", 0, 0, 0.0, 0.5, "compute")])
    >>> [event["name"] for event in trace["traceEvents"] if event["ph"] == "X"]
    ['compute']
    """
    events: list[dict[str, Any]] = []
    for process, (name, actions) in enumerate((("predicted", predicted), ("measured", measured)), start=1):
        if actions is not None:
            events += _process_events(process, name, _latest(list(actions)))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _latest(actions: list[Action]) -> list[Action]:
    """The actions of the latest requests, each request whole, at most ``MAX_SLICES`` of them."""
    if len(actions) <= MAX_SLICES:
        return actions
    first = sorted((action.request for action in actions), reverse=True)[MAX_SLICES]
    return [action for action in actions if action.request > first]


def _process_events(process: int, name: str, actions: Sequence[Action]) -> list[dict[str, Any]]:
    threads = {lane: number for number, lane in enumerate(lanes(actions), start=1)}
    events = [
        _metadata(process, 0, "process_name", {"name": name}),
        _metadata(process, 0, "process_sort_index", {"sort_index": process}),
    ]
    for lane, number in threads.items():
        events.append(_metadata(process, number, "thread_name", {"name": lane}))
        events.append(_metadata(process, number, "thread_sort_index", {"sort_index": number}))
    for action in actions:
        events.append(
            {
                "name": action.kind,
                "ph": "X",
                "pid": process,
                "tid": threads[action.lane],
                "ts": round(action.start_s * 1e6, 3),
                "dur": round(action.duration_s * 1e6, 3),
                "args": {"request": action.request},
            }
        )
    return events + _arrows(process, threads, actions)


def _arrows(process: int, threads: Mapping[str, int], actions: Iterable[Action]) -> list[dict[str, Any]]:
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
            "id": f"{process}.{request}",
            "pid": process,
            "tid": threads[action.lane],
            "ts": round(action.start_s * 1e6, 3),
        }
        for request, path in paths.items()
        for action in path
        if len(path) > 1
    ]


def _metadata(process: int, thread: int, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": process, "tid": thread, "args": dict(arguments)}

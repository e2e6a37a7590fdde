"""Record a running pipeline as a timeline: measured actions, to be drawn and traced beside simulated ones."""

from collections.abc import Iterable, Mapping, Sequence

from autosplit.running.engine import Engine
from autosplit.running.messages import WorkerEvent
from autosplit.running.ring import DATA
from autosplit.values.machine import host_of
from autosplit.values.timeline import Action


def record(pipelines: Engine | Mapping[str, Engine], *, clear: bool = False) -> tuple[Action, ...]:
    """The last actions of each worker of a running pipeline, by start; request 0 is the first that is still known.

    Args:
        pipelines: one, or several by name on one time axis; then stages are called ``name/stage``. They go on running.
        clear: forget these actions, so that the next call returns later ones only.
    """
    named = pipelines if isinstance(pipelines, Mapping) else {"": pipelines}
    return actions_of(
        (f"{name}/{stats.stage}" if name else stats.stage, stats.replica, host_of(stats.device), events)
        for name, one in named.items()
        for stats, events in one.reports(clear=clear)
    )


def actions_of(workers: Iterable[tuple[str, int, str, Sequence[WorkerEvent]]]) -> tuple[Action, ...]:
    """The events of workers, each with stage, replica and host, as actions; failed and skipped requests are left out.

    A worker may wait for free slots between its copies. The copies are drawn without these gaps, at the end.
    """
    known = [(stage, replica, host, event) for stage, replica, host, events in workers for event in events if event.flag == DATA]
    if not known:
        return ()
    origin_ns = min(event.got_ns for *_, event in known)
    first = min(event.number for *_, event in known)
    actions = []
    for stage, replica, host, event in known:
        request = event.number - first
        got_s, ran_s, sent_s = ((time - origin_ns) / 1e9 for time in (event.got_ns, event.ran_ns, event.sent_ns))
        handed_s = min(sent_s, ran_s + event.blocked_ns / 1e9)
        actions.append(Action(stage, replica, request, got_s, ran_s, "compute", host))
        actions.append(Action(stage, replica, request, handed_s, sent_s, "send", host))
    return tuple(sorted(actions, key=lambda action: action.start_s))

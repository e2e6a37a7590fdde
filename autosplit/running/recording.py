"""Record a running pipeline as a timeline: measured actions, to be drawn and traced beside simulated ones."""

from collections.abc import Mapping, Sequence

from autosplit.running.engine import Engine
from autosplit.running.messages import WorkerEvent
from autosplit.running.ring import DATA
from autosplit.values.machine import host_of
from autosplit.values.timeline import Action


def record(pipeline: Engine, *, clear: bool = False) -> tuple[Action, ...]:
    """The last actions of each worker of a running pipeline, by start; request 0 is the first that is still known.

    Args:
        pipeline: goes on running.
        clear: forget these actions, so that the next call returns later ones only.
    """
    return record_all({"": pipeline}, clear=clear)


def record_all(pipelines: Mapping[str, Engine], *, clear: bool = False) -> tuple[Action, ...]:
    """The last actions of the workers of several networks on one time axis; stages are called ``network/stage``."""
    workers = [
        (f"{name}/{worker.stage}" if name else worker.stage, worker.replica, host_of(worker.device))
        for name, one in pipelines.items()
        for worker in one.health()
    ]
    return actions_of(workers, [events for one in pipelines.values() for events in one.events(clear=clear)])


def actions_of(workers: Sequence[tuple[str, int, str]], events: Sequence[Sequence[WorkerEvent]]) -> tuple[Action, ...]:
    """The events of workers, each a (stage, replica, host), as actions; failed and skipped requests are left out.

    A worker may wait for free slots between its copies. The copies are drawn without these gaps, at the end.
    """
    known = [(worker, event) for worker, mine in zip(workers, events, strict=True) for event in mine if event.flag == DATA]
    if not known:
        return ()
    origin_ns = min(event.got_ns for _, event in known)
    first = min(event.number for _, event in known)
    actions = []
    for (stage, replica, host), event in known:
        request = event.number - first
        got_s, ran_s, sent_s = ((time - origin_ns) / 1e9 for time in (event.got_ns, event.ran_ns, event.sent_ns))
        handed_s = min(sent_s, ran_s + event.blocked_ns / 1e9)
        actions.append(Action(stage, replica, request, got_s, ran_s, "compute", host))
        actions.append(Action(stage, replica, request, handed_s, sent_s, "send", host))
    return tuple(sorted(actions, key=lambda action: action.start_s))

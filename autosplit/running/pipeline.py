"""Pipeline: an engine over worker processes; InProcess: an engine over one stage in the caller's own process."""

from collections.abc import Mapping, Sequence
from functools import partial

from autosplit.errors import UsageError
from autosplit.running.callertransport import CallerTransport
from autosplit.running.engine import Engine
from autosplit.running.ringtransport import RingTransport
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import Replan, wire


class Pipeline(Engine):
    """Stages in worker processes, joined by rings.

    Args:
        stages: in topological order.
        inputs: names of the inputs, in the order in which requests give them.
        outputs: names of the outputs, in the order of an answer; an input may be an output too.
        max_in_flight: requests between the first stage and their answer; by default enough to keep every stage at work,
            and up to 16 small ones while answers come fast.
        queue_capacity: requests that may wait in the admission queue before ``submit`` blocks or refuses; by default as many as
            may be in flight.
        max_restarts: restarts of one worker without progress before the pipeline gives up. Deaths that a request is to blame for
            do not count.
        groups: names of parameter groups, each with the names of its stages, for ``swap``.
        replan: finds stages for the other devices when one is lost, which means that no worker can open it any more. Requests
            without an answer then run again, and ``replanned`` says why. Without it, they all fail with the reason.
    Raises: UsageError: ``groups`` and ``replan`` are given, though a new plan has the weights from before a swap. PlanError: the
        stages do not fit together. BackendError, WorkerError: as Engine.
    """

    def __init__(
        self,
        stages: Sequence[StagePlacement],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        max_in_flight: int | None = None,
        queue_capacity: int | None = None,
        max_restarts: int = 5,
        groups: Mapping[str, Sequence[str]] | None = None,
        replan: Replan | None = None,
    ) -> None:
        if max_restarts < 0:
            raise UsageError(f"max_restarts must be at least 0, but is {max_restarts}")
        if groups and replan is not None:
            raise UsageError("a pipeline has groups or replan, not both: a new plan has the weights from before a swap")
        transport = partial(RingTransport, max_restarts=max_restarts, replan=replan, max_in_flight=max_in_flight)
        super().__init__(transport, wire(stages, inputs, outputs, max_in_flight), queue_capacity, groups)


class InProcess(Engine):
    """One stage in this process, without rings and workers; arguments as for ``Pipeline``.

    Raises: PlanError: as CallerTransport. BackendError: the stage could not be loaded.
    """

    def __init__(
        self,
        stages: Sequence[StagePlacement],
        inputs: Sequence[str],
        outputs: Sequence[str],
        *,
        queue_capacity: int | None = None,
        groups: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        super().__init__(CallerTransport, wire(stages, inputs, outputs), queue_capacity, groups)

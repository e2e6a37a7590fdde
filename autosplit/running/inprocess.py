"""InProcess: an engine over one stage in the caller's own process."""

from collections.abc import Mapping, Sequence

from autosplit.running.callertransport import CallerTransport
from autosplit.running.engine import Engine
from autosplit.running.stage import StagePlacement
from autosplit.running.wiring import wire


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

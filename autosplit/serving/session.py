"""Session: a pipeline one step at a time, with inputs queued by name, non-blocking runs and outputs fetched in order.

::

    set_input("x", 1)  run()  set_input("x", 2)  set_input("x", 3)  run()  run()  get_output() -> the answers to 1, 2, 3
"""

from collections import deque
from concurrent.futures import Future

import torch

from autosplit.arguments import checked
from autosplit.errors import RefusedError, UsageError, raise_faults
from autosplit.running.engine import Engine
from autosplit.running.request import Tensors
from autosplit.serving.limit import Limit, Policy
from autosplit.tracing.tensorspec import differences


@checked
class Session:
    """The runs of one caller; not for use by several threads at once.

    Args:
        pipeline: may have other callers, whose requests do not make a run of this session wait.
        limit: runs that may be unfinished; up to here ``run`` does not block.
        when_full: the policy of ``run`` at the limit. ``block`` waits until a run has finished, ``refuse`` raises RefusedError,
            ``drop_oldest`` cancels the oldest unfinished run, whose ``get_output`` then raises RefusedError.
    Raises: UsageError: the limit is below 1, or there is no such policy.
    """

    def __init__(self, pipeline: Engine, *, limit: int = 64, when_full: Policy = "block") -> None:
        self._pipeline = pipeline
        self._limit = Limit(limit, when_full, "run", pipeline.check_thread)
        self._queued: dict[str, deque[torch.Tensor]] = {name: deque() for name in pipeline.wiring.inputs}
        """By name, the values for the runs to come."""
        self._last: dict[str, torch.Tensor] = {}
        """By name, the value of the last run, for a run without a queued one."""
        self._futures: deque[Future[Tensors]] = deque()

    def set_input(self, name: str, value: torch.Tensor) -> None:
        """Queue a value of an input: each run takes the next one, and the last one serves all further runs.

        The tensor is read by ``run``, so changes to it until then count.

        Raises: UsageError: there is no such input, or the tensor does not fit it.
        """
        if name not in self._queued:
            raise UsageError(f"there is no input '{name}'; the inputs are: {', '.join(self._queued)}")
        specs = [spec for spec in self._pipeline.wiring.input_specs.values() if spec.name == name]
        raise_faults(UsageError, "the input does not fit the pipeline", differences(specs, [value][: len(specs)]))
        self._queued[name].append(value)

    def run(self, timeout_s: float | None = None) -> None:
        """Start a run with the next value of each input; later writes to these tensors do not reach it.

        Args:
            timeout_s: how long to block at the limit, for the policy ``block``; None waits as long as it takes.
        Raises: UsageError: an input was never set. RefusedError: the limit is reached (see ``when_full``).
        """
        missing = [name for name, values in self._queued.items() if not (values or name in self._last)]
        if missing:
            raise UsageError(f"inputs were not set: {', '.join(missing)}")
        following = [values[0] if values else self._last[name] for name, values in self._queued.items()]
        self._futures.append(
            self._limit.submit(lambda _: self._pipeline.submit_unbounded([value.clone() for value in following]), timeout_s)
        )
        self._last |= {name: values.popleft() for name, values in self._queued.items() if values}

    def has_next_output(self) -> bool:
        """Whether there is a run whose outputs were not fetched yet, so that ``get_output`` returns them, now or later."""
        return bool(self._futures)

    def is_output_ready(self) -> bool:
        """Whether ``get_output`` would return at once."""
        return bool(self._futures) and self._futures[0].done()

    def get_output(self, timeout_s: float | None = None) -> Tensors:
        """The outputs of the oldest run, as tensors of its own.

        Raises: UsageError: nothing was run. TimeoutError: they were not there within ``timeout_s``, and can be fetched later.
            RefusedError: the run was dropped. StageError, WorkerError: it failed.
        """
        if not self._futures:
            raise UsageError("there is no output to wait for: call run first")
        if self._futures[0].cancelled():
            self._futures.popleft()
            raise RefusedError(f"the run was dropped: {self._limit.most} later runs were unfinished, which is the limit")
        self._futures[0].exception(timeout_s)
        return self._futures.popleft().result()

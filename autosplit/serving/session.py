"""Session: a pipeline one step at a time, with inputs set by name, non-blocking runs and outputs fetched in order."""

from collections import deque
from concurrent.futures import Future

import torch

from autosplit.errors import UsageError
from autosplit.running.pipeline import Pipeline
from autosplit.running.request import Tensors


class Session:
    """The requests of one caller to a pipeline; not for use by several threads at once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._inputs: dict[str, torch.Tensor] = {}
        self._futures: deque[Future[Tensors]] = deque()

    @property
    def num_outputs_due(self) -> int:
        """Runs whose outputs were not fetched yet."""
        return len(self._futures)

    def set_input(self, name: str, value: torch.Tensor) -> None:
        """Set an input for the runs to come. Raises: UsageError: there is no such input."""
        names = self._pipeline.wiring.inputs
        if name not in names:
            raise UsageError(f"there is no input '{name}'; the inputs are: {', '.join(names)}")
        self._inputs[name] = value

    def run(self, timeout_s: float | None = None) -> None:
        """Start a run with the inputs as they are now; later changes to them belong to later runs.

        Raises: UsageError: an input was never set. RefusedError: no room at the door within ``timeout_s``.
        """
        names = self._pipeline.wiring.inputs
        missing = [name for name in names if name not in self._inputs]
        if missing:
            raise UsageError(f"inputs were not set: {', '.join(missing)}")
        self._futures.append(self._pipeline.submit([self._inputs[name] for name in names], timeout_s=timeout_s))

    def has_next_output(self) -> bool:
        """Whether the outputs of the oldest run are there."""
        return bool(self._futures) and self._futures[0].done()

    def get_output(self, timeout_s: float | None = None) -> Tensors:
        """The outputs of the oldest run, as tensors of its own.

        Raises: UsageError: nothing was run. TimeoutError: they were not there within ``timeout_s``, and can be fetched later.
        """
        if not self._futures:
            raise UsageError("there is no output to wait for: call run first")
        self._futures[0].exception(timeout_s)
        return self._futures.popleft().result()

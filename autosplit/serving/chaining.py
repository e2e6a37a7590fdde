"""Chain: networks one behind the other, where the answer of each is the request of the next and all work at once.

::

    first network   0 1 2 3
    second network    0 1 2 3
"""

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from autosplit.errors import AutosplitError, RefusedError, StageError, UsageError, raise_faults
from autosplit.running.engine import Engine
from autosplit.running.request import AnswerFuture, Tensors, monotonic_deadline
from autosplit.serving.limit import Limit
from autosplit.tracing.tensorspec import TensorSpec, layout


@dataclass(eq=False)
class ChainedRequest:
    """A request in the chain, and the future of the network that it is in."""

    priority: int
    deadline_ns: int
    current: "Future[Tensors] | None" = None
    future: AnswerFuture = field(init=False)

    def __post_init__(self) -> None:
        self.future = AnswerFuture(self._stop)

    def _stop(self, future: AnswerFuture) -> None:
        """End the request in the network that it is in."""
        if self.current is not None:
            self.current.cancel()


class Chain:
    """Runs requests through several networks; the outputs of one are the inputs of the next, in order.

    At most ``limit`` requests are in the chain: those that its networks hold in their stages, and those in the admission queue
    of the first one. So a slow network makes the caller wait instead of filling the memory.

    Args:
        networks: names and pipelines, the first one first; a network may occur twice.
    Raises: UsageError: there are no networks, or outputs do not fit inputs; the message has them all.
    """

    def __init__(self, networks: Sequence[tuple[str, Engine]]) -> None:
        if not networks:
            raise UsageError("a chain needs at least one network; name them in the order in which requests pass them")
        self._names = [name for name, _ in networks]
        self._pipelines = [pipeline for _, pipeline in networks]
        faults = [fault for number in range(1, len(self._names)) for fault in self._misfits(number)]
        raise_faults(UsageError, f"the networks cannot be chained: {' -> '.join(self._names)}", faults)
        self.limit = sum(pipeline.wiring.window for pipeline in self._pipelines) + self._pipelines[0].queue_capacity
        place = f" of the chain {' -> '.join(self._names)}"
        self._limit = Limit(self.limit, "block", "request", self._check_thread, place)
        self._numbers = itertools.count()

    def submit(
        self,
        inputs: Sequence[torch.Tensor],
        *,
        priority: int = 0,
        deadline_s: float | None = None,
        timeout_s: float | None = None,
    ) -> AnswerFuture:
        """Submit a request to the first network; the future has the answer of the last. Arguments as in ``Pipeline.submit``.

        Priority and deadline hold in every network. A failure in one is the answer. Cancelling ends the request in any of them.
        The future's ``number`` counts the requests of this chain; each network has a count of its own.
        """
        request = ChainedRequest(priority, monotonic_deadline(deadline_s))

        def start(left_s: float | None) -> AnswerFuture:
            first = self._pipelines[0].submit(inputs, priority=priority, deadline_s=deadline_s, timeout_s=left_s)
            request.future.number = next(self._numbers)
            self._await(request, 0, first)
            return request.future

        return self._limit.submit(start, timeout_s)

    def _check_thread(self) -> None:
        """Raises: UsageError: this is a callback of an answer of one of the networks."""
        for pipeline in self._pipelines:
            pipeline.check_thread()

    def run(self, inputs: Sequence[torch.Tensor]) -> Tensors:
        """Submit one request and wait for its answer."""
        answer: Tensors = self.submit(inputs).result()
        return answer

    def _await(self, request: ChainedRequest, number: int, step: "Future[Tensors]") -> None:
        request.current = step
        step.add_done_callback(lambda done: self._submit_next(request, number, done))
        if request.future.cancelled():
            step.cancel()

    def _submit_next(self, request: ChainedRequest, number: int, done: "Future[Tensors]") -> None:
        """Hand the answer of a network to the next one, or to the caller."""
        failure = RefusedError("the request was cancelled") if done.cancelled() else done.exception()
        if failure is None and number + 1 < len(self._pipelines):
            following = self._pipelines[number + 1]
            try:
                step = following.submit_unbounded(done.result(), priority=request.priority, deadline_ns=request.deadline_ns)
            except AutosplitError as refusal:
                failure = refusal
            else:
                self._await(request, number + 1, step)
                return
        if not request.future.set_running_or_notify_cancel():
            return
        if isinstance(failure, StageError):
            failure = StageError(f"request {request.future.number} of the chain, in network '{self._names[number]}': {failure}")
        if failure is None:
            request.future.set_result(done.result())
        else:
            request.future.set_exception(failure)

    def _misfits(self, number: int) -> list[str]:
        """Differences between the outputs of the network before this one and its inputs."""
        before, after = self._names[number - 1 : number + 1]
        source, target = (pipeline.wiring for pipeline in self._pipelines[number - 1 : number + 1])
        if len(source.outputs) != len(target.inputs):
            return [f"'{before}' has {len(source.outputs)} outputs, and '{after}' takes {len(target.inputs)} inputs"]
        made = {spec.name: spec for stage in source.stages for spec in (*stage.inputs, *stage.outputs)}
        return [
            f"output '{out}' of '{before}' is {layout(made[out])}, and input '{name}' of '{after}' is "
            f"{layout(target.input_specs[name])}"
            for out, name in zip(source.outputs, target.inputs, strict=True)
            if out in made and name in target.input_specs and _kind(made[out]) != _kind(target.input_specs[name])
        ]


def _kind(spec: TensorSpec) -> tuple[tuple[int, ...], str]:
    return spec.shape, spec.dtype

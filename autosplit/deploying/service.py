"""Service: a plan as a running model, called as the model is: arguments become flat tensors, and flat tensors an answer."""

import atexit
import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from operator import itemgetter
from types import TracebackType
from typing import Any

import torch

from autosplit.closing import Closing
from autosplit.compat.torchparts import pytree
from autosplit.reports.results import RunStats
from autosplit.running.engine import Engine
from autosplit.running.request import MatchingTensors
from autosplit.tracing.capturing import Traced
from autosplit.tracing.tensorspec import is_dense, is_laid_out

Call = Callable[[], "Future[Any]"]
"""``submit`` with its arguments."""

PlainCall = Callable[[Sequence[Any], Mapping[str, Any]], MatchingTensors | None]


class Service(Closing):
    """A plan that runs: in a process for each replica of a stage, or in this one; open until ``close``, best in a ``with`` block.

    A request takes the arguments of the model and returns its outputs. ``pipeline`` is the runtime's own object, which takes flat
    tensors; a ``Session`` is made of it. ::

        with autosplit.open_pipeline(traced, plan) as model:
            answer = model(x)                                          # one request
            future = model.submit(x, priority=1, deadline_s=0.5)       # several in flight
            answers = list(model.stream(requests))                     # any number, in order
            print(model.stats().latency.p50_s)
    """

    def __init__(self, traced: Traced, pipeline: Engine, opened: ExitStack | None = None) -> None:
        """``opened``: closes the pipeline and its resources; None if others close them."""
        self._traced, self.pipeline, self._opened = traced, pipeline, opened or ExitStack()
        self._plain, self._answer = plain_call(traced), plain_answer(traced)
        if opened is not None:
            atexit.register(self.close)  # a service that is never closed must end before the interpreter stops its threads

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One request, start to end."""
        return self.submit(*args, **kwargs).result()

    def submit(
        self, *args: Any, priority: int = 0, deadline_s: float | None = None, timeout_s: float | None = None, **kwargs: Any
    ) -> "Future[Any]":
        """Take in one request and return its future. Cancelling the future ends the request at the next stage border.

        Args:
            args: the model's positional arguments.
            priority: lower is sooner.
            deadline_s: seconds from now after which no stage begins the request any more.
            timeout_s: seconds to wait for room in the queue; None waits as long as it takes, 0 refuses at once.
            kwargs: the model's keyword arguments.
        Raises: UsageError: the arguments do not fit the trace. RefusedError: there is no room, or the service is closed.
        """
        inputs = self._tensors(args, kwargs)
        return self.pipeline.submit(inputs, priority=priority, deadline_s=deadline_s, timeout_s=timeout_s, returns=self._answer)

    def _tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[torch.Tensor]:
        """The tensors of a call for ``graph.inputs``. Raises: UsageError: the arguments do not fit the trace."""
        inputs = self._plain(args, kwargs)
        return self._traced.flatten_inputs(*args, **kwargs) if inputs is None else inputs

    def bind_call(self, tensors: Sequence[torch.Tensor]) -> Call:
        """``submit`` of the request with these tensors for ``graph.inputs``, in the form of the trace's own call."""
        args, kwargs = as_call(self._traced, tensors)
        return functools.partial(self.submit, *args, **kwargs)

    async def call_async(self, *args: Any, deadline_s: float | None = None, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """One request, awaited; arguments as for ``submit``.

        Waiting for room does not hold up the event loop, nor does a stage in this process that takes longer than 1 ms.
        """
        inputs = self._tensors(args, kwargs)
        return await self.pipeline.run_async(inputs, deadline_s=deadline_s, timeout_s=timeout_s, returns=self._answer)

    def stream(self, requests: Iterable[Any]) -> Iterator[Any]:
        """The answers to any number of requests in the same order, with few of either in memory at a time.

        Args:
            requests: each a tensor, a tuple of positional arguments or a mapping of keyword arguments.
        """
        under_way: deque[Future[Any]] = deque()
        for request in requests:
            if isinstance(request, Mapping):
                under_way.append(self.submit(**request))
            else:
                under_way.append(self.submit(*((request,) if isinstance(request, torch.Tensor) else request)))
            while len(under_way) > self.pipeline.max_in_flight:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def stats(self, *, clear: bool = False) -> RunStats:
        """Latency and each worker's times since the start, or since the last call with ``clear``."""
        return self.pipeline.stats(clear=clear)

    def close(self) -> None:
        """Answer the requests taken so far, then end every worker and remove every file."""
        atexit.unregister(self.close)
        self._opened.close()

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        atexit.unregister(self.close)
        self._opened.__exit__(kind, value, trace)

    def __repr__(self) -> str:
        return f"Service({self._traced.graph.name!r}, {len(self.pipeline.pids)} copies of stages)"


def plain_call(traced: Traced) -> PlainCall:
    """A function that gives the tensors of a call as the trace was called, or None where ``flatten_inputs`` must look at it.

    The walk takes 40 us, as long as a small model. It is left out where every argument is a tensor with the layout of the trace.
    """
    positional, by_name = traced.in_spec.children()
    leaves = [*positional.children(), *by_name.children()]
    names, count = tuple(by_name.context or ()), positional.num_children
    named = [leaf for leaf in traced.in_leaves if isinstance(leaf, str)]
    if not all(leaf.num_children == 0 and leaf.num_leaves == 1 for leaf in leaves) or len(named) != len(traced.in_leaves):
        return lambda args, kwargs: None
    wanted = [(spec, spec.torch_dtype) for spec in (traced.specs[name] for name in traced.graph.inputs)]

    def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> MatchingTensors | None:
        if len(args) != count or len(kwargs) != len(names):
            return None
        values = (*args, *[kwargs.get(name) for name in names]) if names else tuple(args)
        for value, (spec, dtype) in zip(values, wanted, strict=True):
            if not (is_dense(value) and value.shape == spec.shape and value.dtype is dtype and is_laid_out(value, spec)):
                return None
        return MatchingTensors(values)

    return tensors


def plain_answer(traced: Traced) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A function that makes the return value of the model from the tensors of ``graph.outputs``.

    The walk through containers is left out where the model returns one tensor or a flat tuple or list of tensors.
    """
    leaves, names = list(traced.out_leaves), list(traced.graph.outputs)
    if leaves == names and traced.out_spec.is_leaf():
        return itemgetter(0)
    flat = all(child.is_leaf() for child in traced.out_spec.children())
    if leaves == names and flat and traced.out_spec.type in (tuple, list):
        return list if traced.out_spec.type is list else tuple
    return traced.unflatten_outputs


def as_call(traced: Traced, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The positional and the named arguments of the trace's own call, with these tensors for ``graph.inputs``."""
    values = iter(tensors)
    leaves = [next(values) if isinstance(leaf, str) else leaf.value for leaf in traced.in_leaves]
    args, kwargs = pytree.tree_unflatten(leaves, traced.in_spec)
    return args, kwargs

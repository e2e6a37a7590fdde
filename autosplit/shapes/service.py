"""ShapedService: a running service that takes requests of any size within its ranges."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from autosplit.arguments import checked
from autosplit.deploying.service import Service
from autosplit.errors import StageError, UsageError, raise_faults
from autosplit.running.engine import Engine
from autosplit.running.request import Tensors
from autosplit.shapes.batching import Bucket, Grid, asked, rows_of
from autosplit.shapes.buckets import fit_times
from autosplit.shapes.joining import JoiningTransport, SizedRequest
from autosplit.shapes.rowcheck import require_independent_rows
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import At, Family
from autosplit.tracing.tensorspec import is_dense, kind_of
from autosplit.tracing.verifying import distinct_inputs
from autosplit.values.shapes import Traffic, write_traffic

NUM_TRIALS, TRIALS_S = 3, 0.5
"""Requests by which the seconds of each variant are measured, of which the fastest counts; fewer once they took so long.

The first one also makes the memory of a variant, and takes up to three times as long as others (119 ms in place of 49)."""

MOST_TIMED = 16
"""Variants that are timed when a service starts."""


def measured(
    family: Family, engine: Engine, check: Callable[[Traced, At, Tensors], None] = lambda traced, sizes, answer: None
) -> list[Bucket]:
    """The variants of a family with their seconds of a request that is sent alone: measured, or of many fitted to some.

    ``check`` sees the first answer to the example inputs of each variant that is timed. Variants take turns, so that a slow time
    of the machine meets all of them.
    """
    step = -(-len(family.variants) // MOST_TIMED)
    times_s = {tuple(sizes.values()): list[float]() for sizes in family.sizes[::step]}
    for _ in range(NUM_TRIALS):
        for traced, sizes, known in zip(family.variants[::step], family.sizes[::step], times_s.values(), strict=True):
            if sum(known) < TRIALS_S:
                begun_s = time.perf_counter()
                answer = engine.run(traced.example_inputs)
                known.append(time.perf_counter() - begun_s)
                if len(known) == 1:
                    check(traced, sizes, answer)
    known_s = {sizes: min(known) for sizes, known in times_s.items()}
    fitted_s = fit_times(known_s).seconds if step > 1 else known_s.__getitem__
    return [Bucket(number, sizes, fitted_s(tuple(sizes.values()))) for number, sizes in enumerate(family.sizes)]


@checked
class ShapedService(Service):
    """A family of variants that runs: a request is a call of the model at any size within the ranges.

    Masks that are left out are filled in. ``pipeline`` takes flat tensors of any size, and joins those that wait.

    Args:
        family: the variants, whose padding was checked.
        engine: runs them: ``deploy`` of the family.
        max_wait_s: seconds that a request may wait for others though stages have room; 0 joins only requests that wait anyway.
        queue_capacity: requests that may wait before ``submit`` blocks or refuses.
        opened: closes the engine and its resources; None if others close them.
    Raises: UsageError: a setting is not understood. The rows of a request depend on other rows: then requests are not joined,
        and ``why_not_joined`` says why.

    Attributes:
        grid: the variants with their measured seconds, and the dimension along which requests are joined.
        seen: sizes to the number of requests that had them.
    """

    def __init__(
        self,
        family: Family,
        engine: Engine,
        *,
        max_wait_s: float = 0.0,
        queue_capacity: int = 256,
        opened: ExitStack | None = None,
    ) -> None:
        if not 0 <= max_wait_s < float("inf") or queue_capacity < 1:
            limits = "max_wait_s must be at least 0 seconds and queue_capacity at least 1 request"
            raise UsageError(f"{limits}, but are {max_wait_s} and {queue_capacity}")
        self.family = family
        self.seen = Counter[tuple[int, ...]]()
        rows = rows_of(family)
        self.why_not_joined = "" if rows is None else _mixing_rows(family, engine)
        self.grid = grid = Grid.of(measured(family, engine), None if self.why_not_joined else rows, family.unpaddable)
        self._lock = threading.Lock()
        pipeline = Engine(
            lambda _: JoiningTransport(engine, family, grid, max_wait_s), engine.wiring, queue_capacity, intake=self._request
        )
        super().__init__(family.variants[0], pipeline, opened)
        self._opened.callback(pipeline.close)

    def _tensors(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, with its masks. Raises: UsageError: other arguments than those of the trace."""
        traced = self.family.variants[0]
        parameters = list(traced.signature.parameters) if traced.signature is not None else []
        absent = [name for name in self.family.masks if kwargs.get(name) is None and name not in parameters[: len(args)]]
        if absent:
            kwargs = {**kwargs, **dict.fromkeys(absent, torch.ones(()))}
        values, faults = traced.bound_inputs(*args, **kwargs)
        given = dict(zip(traced.graph.inputs, values, strict=True))
        for name in absent:
            like = next(
                other for other, axes in self.family.dims.items() if axes == self.family.dims[name] and other not in absent
            )
            if isinstance(given[like], torch.Tensor):
                given[name] = torch.ones(given[like].shape, dtype=traced.specs[name].torch_dtype)
        raise_faults(UsageError, f"a request does not fit '{traced.graph.name}'", faults)
        return list(given.values())

    def _request(
        self, inputs: Sequence[torch.Tensor], deadline_ns: int = 0, *, caller_keeps_inputs: bool = False, variant: int = 0
    ) -> SizedRequest:
        """The request with a tensor for each input of the graph; its sizes say the variant.

        Raises: UsageError: other dtypes or numbers of axes, a size is outside its range, or no variant takes it.
        """
        traced = self.family.variants[0]
        specs, faults = [traced.specs[name] for name in traced.graph.inputs], []
        if len(inputs) != len(specs):
            faults.append(f"{len(inputs)} inputs were given, and {len(specs)} are expected")
        for spec, value in zip(specs, inputs, strict=False):
            axes = self.family.dims.get(spec.name, {})
            if not is_dense(value):
                faults.append(f"'{spec.name}' is {kind_of(value)}, and a dense tensor is expected")
                continue
            wanted = [axes.get(axis, size) for axis, size in enumerate(spec.shape)]
            fixed = [size == found for size, found in zip(wanted, value.shape, strict=False) if isinstance(size, int)]
            if value.dtype != spec.torch_dtype or value.dim() != len(wanted) or not all(fixed):
                kind = f"{value.dtype} {list(value.shape)}".removeprefix("torch.")
                faults.append(f"'{spec.name}' is {kind}, and {spec.dtype} [{', '.join(map(str, wanted))}] is expected")
        raise_faults(UsageError, f"a request does not fit '{traced.graph.name}'", faults)
        sizes = self.family.sizes_of(inputs)
        found = asked(self.grid, sizes)
        if found is None:
            raise UsageError(self._without_variant(sizes))
        with self._lock:
            self.seen[tuple(sizes.values())] += 1
        return SizedRequest(inputs, deadline_ns, time.monotonic_ns(), caller_keeps_inputs=caller_keeps_inputs, asked=found)

    def _without_variant(self, sizes: At) -> str:
        """Why a request within the ranges has no variant that takes it."""
        exact = [dim for dim in sizes if dim in self.family.unpaddable]
        there = {dim: sorted({bucket.sizes[dim] for bucket in self.grid.buckets}) for dim in exact}
        told = "; ".join(f"'{dim}' is {sizes[dim]}, and the variants have {there[dim]}" for dim in exact)
        reason = next(iter(self.family.unpaddable.values()))
        return (
            f"no variant takes the request: {told}. It cannot be padded: {reason}. Search again with this size among the sizes."
        )


def _mixing_rows(family: Family, engine: Engine) -> str:
    """Why requests cannot be joined; '' if the rows of a request depend neither on each other nor on their places."""
    [_, example] = distinct_inputs(family.variants[0].example_inputs, 2)
    try:
        require_independent_rows(engine.run, engine.wiring.outputs, example)
    except (UsageError, StageError) as failure:
        return str(failure)
    return ""


@checked
def observe(service: Service, path: str | Path) -> Traffic:
    """Write which sizes came to a service so far, and how often: a file for ``--traffic`` and ``read_traffic``.

    Raises: UsageError: the service takes requests of one size, or none came, or the file cannot be written.
    """
    if not isinstance(service, ShapedService):
        raise UsageError("the service takes requests of one size; open a plan of a model that was traced with sizes=")
    if not service.seen:
        raise UsageError("no request came to the service yet, so there is no traffic to write")
    found = Traffic(tuple(service.family.allowed), dict(service.seen))
    try:
        write_traffic(found, Path(path))
    except OSError as failure:
        raise UsageError(f"traffic file '{path}' cannot be written: {failure.strerror}; give another path") from None
    return found

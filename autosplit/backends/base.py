"""What a backend is, how one is got by name, and the rule that a backend with wrong numbers is refused.

A backend takes a stage in two steps. ``prepare`` runs once a stage in the host and leaves files beside the stage (an
ONNX file, a compiled library), so that replicas do not repeat the work and a worker need not hold the exporter.
``load`` runs in every worker and turns the stage's folder into a function. ``compile`` does both for a stage in memory.
"""

import contextlib
import importlib
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

import torch

from autosplit.backends.lowering import lower_to_bf16
from autosplit.devices.accelerators import PROVIDERS, Accelerator, Queue
from autosplit.devices.discovering import PACKAGES, version_of
from autosplit.errors import AutosplitError, BackendError, MissingExtraError, UsageError
from autosplit.tracing.differing import NumericalError, compare
from autosplit.tracing.splitting import StageProgram
from autosplit.values.samples import BACKENDS as BACKENDS
from autosplit.values.samples import Precision as Precision
from autosplit.values.samples import backend_fault

Runnable = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""One call of a stage: inputs and outputs positional, output strides as in the stage's specs.

The outputs stay valid until they are dropped; the inputs are only read, and only during the call. One thread at a time.
"""

F32_TOLERANCE = 1e-3
"""Largest relative error against f32 eager that a backend may show in f32, unless the caller states another one."""

BF16_TIMES_EAGER = 4.0
BF16_TOLERANCE = (0.02, 0.9)
"""In bf16 a backend may be so many times as far from f32 eager as torch's own bf16 is, and never more than the larger limit.

With 8 bits of mantissa a deep network with random weights is up to 0.45 off in its outputs and works as it should, a
shallow one 0.005: what is wrong shows only beside another backend. The smaller limit is always allowed.
"""


class Backend(Protocol):
    """A runtime that can run a stage. ``exact``: its f32 results equal eager's bit for bit."""

    @property
    def name(self) -> str:
        """The name in plans and on the command line."""

    @property
    def exact(self) -> bool:
        """True if f32 outputs equal eager's bit for bit; eager's own bits depend on the number of threads."""

    @property
    def lacks(self) -> Mapping[Precision, str]:
        """Each precision that it cannot compute in, with the reason."""

    @property
    def native(self) -> bool:
        """True if what ``prepare`` writes is native code, which runs when it is loaded."""

    def missing(self) -> str | None:
        """None if it can run here, else one line: what is not there and how to get it."""

    def refuses(self, program: StageProgram) -> dict[str, str]:
        """Op name to the reason, for each op it cannot take; empty if it takes the stage."""

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32") -> None:
        """Write what ``load`` needs into the stage's folder; the host calls it once a stage, after ``save_stage``.

        Calling it again on a folder that is prepared does nothing. Raises: BackendError: the stage is refused.
        """

    def load(self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True) -> Runnable:
        """The stage in a prepared folder, ready to run on ``threads`` threads that inherit this process's affinity.

        Only where nothing else computes on those cores (not ``shared``) may the threads spin between two requests.
        Raises: BackendError: the folder is not prepared, or the runtime refuses it.
        """

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """A stage in memory, ready to run: prepare and load in one. Raises: BackendError: the stage is refused."""

    def refuses_kind(self, kind: str) -> str | None:
        """None if it runs stages on this kind of accelerator (``cuda``), else the reason and what to use instead."""

    def place(self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32") -> tuple[Runnable, bool]:
        """The saved stage on an accelerator, prepared for it if need be.

        Returns: a function of tensors there, which works in the queue that is current when it is called, namely ``queue``; and
            whether that work may be recorded and replayed (a CUDA graph).
        Raises: BackendError: the runtime refuses the stage.
        """


class Begun(Protocol):
    """A request under way."""

    def wait(self, most_s: float = math.inf) -> bool:
        """Block until it is computed, or for about so many seconds where requests are computed side by side; whether it is.

        Raises: RuntimeError: it failed.
        """

    def outputs(self) -> Sequence[torch.Tensor]:
        """Its outputs, valid until ``num_contexts`` others were begun after it."""


class Streams(Protocol):
    """A Runnable that can have several requests under way; their inputs must stay as they are until each is done."""

    @property
    def num_contexts(self) -> int:
        """Requests that may be under way at once; those above what is computed at once lie ready."""

    def begin(self, inputs: Sequence[torch.Tensor]) -> Begun:
        """Start a request; the one ``num_contexts`` before it must be done."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """A whole request."""


@runtime_checkable
class StreamingBackend(Backend, Protocol):
    """A backend that can work on several requests at once in one process, the weights in memory once."""

    def load_streams(self, folder: Path, threads: int, streams: int, precision: Precision = "f32") -> Streams:
        """The stage in a prepared folder, for ``streams`` requests at once, each on its share of ``threads``.

        Raises: BackendError: as ``load``.
        """


def get_backend(name: str) -> Backend:
    """The backend called ``name``; its runtime is imported now, not before.

    Raises:
        UsageError: there is no such backend.
        MissingExtraError: its runtime is not installed.
    """
    backend = _backend(name)
    missing = backend.missing()
    if missing:
        raise MissingExtraError(missing)
    return backend


def usual() -> list[str]:
    """The installed backends that are considered unless others are named: those that prepare a stage within seconds.

    Inductor compiles each stage for 7 to 25 s, and a search looks at a dozen stages; see ARCHITECTURE.md and ``compiling``.
    """
    return [name for name in installed() if name != "inductor"]


def installed() -> list[str]:
    """The names of the backends that can run here, in the order of BACKENDS."""
    return [name for name in BACKENDS if _backend(name).missing() is None]


def states() -> tuple[dict[str, str], ...]:
    """For each backend its name, the version of its runtime, and ``installed`` or what it needs and how to get that."""
    return tuple(
        {
            "backend": name,
            "version": version_of(PACKAGES[name][0]) or "-",
            "state": (_backend(name).missing() or "installed").removeprefix(f"backend '{name}' "),
        }
        for name in BACKENDS
    )


def require_device(backend: Backend, device: str) -> None:
    """Raise BackendError, with the reason, unless the backend runs on this device (``cpu:0``, ``cuda:0``)."""
    kind = device.partition(":")[0]
    if kind in PROVIDERS and (reason := backend.refuses_kind(kind)):
        raise BackendError(f"backend '{backend.name}' does not run on '{device}': {reason}")


def has_streams(name: str) -> bool:
    """Whether the backend called ``name`` can work on several requests at once.

    >>> [name for name in BACKENDS if has_streams(name)]
    ['openvino']
    """
    return isinstance(_backend(name), StreamingBackend)


def require_streams(backend: Backend) -> StreamingBackend:
    """The backend, or BackendError with what to use instead if it works on one request at a time."""
    if isinstance(backend, StreamingBackend):
        return backend
    others = ", ".join(name for name in BACKENDS if has_streams(name))
    raise BackendError(
        f"backend '{backend.name}' works on one request at a time; use replicas, or a backend with streams: {others}"
    )


def exact_on(backend: Backend, device: str, precision: Precision) -> bool:
    """Whether its results there are eager's on a CPU bit for bit: an accelerator sums in another order.

    >>> exact_on(get_backend("eager"), "cpu:0", "f32"), exact_on(get_backend("eager"), "cuda:0", "f32")
    (True, False)
    """
    return backend.exact and precision == "f32" and device.partition(":")[0] not in PROVIDERS


def require_precision(backend: Backend, precision: Precision) -> None:
    """Raise BackendError, with the reason, unless the backend can compute in ``precision``."""
    if precision in backend.lacks:
        raise BackendError(f"backend '{backend.name}' does not compute in {precision}: {backend.lacks[precision]}")


def compile_apart(backend: Backend, program: StageProgram, threads: int, precision: Precision) -> Runnable:
    """The stage prepared in a temporary folder and loaded from it, as ``compile`` of a backend that needs files."""
    with tempfile.TemporaryDirectory(prefix="autosplit-") as name:
        backend.prepare(program, Path(name), precision)
        return backend.load(Path(name), threads, precision)


def on_threads(call: Runnable, threads: int) -> Runnable:
    """A function that torch computes. It has one thread count for the whole process, so each call makes sure of its own."""

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        with torch.inference_mode():
            return call(inputs)

    return run


def tolerance(precision: Precision, eager: NumericalError | None = None) -> float:
    """The largest relative error against f32 eager that a backend may show.

    Args:
        precision: what it computes in.
        eager: how far torch's own bf16 is from f32 eager on the same inputs; only bf16 needs it.

    >>> tolerance("f32"), tolerance("bf16", NumericalError(1.0, 0.05, "y")), tolerance("bf16", NumericalError(1.0, 0.4, "y"))
    (0.001, 0.2, 0.9)
    """
    if precision == "f32":
        return F32_TOLERANCE
    least, most = BF16_TOLERANCE
    return min(most, max(least, BF16_TIMES_EAGER * eager.relative)) if eager else most


def reference(program: StageProgram, inputs: Sequence[torch.Tensor], threads: int = 1) -> list[torch.Tensor]:
    """The outputs of a stage in f32 eager, to ``check`` backends against."""
    with torch.inference_mode(), _torch_threads(threads):
        return [value.clone() for value in program.module(*inputs)]


def check(
    backend: Backend,
    program: StageProgram,
    inputs: Sequence[torch.Tensor],
    limit: float | None = None,
    *,
    precision: Precision = "f32",
    threads: int = 1,
    runnable: Runnable | None = None,
    exact: bool | None = None,
    expected: Sequence[torch.Tensor] | None = None,
) -> NumericalError:
    """The largest error of a backend on one stage against eager, on the inputs given.

    Args:
        backend: the backend to judge.
        program: the stage.
        inputs: the stage's inputs, in order.
        limit: largest relative error allowed, by default the precision's tolerance; always 0 for an exact backend in f32.
        precision: what the backend computes in; the reference is f32 always.
        threads: threads for the backend, and for the reference: eager itself sums in another order on another number.
        runnable: the compiled stage, if there is one already.
        exact: whether its bits must be eager's; by default those of an exact backend in f32, as on a CPU.
        expected: what ``reference`` gave on these inputs and threads, if it was called already.
    Raises: BackendError: the error is beyond the tolerance, or the backend cannot run the stage.
    """
    run = runnable or backend.compile(program, threads, precision)
    expected = expected or reference(program, inputs, threads)
    with torch.inference_mode(), _torch_threads(threads):
        try:
            found = run(inputs)
        except AutosplitError:
            raise
        except Exception as failure:
            raise BackendError(f"backend '{backend.name}' failed on stage '{program.name}': {failure}") from failure
        names = [spec.name for spec in program.outputs]
        error = compare(names, found, expected)
        if limit is None:
            beside = compare(names, lower_to_bf16(program).module(*inputs), expected) if precision == "bf16" else None
            limit = tolerance(precision, beside)
    if (backend.exact and precision == "f32") if exact is None else exact:
        limit = 0.0
    if not error.relative <= limit:
        off = f"off by {error.relative:.3g} of the largest value; the tolerance is {limit:.3g}"
        if math.isinf(error.relative):
            off = "NaN or infinite in other places than eager's" if math.isinf(error.absolute) else "not 0 where eager's all is"
        raise BackendError(
            f"backend '{backend.name}' ({precision}) gives wrong numbers on stage '{program.name}': output '{error.output}' is "
            f"{off}. Run it on another backend, such as eager."
        )
    return error


@contextlib.contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _backend(name: str) -> Backend:
    if fault := backend_fault(name):
        raise UsageError(fault)
    module = importlib.import_module(f"autosplit.backends.{name}")
    return cast(Backend, module.BACKEND)

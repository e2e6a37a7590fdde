"""What a backend is, how one is got by name, and the rule that a backend with wrong numbers is refused.

A backend takes a stage in two steps. ``prepare`` runs once a stage in the host and leaves files beside the stage (an
ONNX file, a compiled library), so that replicas do not repeat the work and a worker need not hold the exporter.
``load`` runs in every worker and turns the stage's folder into a function. ``compile`` does both for a stage in memory.
"""

import contextlib
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

import torch

from autosplit.accelerators import PROVIDERS, Accelerator, Queue
from autosplit.backends.lowering import lower_to_bf16
from autosplit.errors import AutosplitError, BackendError, MissingExtraError, UsageError
from autosplit.splitting import StageProgram

BACKENDS = ("eager", "onnxruntime", "openvino", "inductor")

Runnable = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""One call of a stage: inputs and outputs positional, output strides as in the stage's specs.

The outputs stay valid until they are dropped; the inputs are only read, and only during the call. One thread at a time.
"""

Precision = Literal["f32", "bf16"]

TOLERANCE: dict[Precision, float] = {"f32": 1e-3, "bf16": 1.0}
"""Largest relative error against f32 eager that a backend may show, unless the caller states another one.

In bf16 (8 bits of mantissa) a deep network with random weights is up to 0.45 off in its outputs and works as it should,
so this limit catches only what is wrong altogether; the error itself is what a user should look at.
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
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions it can compute in, f32 first."""

    def missing(self) -> str | None:
        """None if it can run here, else one line: what is not there and how to get it."""

    def refuses(self, program: StageProgram) -> dict[str, str]:
        """Op name to the reason, for each op it cannot take; empty if it takes the stage."""

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32") -> None:
        """Write what ``load`` needs into the stage's folder; the host calls it once a stage, after ``save_stage``.

        Calling it again on a folder that is prepared does nothing. Raises: BackendError: the stage is refused.
        """

    def load(self, folder: Path, threads: int, precision: Precision = "f32") -> Runnable:
        """The stage in a prepared folder, ready to run on ``threads`` threads that inherit this process's affinity.

        Raises: BackendError: the folder is not prepared, or the runtime refuses it.
        """

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """A stage in memory, ready to run: prepare and load in one. Raises: BackendError: the stage is refused."""


@dataclass(frozen=True, slots=True)
class NumericalError:
    def refuses_kind(self, kind: str) -> str | None:
        """None if it runs stages on this kind of accelerator (``cuda``), else the reason and what to use instead."""

    def place(self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32") -> tuple[Runnable, bool]:
        """The saved stage on an accelerator, prepared for it if need be.

        Returns: a function of tensors there, which works in the queue that is current when it is called, namely ``queue``; and
            whether that work may be recorded and replayed (a CUDA graph).
        Raises: BackendError: the runtime refuses the stage.
        """

    """The largest difference from f32 eager over all outputs of a stage.

    ``relative`` is the largest absolute difference of an output divided by the largest magnitude in it; for integers and
    booleans both are the share of elements that differ. ``output`` is the value where ``relative`` was found.
    """

    absolute: float
    relative: float
    output: str


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


def installed() -> list[str]:
    """The names of the backends that can run here, in the order of BACKENDS."""
    return [name for name in BACKENDS if _backend(name).missing() is None]


def require_precision(backend: Backend, precision: Precision) -> None:
    """Raise UsageError unless the backend can compute in ``precision``."""
    if precision not in backend.precisions:
def require_device(backend: Backend, device: str) -> None:
    """Raise BackendError, with the reason, unless the backend runs on this device (``cpu:0``, ``cuda:0``)."""
    kind = device.partition(":")[0]
    if kind in PROVIDERS and (reason := backend.refuses_kind(kind)):
        raise BackendError(f"backend '{backend.name}' does not run on '{device}': {reason}")


def exact_on(backend: Backend, device: str, precision: Precision) -> bool:
    """Whether its results there are eager's on a CPU bit for bit: an accelerator sums in another order.

    >>> exact_on(get_backend("eager"), "cpu:0", "f32"), exact_on(get_backend("eager"), "cuda:0", "f32")
    (True, False)
    """
    return backend.exact and precision == "f32" and device.partition(":")[0] not in PROVIDERS


        raise UsageError(f"backend '{backend.name}' computes in {' or '.join(backend.precisions)}, not in {precision!r}")


def check(
    backend: Backend,
    program: StageProgram,
    inputs: Sequence[torch.Tensor],
    tolerance: float | None = None,
    *,
    precision: Precision = "f32",
    threads: int = 1,
    runnable: Runnable | None = None,
) -> NumericalError:
    """The largest error of a backend on one stage against eager, on the inputs given.

    Args:
        backend: the backend to judge.
        program: the stage.
        inputs: the stage's inputs, in order.
        tolerance: largest relative error allowed; TOLERANCE[precision] by default, and always 0 for an exact backend.
        precision: what the backend computes in; the reference is f32 always.
        threads: threads for the backend, and for the reference: eager itself sums in another order on another number.
        runnable: the compiled stage, if there is one already.
    Raises: BackendError: the error is beyond the tolerance, or the backend cannot run the stage.
    """
    limit = TOLERANCE[precision] if tolerance is None else tolerance
    if backend.exact and precision == "f32":
        limit = 0.0
    run = runnable or backend.compile(program, threads, precision)
    with torch.inference_mode(), _torch_threads(threads):
        expected = [value.clone() for value in program.module(*inputs)]
        try:
            found = run(inputs)
        except AutosplitError:
            raise
        except Exception as failure:
            raise BackendError(f"backend '{backend.name}' failed on stage '{program.name}': {failure}") from failure
        error = compare([spec.name for spec in program.outputs], found, expected)
    if not error.relative <= limit:
        raise BackendError(
            f"backend '{backend.name}' ({precision}) gives wrong numbers on stage '{program.name}': output '{error.output}' is "
            f"off by {error.relative:.3g} of the largest value; the tolerance is {limit:.3g}. Run this stage on another backend."
        )
    return error


def compare(names: Sequence[str], found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> NumericalError:
    """The largest error of ``found`` against ``expected``, output by output.

    A NaN or an infinity is right where the other has the same, and an infinite error elsewhere.

    >>> compare(["y"], [torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 4.0])])
    NumericalError(absolute=2.0, relative=0.5, output='y')

    Raises: BackendError: number, shape or dtype of the outputs differ.
    """
    if len(found) != len(expected):
        raise BackendError(f"{len(found)} outputs came back, and the stage has {len(expected)}")
    worst = NumericalError(0.0, 0.0, names[0] if names else "")
    for name, value, reference in zip(names, found, expected, strict=True):
        if value.shape != reference.shape or value.dtype != reference.dtype:
            raise BackendError(
                f"output '{name}' came back as {value.dtype} {tuple(value.shape)}, not {reference.dtype} {tuple(reference.shape)}"
            )
        absolute, relative = _difference(value, reference)
        if not relative <= worst.relative:
            worst = NumericalError(max(absolute, worst.absolute), relative, name)
        elif absolute > worst.absolute:
            worst = NumericalError(absolute, worst.relative, worst.output)
    return worst


@contextlib.contextmanager
def _torch_threads(threads: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _difference(value: torch.Tensor, reference: torch.Tensor) -> tuple[float, float]:
    """Absolute and relative error of one output."""
    if value.numel() == 0:
        return 0.0, 0.0
    if not value.dtype.is_floating_point and not value.dtype.is_complex:
        share = float((value != reference).double().mean())
        return share, share
    same = (value == reference) | (value.isnan() & reference.isnan())
    if bool(same.all()):
        return 0.0, 0.0
    if not bool((value.isfinite() & reference.isfinite() | same).all()):
        return math.inf, math.inf
    absolute = float((value.double() - reference.double()).abs()[~same].max())
    scale = float(reference[reference.isfinite()].abs().max())
    return absolute, absolute / scale if scale else math.inf


def _backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise UsageError(f"backend {name!r} does not exist, the backends are {', '.join(BACKENDS)}")
    module = importlib.import_module(f"autosplit.backends.{name}")
    return cast(Backend, module.BACKEND)

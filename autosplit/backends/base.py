"""The base of backends, and how to get one by name.

A backend takes a stage in two steps. The host calls ``prepare`` once a stage, which leaves files beside the stage (an ONNX
file, a compiled library). Each worker calls ``load``, which turns the stage's folder into a function: replicas repeat no work.
"""

import importlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, Protocol, TypeVar, cast

import torch

from autosplit.backends.apart import apart
from autosplit.backends.limiting import check_of
from autosplit.backends.staticio import StaticIO
from autosplit.devices.accelerators import Accelerator, Queue, is_served
from autosplit.devices.discovering import packages_of
from autosplit.errors import BackendError, MissingExtraError, UsageError
from autosplit.scratch import scratch_folder
from autosplit.tracing.splitting import StageProgram, is_saved, load_stage, save_stage
from autosplit.tracing.valueranges import Assumed
from autosplit.values.samples import BACKENDS as BACKENDS
from autosplit.values.samples import Precision as Precision
from autosplit.values.samples import backend_fault, backends
from autosplit.versions import version_of

P = ParamSpec("P")
T = TypeVar("T")

Runnable = Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
"""One call of a stage, on one thread at a time: from inputs, which are only read, to outputs with the strides of their specs."""


class Backend(ABC):
    """A runtime that can run a stage.

    Attributes:
        name: the name in plans and on the command line.
        exact: whether f32 outputs equal eager's bit for bit; eager's own bits depend on the number of threads.
        native: whether ``prepare`` writes native code, which runs when it is loaded.
        lacks: each precision that it cannot compute in, with the reason.
        assumed: the values of requests for which it computes as torch does.
    """

    name: str
    exact = False
    native = False
    lacks: Mapping[Precision, str] = {}
    assumed: Assumed = "any"

    def missing(self) -> str | None:
        """None if it can run here, else one line: the missing package and the way to install it."""
        return None

    @abstractmethod
    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32", first: Path | None = None) -> None:
        """Write the files that ``load`` needs into the folder of a saved stage, unless they exist.

        ``first`` is the folder of another variant of the stage, which is prepared: equal weights are in one file for both if
        the runtime allows it.
        Raises: BackendError: the stage is refused.
        """

    @abstractmethod
    def load(
        self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True, trust: bool = False
    ) -> Runnable:
        """Load a prepared stage, to run on ``threads`` threads with this process's affinity.

        Threads may spin between two requests unless other work runs on their cores (``shared``). With ``trust`` in the maker of
        the folder, a graph in it may call every operator.
        Raises: BackendError: the folder is not prepared, or the runtime refuses it. PlanError: an operator is not allowed.
        """

    def compile(self, program: StageProgram, threads: int, precision: Precision = "f32") -> Runnable:
        """Prepare a stage in a temporary folder, and load it from there. Raises: BackendError: the stage is refused."""
        with scratch_folder() as folder:
            save_stage(program, folder / "stage")
            self.prepare(program, folder / "stage", precision)
            return self.load(folder / "stage", threads, precision)

    def refuses_kind(self, kind: str) -> str | None:
        """None if it runs on this kind of accelerator (``cuda``), else the reason and a backend that does."""
        return None

    def place(
        self, folder: Path, accelerator: Accelerator, queue: Queue, precision: Precision = "f32", trust: bool = False
    ) -> tuple[Runnable, bool]:
        """Put the stage saved in ``folder`` on an accelerator, to compute in ``precision``; ``trust`` as for ``load``.

        Returns: a function of tensors on the accelerator, which is called with ``queue`` as the current queue; and whether its
            work may be recorded and replayed (a CUDA graph).
        Raises: BackendError: the runtime refuses the stage, or runs on no accelerator.
        """
        raise BackendError(f"backend '{self.name}' does not run on {accelerator.device}")


class AcceleratorBackend(Backend):
    """Base of backends of other packages: a runtime of one kind of accelerator that takes a saved stage. It needs ``name``,
    ``kind`` and ``place``."""

    kind: str
    lacks: Mapping[Precision, str] = dict.fromkeys(("tf32", "bf16", "f16"), "its package does not say that it can")

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32", first: Path | None = None) -> None:
        """Write nothing: ``place`` reads the saved stage."""
        require_precision(self, precision)

    def load(
        self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True, trust: bool = False
    ) -> Runnable:
        """Raise BackendError: it does not run on cores."""
        raise BackendError(f"backend '{self.name}' runs on {self.kind} devices only; use eager on cores")

    def refuses_kind(self, kind: str) -> str | None:
        """Refuse all kinds of devices but its own."""
        return None if kind == self.kind else f"it runs on {self.kind} devices only; use eager there"


class FileBackend(Backend):
    """Base of backends that load files, which an exporter or a compiler writes in a process apart."""

    assumed: Assumed = "ids"

    def prepare(self, program: StageProgram, folder: Path, precision: Precision = "f32", first: Path | None = None) -> None:
        """Write the files of a stage in a process apart. A stage that is not saved in the folder is saved elsewhere for that."""
        require_precision(self, precision)
        if not self.is_prepared(folder, precision):
            doing = f"while {self.name} prepared stage '{program.name}'"
            saved = folder.absolute() if is_saved(folder) else None
            convert(_write, program, self.name, folder.absolute(), precision, doing=doing, saved=saved)

    def load(
        self, folder: Path, threads: int, precision: Precision = "f32", shared: bool = True, trust: bool = False
    ) -> Runnable:
        """``open`` the files of a stage, for requests that are as ``assumed``: each one is checked."""
        require_precision(self, precision)
        run, check = self.open(folder, threads, precision, shared, trust), check_of(folder, self.assumed)
        if check is None:
            return run
        if isinstance(run, StaticIO):
            return run.checked(check)

        def checked(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            check(inputs)
            return run(inputs)

        return checked

    @abstractmethod
    def open(self, folder: Path, threads: int, precision: Precision, shared: bool, trust: bool) -> Runnable:
        """Load the files of a prepared stage; arguments and errors as for ``load``."""

    @abstractmethod
    def is_prepared(self, folder: Path, precision: Precision) -> bool:
        """Whether the files that ``load`` needs are in the folder."""

    @abstractmethod
    def write(self, program: StageProgram, folder: Path, precision: Precision) -> None:
        """Write these files, in the process apart. Raises: BackendError: the stage is refused."""


def _write(program: StageProgram, name: str, folder: Path, precision: Precision) -> None:
    cast(FileBackend, named_backend(name)).write(program, folder, precision)


def convert(function: Callable[..., T], program: StageProgram, *arguments: object, doing: str, saved: Path | None = None) -> T:
    """The result of ``function(program, *arguments)`` in the process apart, which reads the stage from a folder.

    Args:
        function: an exporter or a compiler, in some module.
        arguments: further arguments; paths are absolute.
        doing: for messages, such as "while OpenVINO compiled stage 'stage0'".
        saved: where the stage is saved already.
    Raises: BackendError: the process died; any exception of the function.
    """
    if saved is None:
        with scratch_folder() as folder:
            save_stage(program, folder / "stage")
            return convert(function, program, *arguments, doing=doing, saved=folder / "stage")
    result: T = apart(_converted, function, saved, arguments, doing=doing, packages=program.packages)
    return result


def _converted(function: Callable[..., T], source: Path, arguments: Sequence[object]) -> T:
    return function(load_stage(source, trust=True), *arguments)


class Begun(Protocol):
    """A request in progress."""

    def wait(self, most_s: float = math.inf) -> bool:
        """Block until it is computed, or for about ``most_s`` seconds; return whether it is computed.

        Raises: RuntimeError: it failed.
        """

    def outputs(self) -> Sequence[torch.Tensor]:
        """Its outputs, valid until as many later requests have begun as there are contexts."""


Done = Callable[[BaseException | None], None]
"""Called once, in a thread of the runtime, with the failure of a request, or with None when it is computed."""


class Context(Begun, Protocol):
    """Place of one request at a time, which a thread of the runtime computes."""

    def start(self, inputs: Sequence[torch.Tensor], done: Done) -> None:
        """Start a request and return at once; the request before it must be done.

        ``done`` may start the next request here, and must not raise. A runtime may report a failure by ``wait`` alone.
        """


class Streams(Protocol):
    """A Runnable with several requests in progress; the inputs of each must not change until it is done."""

    @property
    def contexts(self) -> Sequence[Context]:
        """The places of requests in progress: of those that are computed, and of those that wait for a stream."""

    def begin(self, inputs: Sequence[torch.Tensor]) -> Begun:
        """Start a request; the one that had the same place must be done."""

    def __call__(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run one request to its end."""


class StreamingBackend(Backend):
    """A backend that computes several requests at once in one process with one copy of the weights."""

    @abstractmethod
    def load_streams(self, folder: Path, threads: int, streams: int, precision: Precision = "f32") -> Streams:
        """Load a prepared stage for ``streams`` requests at once, each on its share of ``threads``. Raises: as ``load``."""


def get_backend(name: str) -> Backend:
    """Import the backend called ``name``. Raises: UsageError: there is none. MissingExtraError: its runtime is not installed."""
    backend = named_backend(name)
    missing = backend.missing()
    if missing:
        raise MissingExtraError(missing)
    return backend


def usual() -> list[str]:
    """The installed backends that a search considers by default: all but inductor, which compiles each stage for 7 to 25 s."""
    return [name for name in installed() if name != "inductor"]


def installed() -> list[str]:
    """The backends that can run here, autosplit's own first."""
    return [name for name in backends() if named_backend(name).missing() is None]


def states() -> tuple[dict[str, str], ...]:
    """For each backend its name, its runtime's version, and ``installed`` or the way to install it."""
    return tuple(
        {
            "backend": name,
            "version": version_of(packages_of(name)[0]) or "-",
            "state": (named_backend(name).missing() or "installed").removeprefix(f"backend '{name}' "),
        }
        for name in backends()
    )


def absent_runtimes() -> tuple[str, ...]:
    """A sentence with the optional runtimes that are not installed and their usual speedup; none if all are there."""
    absent = {"onnxruntime": "onnx", "openvino": "openvino"}
    absent = {name: extra for name, extra in absent.items() if named_backend(name).missing()}
    if not absent:
        return ()
    return (
        f"not installed, so not considered: {' and '.join(absent)}. On twelve models the best runtime was 1.3 to 6 times as fast "
        f"as torch eager. Install with: pip install 'autosplit[{','.join(absent.values())}]'",
    )


def require_device(backend: Backend, device: str) -> None:
    """Raise BackendError, with the reason, unless the backend runs on this device (``cpu:0``, ``cuda:0``)."""
    kind = device.partition(":")[0]
    asked = is_served(kind) or isinstance(backend, AcceleratorBackend)
    if asked and (reason := backend.refuses_kind(kind)):
        raise BackendError(f"backend '{backend.name}' does not run on '{device}': {reason}")


def has_streams(name: str) -> bool:
    """Whether the backend called ``name`` computes several requests at once.

    >>> [name for name in BACKENDS if has_streams(name)]
    ['openvino']
    """
    return isinstance(named_backend(name), StreamingBackend)


def require_streams(backend: Backend) -> StreamingBackend:
    """Return the backend. Raises: BackendError: it computes one request at a time."""
    if isinstance(backend, StreamingBackend):
        return backend
    others = ", ".join(name for name in backends() if has_streams(name))
    raise BackendError(
        f"backend '{backend.name}' works on one request at a time; use replicas, or a backend with streams: {others}"
    )


def exact_on(backend: Backend, device: str, precision: Precision) -> bool:
    """Whether the backend's results on ``device`` equal eager's on a CPU bit for bit; an accelerator sums in another order.

    >>> exact_on(get_backend("eager"), "cpu:0", "f32"), exact_on(get_backend("eager"), "cuda:0", "f32")
    (True, False)
    """
    return backend.exact and precision == "f32" and not is_served(device.partition(":")[0])


def require_precision(backend: Backend, precision: Precision) -> None:
    """Raise BackendError, with the reason, unless the backend can compute in ``precision``."""
    if precision in backend.lacks:
        raise BackendError(f"backend '{backend.name}' does not compute in {precision}: {backend.lacks[precision]}")


def on_threads(call: Callable[P, T], threads: int) -> Callable[P, T]:
    """Wrap ``call`` to run with ``threads`` torch threads: torch has one count for the whole process, so each call sets it."""

    def run(*arguments: P.args, **options: P.kwargs) -> T:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        if torch.is_inference_mode_enabled():
            return call(*arguments, **options)
        with torch.inference_mode():
            return call(*arguments, **options)

    return run


def named_backend(name: str) -> Backend:
    """Import the backend called ``name``, whose packages may be missing. Raises: UsageError: there is no such backend."""
    if fault := backend_fault(name):
        raise UsageError(fault)
    path = backends()[name]
    module, _, found = path.partition(":")
    try:
        return cast(Backend, getattr(importlib.import_module(module), found))
    except (ImportError, AttributeError) as failure:
        raise UsageError(f"backend '{name}' ('{path}') cannot be imported: {failure}; mend its package") from failure

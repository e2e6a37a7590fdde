"""Modules that a worker can run: a stage folder, or a Python function by its import path. Both pickle as plain values.

Backends are imported inside functions: they take a third of the start of a worker, which a Python function does not need.
"""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from autosplit.devices.accelerators import WITHOUT_IT, Accelerator, Queue, failure_of, open_accelerator
from autosplit.errors import AutosplitError, BackendError, DeviceError, UsageError, listed, one_line
from autosplit.tables import bytes_text
from autosplit.values.samples import backends

if TYPE_CHECKING:
    from autosplit.backends.base import Backend, Precision, Runnable


class Module:
    """A source from which a worker loads a function of tensors."""

    @property
    def kind(self) -> str:
        """The backend's name, or a name in its place."""
        raise NotImplementedError

    @property
    def warms_up(self) -> bool:
        """Whether the function may be called on zeros before the first request."""
        return True

    @property
    def isolated(self) -> bool:
        """Whether it may run in worker processes only: it calls operators that a file of an untrusted maker names."""
        return False

    @property
    def num_bytes(self) -> int | None:
        """Bytes of weights that a worker will hold; None if they are unknown before it runs."""
        return None

    def import_packages(self) -> None:
        """Import the packages of ``load`` first, so that their memory is not counted as the stage's."""

    def load(self, threads: int, device: str, shared: bool, streams: int) -> "Runnable":
        """The function of tensors in host memory, loaded where it runs.

        Args:
            threads: threads of one copy.
            device: the name of its device.
            shared: whether others compute on its cores.
            streams: requests that it works on at once.
        """
        raise NotImplementedError

    def failing_op(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """The op that raises on these inputs, with its line of code if that is known; None if the op is not known."""
        return None


def is_compiled(kind: str) -> bool:
    """Whether modules of this kind run on a backend that compiles them, and so run no Python of the model."""
    from autosplit.backends.base import FileBackend, named_backend

    return kind in backends() and isinstance(named_backend(kind), FileBackend)


@dataclass(frozen=True, slots=True)
class StageFolder(Module):
    """A stage that was saved with ``splitting.save_stage`` and prepared for its backend."""

    folder: Path
    backend: str = "eager"
    precision: "Precision" = "f32"
    packages: tuple[str, ...] = ()
    """Modules that define custom operators of the stage (``StageProgram.packages``)."""
    warms_up: bool = True
    trust: bool = False
    """Whether the user trusts the maker of the folder. If not, native code in it is refused, and so are operators that are not
    known to be safe."""
    resident_bytes: int | None = None
    """Bytes of weights on an accelerator, if the others are streamed to it; None if all stay."""

    @property
    def kind(self) -> str:
        """The backend's name."""
        return self.backend

    @property
    def isolated(self) -> bool:
        """Whether an untrusted graph runs in torch."""
        return self.backend == "eager" and not self.trust

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights, as plans count them; a backend that packs them differently may need more."""
        from autosplit.tracing.splitting import saved_weight_bytes

        num_bytes = saved_weight_bytes(self.folder)
        return num_bytes if self.resident_bytes is None else min(num_bytes, self.resident_bytes)

    def import_packages(self) -> None:
        """Import the backend and the user's operators, and let torch initialise its libraries."""
        from autosplit.backends.base import get_backend

        get_backend(self.backend)
        for package in self.packages:
            importlib.import_module(package)
        with torch.inference_mode():
            torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> "Runnable":
        """Load the stage with its backend. Raises: BackendError: the backend does not run on this kind of device."""
        from autosplit.backends.base import get_backend, require_device, require_streams

        backend, accelerator = get_backend(self.backend), open_accelerator(device)
        self.require_trust()
        if accelerator is None and streams > 1:
            return require_streams(backend).load_streams(self.folder, threads, streams, self.precision)
        if accelerator is None:
            return backend.load(self.folder, threads, self.precision, shared, self.trust)
        require_device(backend, device)
        return self._place(backend, accelerator, device)

    def require_trust(self) -> None:
        """Raises: BackendError: the backend would load native code from the folder, which is not allowed."""
        from autosplit.backends.base import get_backend

        if get_backend(self.backend).native and not self.trust:
            raise BackendError(
                f"stage folder '{self.folder}' runs on backend '{self.backend}', which loads native code from the folder; "
                "give trust=True if you trust its maker, or use another backend"
            )

    def _place(self, backend: "Backend", accelerator: Accelerator, device: str) -> "Runnable":
        from autosplit.backends.lowering import in_precision
        from autosplit.backends.placing import place_runnable
        from autosplit.backends.streaming import streamed_runnable
        from autosplit.tracing.splitting import load_stage

        program = load_stage(self.folder, trust=self.trust)
        if program.states:  # copies of a device would be lost with its worker, and each size would have its own
            told = f"keeps states such as '{program.states[0]}' in memory of the host; put its ops on cores"
            raise BackendError(f"stage '{program.name}' {told}")

        def place(device: Accelerator, queue: Queue) -> "tuple[Runnable, bool]":
            if self.resident_bytes is not None:  # a recorded graph would hold one order of two queues
                return streamed_runnable(in_precision(program, self.precision), self.resident_bytes, device, queue), False
            return backend.place(self.folder, device, queue, self.precision, self.trust)

        accelerator.allow_tf32(self.precision == "tf32")
        way_out = f"'{device}'; place fewer ops there, or end what else uses it"
        try:
            facts = accelerator.facts()
            if self.num_bytes > facts.free_bytes:
                raise BackendError(
                    f"the stage's weights take {bytes_text(self.num_bytes)}, and {bytes_text(facts.free_bytes)} of "
                    f"{bytes_text(facts.total_bytes)} are free on {way_out}"
                )
            return place_runnable(accelerator, place, program.inputs, program.outputs)
        except torch.OutOfMemoryError as failure:
            raise BackendError(f"the stage's weights fit, and its values do not ({one_line(failure)}), on {way_out}") from None
        except AutosplitError:
            raise
        except Exception as failure:
            if reason := failure_of(accelerator):
                raise DeviceError(f"device '{device}' cannot be used: {reason}{WITHOUT_IT}") from failure
            raise

    def failing_op(self, inputs: Sequence[torch.Tensor]) -> str | None:
        """Run the stage op by op, in eager, up to the one that raises."""
        from autosplit.tracing.splitting import load_stage

        return failing_node(load_stage(self.folder, trust=self.trust).module, inputs)


@dataclass(frozen=True)
class PythonFunction(Module):
    """A function of tensors that returns one tensor or several.

    ``path`` is ``package.module:function``. The module, or a package that contains it, must be among ``allowed``.
    """

    path: str
    allowed: tuple[str, ...]
    kind = "python"
    warms_up = False

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> "Runnable":
        """Import the function. Raises: UsageError: it is not allowed, or does not exist."""
        return positional(import_function(self.path, self.allowed))


@dataclass(frozen=True)
class LocalFunction(Module):
    """A function of this process, for null devices, whose workers are threads."""

    function: Callable[..., Any]
    num_bytes: int = 0
    kind = "local"
    warms_up = False

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> "Runnable":
        """The function itself."""
        return positional(self.function)


def positional(function: Callable[..., Any]) -> "Runnable":
    """Turn a function of several tensors into one of a sequence that returns a sequence, empty for None."""

    def run(inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        result = function(*inputs)
        return tuple(result) if isinstance(result, tuple | list) else () if result is None else (result,)

    return run


def import_function(path: str, allowed: Sequence[str]) -> Callable[..., Any]:
    """Import the function ``package.module:function`` from an allowed module.

    >>> import_function("math:hypot", ["math"])(3, 4)
    5.0
    >>> import_function("os:remove", ["math"])
    Traceback (most recent call last):
        ...
    autosplit.errors.UsageError: function 'os:remove' is not in an allowed module (math); allow its module if you trust it
    """
    module, name = check_allowed(path, allowed)
    try:
        function = getattr(importlib.import_module(module), name)
    except ImportError as failure:
        raise UsageError(f"function '{path}' cannot be imported: {failure}") from None
    except AttributeError:
        raise UsageError(f"module '{module}' has no function '{name}'") from None
    if not callable(function):
        raise UsageError(f"'{path}' is {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]


def check_allowed(path: str, allowed: Sequence[str]) -> tuple[str, str]:
    """Module and name of ``package.module:function``. Raises: UsageError: another form, or the module is not allowed."""
    if not isinstance(path, str):
        raise UsageError(f"workers import a function by its name, 'package.module:function', but here it is {path!r}")
    module, _, name = path.partition(":")
    if not (module and name):
        raise UsageError(f"function '{path}' is not understood; write package.module:function")
    if not any(module == one or module.startswith(f"{one}.") for one in listed("allowed", allowed, str)):
        known = ", ".join(allowed) or "none is allowed"
        raise UsageError(f"function '{path}' is not in an allowed module ({known}); allow its module if you trust it")
    return module, name


def failing_node(module: torch.fx.GraphModule, inputs: Sequence[torch.Tensor]) -> str | None:
    """Run a graph op by op up to the one that raises, and return its name and the line of the model's code."""
    from autosplit.tracing.programs import user_line

    walk = _Walk(module)
    try:
        walk.run(*inputs)
    except Exception:
        line = user_line(walk.op)
        return f"'{walk.op.name}' ({line})" if line else f"'{walk.op.name}'"
    return None


class _Walk(torch.fx.Interpreter):
    """An interpreter that remembers the present op."""

    op: torch.fx.Node

    def run_node(self, n: torch.fx.Node) -> Any:
        """Note a node, then run it."""
        self.op = n
        return super().run_node(n)

"""Runtimes and compilers below their public classes.

Where a runtime has no such part any more, bundles for OpenVINO hold more bytes, ``torch.onnx`` makes its table at each call, and
``torch.export`` makes its kernels. ONNX Runtime and TorchInductor have no other way: an error names the version that has one.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autosplit.compat.tried import needs


class Binding:
    """Memory of torch as inputs and outputs of a session: its public binding by name and device takes 18 us a request."""

    def __init__(self, session: Any, device: torch.device) -> None:
        with needs("onnxruntime"):
            from onnxruntime.capi._pybind_state import OrtDevice

            self._where = OrtDevice(getattr(OrtDevice, device.type)(), OrtDevice.default_memory(), device.index or 0)
            binding = session.io_binding()._iobinding
            self._bind_input, self._bind_output = binding.bind_input, binding.bind_output
            self.run: Callable[[], None] = functools.partial(session._sess.run_with_iobinding, binding, None)

    def input(self, name: str, kind: int, shape: Sequence[int], address: int) -> None:
        """Read an input of an ONNX element type from an address."""
        self._bind_input(name, self._where, kind, shape, address)

    def output(self, name: str, kind: int, shape: Sequence[int], address: int) -> None:
        """Write an output to an address."""
        self._bind_output(name, self._where, kind, shape, address)


def fold_constants(model: Any) -> None:
    """Fold batch norms of an OpenVINO model in place; else its compiler folds them, and a blob holds their weights again."""
    with contextlib.suppress(ImportError):
        from openvino._offline_transformations import apply_moc_transformations

        apply_moc_transformations(model, False)


def aot_compile(module: Any, examples: tuple[torch.Tensor, ...], options: Mapping[str, Any]) -> Any:
    """Compile an exported module by AOTInductor: the path of a library, or with ``aot_inductor.package`` the files of one.

    The public ``aoti_compile_and_package`` writes an archive of them, see ``open_library``.
    """
    with needs("torch"):
        from torch import _inductor
    tables = {"aot_inductor.enable_line_tables": False} if hasattr(_inductor.config.aot_inductor, "enable_line_tables") else {}
    return _inductor.aot_compile(module, examples, options={**options, **tables})  # they are for debuggers, and take a tenth


def open_library(path: Path) -> Any:
    """The runner of a compiled library. ``aoti_load_package`` would unpack an archive that a killed worker leaves behind."""
    with needs("torch"):
        runner = torch._C._aoti.AOTIModelContainerRunnerCpu
    return runner(str(path), 1)


def write_package(path: Path, files: Mapping[str, Any]) -> None:
    """Write one package with the compiled files of several models, which the public way writes for one model only."""
    with needs("torch"):
        from torch.export.pt2_archive._package import package_pt2
    package_pt2(str(path), aoti_files=dict(files))


_PATCHING = threading.RLock()


@contextlib.contextmanager
def kept_translations() -> Iterator[None]:
    """Let ``torch.onnx.export`` reuse its table of translations, which it makes at every call in half a second.

    Other callers keep their own tables, because they may add translations.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        make: Any = vars(ONNXRegistry)["from_torchlib"]
    except (ImportError, KeyError):
        yield
        return
    with _PATCHING:
        setattr(ONNXRegistry, "from_torchlib", functools.partial(_made, make.__get__(None, ONNXRegistry)))  # noqa: B010
        try:
            yield
        finally:
            setattr(ONNXRegistry, "from_torchlib", make)  # noqa: B010


@functools.cache
def _made(make: Callable[..., Any], **options: Any) -> Any:
    return make(**options)


class _Kernels(NamedTuple):
    """What torch gives a composite operator for a while: from a function and its own kernels to others and a rule for fakes."""

    function: Any
    own: dict[Any, Any]
    given: dict[Any, Any]
    rule: Any


_given: dict[Any, _Kernels] = {}


@contextlib.contextmanager
def kept_kernels() -> Iterator[None]:
    """Let ``run_decompositions`` give operators the kernels of an earlier call, so that a small model is traced in half the time.

    At each call it makes 22 kernels for each of 260 composite operators, so that these are not decomposed, and looks all
    composite operators up once for each namespace. Operators get the same kernels here, for as long.
    """
    try:
        from torch._export import utils
        from torch._subclasses.fake_impls import op_implementations_dict as rules
        from torch.export import exported_program

        names = "_override_composite_implicit_decomp", "_materialize_cpp_cia_ops"
        override, look_up = vars(exported_program)[names[0]], vars(utils)[names[1]]
    except (ImportError, KeyError):
        yield
        return
    with _PATCHING:
        setattr(exported_program, names[0], functools.partial(_override, override, rules))
        setattr(utils, names[1], functools.cache(look_up))
        try:
            yield
        finally:
            setattr(exported_program, names[0], override)
            setattr(utils, names[1], look_up)


@contextlib.contextmanager
def _override(usual: Any, rules: dict[Any, Any], functions: Mapping[Any, Any]) -> Iterator[None]:
    """``usual``, which makes kernels and gives them to operators for a while, for the operators that it never had so."""
    before = {op: dict(op.py_kernels) for op in functions}
    known = {op: found for op in functions if (found := _given.get(op)) and found[:2] == (functions[op], before[op])}
    with usual({op: function for op, function in functions.items() if op not in known}):
        for op in functions.keys() - known.keys():
            _given[op] = _Kernels(functions[op], before[op], dict(op.py_kernels), rules.get(op))
        try:
            for op, found in known.items():
                _give(op, found.given)
                rules.setdefault(op, found.rule)
            yield
        finally:
            for op in known:
                _give(op, before[op])
                rules.pop(op, None)


def _give(op: Any, kernels: Mapping[Any, Any]) -> None:
    op.py_kernels.clear()
    op.py_kernels.update(kernels)
    op._dispatch_cache.clear()

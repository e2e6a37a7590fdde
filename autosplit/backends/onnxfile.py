"""Write a stage as an ONNX file, once in the host, for the backends onnxruntime and openvino.

In the folder of a saved stage the file refers to the stage's weights, which the runtimes map; elsewhere the weights are in a
second file. ``onnx.json`` names the file and holds the specs of inputs and outputs. It is written last: the named file is whole.
"""

import contextlib
import json
import secrets
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from autosplit.backends import exportcache
from autosplit.backends.decomposing import FlatProgram
from autosplit.backends.limiting import Check
from autosplit.backends.ports import DenseStage, Port, port
from autosplit.backends.probing import innermost, raise_shortage, refused_ops
from autosplit.backends.quiet import quiet
from autosplit.backends.translating import translations
from autosplit.compat.runtimes import kept_translations
from autosplit.errors import BackendError
from autosplit.files import drafted
from autosplit.parsing import MALFORMED, MAX_YAML_BYTES, parse_json, read_text
from autosplit.tracing.flattening import SORT, sorts_integers
from autosplit.tracing.freesizes import any_strides
from autosplit.tracing.splitting import WEIGHTS, StageProgram, load_stage
from autosplit.tracing.tensorspec import TensorSpec, spec_from_dict
from autosplit.tracing.weightsfile import weight_starts

PORTS = "onnx.json"

ONNX = ("onnx", "onnxscript")
"""The packages that write an ONNX file."""

SMALL_BYTES = 1024
"""Smaller tensors stay in the graph, where runtimes look shapes up."""

MOST_INSIDE_BYTES = 256 << 20
"""Largest size of constants in the graph that are not weights of the stage; an ONNX file may have 2 GiB."""

ELEMENT_TYPES = {
    torch.float32: 1,
    torch.uint8: 2,
    torch.int8: 3,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.bool: 9,
    torch.float16: 10,
    torch.float64: 11,
    torch.bfloat16: 16,
}
"""TensorProto.DataType by torch dtype; numpy has no bfloat16."""


@dataclass(frozen=True, slots=True)
class OnnxStage:
    """A prepared stage: its file, the ports of its inputs and outputs, and a check of its inputs, if it needs one.

    ``free``: it takes every size, and the ports are those of the largest.
    """

    path: Path
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    check: Check | None = None
    free: bool = False

    def arrays(self, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Inputs by name, as dense arrays of numpy."""
        return {port.name: port.dense(value).numpy() for port, value in zip(self.inputs, inputs, strict=True)}

    def restored(self, arrays: Iterable[Any]) -> list[torch.Tensor]:
        """Outputs of any size in the order of their logical shapes, from dense arrays of numpy with their bits."""
        pairs = [(one, torch.from_numpy(array).view(one.dtype)) for one, array in zip(self.outputs, arrays, strict=True)]
        return [value if one.natural else value.permute(one.inverse) for one, value in pairs]


def missing_packages(what: str, modules: Sequence[str], package: str) -> str | None:
    """None if the modules are installed, else a line with the missing ones and the package to install with pip."""
    import importlib.util

    absent = [name for name in modules if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    return f"{what} needs {' and '.join(absent)}: pip install {shlex.quote(package)}"


def write_onnx(program: StageProgram, path: Path, dense: bool = True, starts: Mapping[str, int] | None = None) -> None:
    """Export a stage to ``path``.

    Args:
        dense: True for inputs and outputs in the dense shapes of their ports, False for their logical shapes.
        starts: offset in bytes of each weight in the weights file beside ``path``; if None, weights go to ``path`` + '.data'.
    Raises: BackendError: the exporter refuses ops, which the message names with the reasons.
    """
    try:
        exported = _export(program, dense)
    except Exception as failure:
        raise_shortage(failure)
        refused = refused_ops(program, _convert)
        listed = [f"op '{name}': {reason}" for name, reason in refused.items()] or [innermost(failure)]
        raise BackendError(f"stage '{program.name}' cannot become an ONNX file: {'; '.join(listed)}", refused) from failure
    if starts is not None and _refer(exported.model, program, starts):
        from onnxscript import ir

        ir.save(exported.model, path)
    else:
        exported.save(path, external_data=True)


def _refer(model: Any, program: StageProgram, starts: Mapping[str, int]) -> bool:
    """Let the model refer to the weights in the stage's file, unless too many bytes would stay; return whether it does.

    No large weight stays, so that the values of such weights do not count (see ``exportcache``).
    """
    there = {
        (weight.data_ptr(), weight.dtype, weight.shape): starts[name]
        for name, weight in program.weights.items()
        if name in starts and _stays_apart(weight)
    }
    found, left_bytes = [], 0
    for value in model.graph.initializers.values():
        source = getattr(value.const_value, "raw", None)
        # A transposed weight has the same address as the weight itself.
        dense = source if isinstance(source, torch.Tensor) and source.is_contiguous() else None
        if dense is not None and (key := (dense.data_ptr(), dense.dtype, dense.shape)) in there:
            found.append((value, there[key]))
        elif dense is not None and _stays_apart(dense):
            return False
        else:
            left_bytes += value.const_value.nbytes
    if left_bytes > MOST_INSIDE_BYTES:
        return False
    for value, start in found:
        _let_refer(value, start)
    return True


def _let_refer(value: Any, start: int) -> None:
    """Let a constant refer to a weight at an offset in the file of a stage."""
    from onnxscript import ir

    old = value.const_value
    value.const_value = ir.ExternalTensor(WEIGHTS, start, old.nbytes, old.dtype, shape=old.shape, name=value.name)


def _stays_apart(weight: torch.Tensor) -> bool:
    """Whether files refer to a weight, and do not hold it."""
    return weight.is_contiguous() and weight.nbytes >= SMALL_BYTES


def _export(program: StageProgram, dense: bool) -> "torch.onnx.ONNXProgram":
    inputs, outputs = _ports(program.inputs), _ports(program.outputs)
    module = DenseStage(program.module, inputs, outputs) if dense else any_strides(program.module)
    shapes = [source.dense_shape if dense else source.spec.shape for source in inputs]
    examples = [torch.zeros(shape, dtype=source.dtype) for shape, source in zip(shapes, inputs, strict=True)]
    free = _free_axes(program, inputs, dense) if program.free else None
    exported = _convert(module, examples, free)
    _name_ports(exported.model, [one.name for one in (*inputs, *outputs)])
    if free is not None:
        _name_axes(exported.model.graph, free)
    return exported


def _free_axes(program: StageProgram, inputs: Sequence[Port], dense: bool) -> list[dict[int, str]]:
    """The axes of each input that may have any size, with their dimensions."""
    named = [(one.order, program.free[one.name]) for one in inputs]
    return [{order.index(axis) if dense else axis: dim for axis, dim in axes.items()} for order, axes in named]


def _convert(
    module: torch.nn.Module, examples: Sequence[torch.Tensor], free: Sequence[Mapping[int, str]] | None = None
) -> "torch.onnx.ONNXProgram":
    from onnxscript import optimizer

    with quiet(), torch.no_grad():
        flat = FlatProgram.export(module, examples, free)
        if any(map(sorts_integers, flat.graph.nodes)):
            raise BackendError("torch may put equal integers in any order, and ONNX keeps theirs")
        for node in flat.graph.find_nodes(op="call_function", target=torch.ops.aten.sort.stable):
            options = [node.kwargs.get("dim", -1), node.kwargs.get("descending", False)]
            node.target, node.args, node.kwargs = SORT, (node.args[0], *options), {}  # ONNX's TopK is stable
        with kept_translations():
            program = torch.onnx.export(
                flat, dynamo=True, verbose=False, optimize=False, custom_translation_table=translations(flat.graph)
            )
        if program is None:
            raise BackendError("the ONNX exporter gave nothing back")
        # The exporter's optimiser takes most of its time for patterns that the runtimes know too, if shapes are constants.
        optimizer.inline(program.model)
        _fold_constants(program.model)
    return program


def _fold_constants(model: Any) -> None:
    from onnxscript import optimizer

    optimizer.fold_constants(model, should_fold=lambda node: False if any(map(_is_weight, node.inputs)) else None)
    optimizer.remove_unused_nodes(model)


def _name_axes(graph: Any, dims: Sequence[Mapping[int, str]]) -> None:
    """Call the free axes of inputs and outputs by their dimensions; ``dims`` has those of each input."""
    from onnxscript import ir

    names: dict[str, str] = {}
    for value, own in zip(graph.inputs, dims, strict=True):
        names |= {str(value.shape[axis]): dim for axis, dim in own.items()}
    for value in (*graph.inputs, *graph.outputs):
        value.shape = ir.Shape([size if isinstance(size, int) else names.get(str(size), str(size)) for size in value.shape])


def _is_weight(value: Any) -> bool:
    """Whether a value is a large weight. Runtimes fold what is computed of it, too: so the file is that of any such weight."""
    source = None if value is None else value.const_value
    return source is not None and isinstance(getattr(source, "raw", None), torch.Tensor) and source.nbytes >= SMALL_BYTES


def _name_ports(model: Any, names: Sequence[str]) -> None:
    """Give inputs and outputs the stage's names; inner values that have one of them get others.

    The exporter's own renaming leaves two values of one name if an output was permuted.
    """
    from onnxscript import ir

    for value, name in zip((*model.graph.inputs, *model.graph.outputs), names, strict=True):
        value.name = name
    ir.passes.common.NameFixPass()(model)


def prepare_onnx(program: StageProgram, folder: Path) -> OnnxStage:
    """Export the stage to ``folder`` unless that is done; a stage that is saved there must be this one.

    The export of a like stage is taken, also of an earlier process, unless the stage has operators of the user, which may have
    changed.
    """
    if not (folder / PORTS).is_file():
        is_there = (folder / WEIGHTS).exists()
        write = partial(_write_placed, program, weight_starts(folder / WEIGHTS)) if is_there else partial(write_onnx, program)
        _write_files(program, folder, write)
    return open_onnx(folder)


def _write_placed(program: StageProgram, starts: Mapping[str, int], path: Path) -> None:
    """Write the model of a saved stage, made or taken with numbers in place of the offsets of weights."""
    from onnxscript import ir

    names = list(program.weights)
    held = [name for name, weight in program.weights.items() if not _stays_apart(weight)]
    kept = None if program.packages else exportcache.place(program, held)
    if kept is None or not exportcache.take(kept, path):
        write_onnx(program, path, starts={name: number for number, name in enumerate(names)})
        if kept is not None and [*path.parent.glob(f"{path.stem}.*")] == [path]:
            exportcache.keep(kept, path)
    model = ir.load(path)
    for value in model.graph.initializers.values():
        old = value.const_value
        if isinstance(old, ir.ExternalTensor) and old.location == WEIGHTS:
            _let_refer(value, starts[names[old.offset or 0]])
    _name_ports(model, [spec.name for spec in (*program.inputs, *program.outputs)])
    ir.save(model, path)


def fix_sizes(program: StageProgram, free: Path, folder: Path) -> None:
    """Make the ONNX file of a saved stage out of that of the same stage at every size, which takes a tenth of an export.

    Nothing is written if a file is there, or where an export is needed, because values or weights lie otherwise in memory.

    Args:
        program: the stage at one size.
        free: the folder in which it is saved at every size; its ONNX file is exported unless that is done.
        folder: the folder in which it is saved at this size.
    """
    if not (folder / PORTS).is_file():
        stage = prepare_onnx(load_stage(free, trust=True), free)
        values = _ports(program.inputs), _ports(program.outputs)
        orders = [[one.order for ports in pair for one in ports] for pair in ((stage.inputs, stage.outputs), values)]
        starts = [weight_starts(place / WEIGHTS) for place in (free, folder)]
        if orders[0] == orders[1] and starts[0] == starts[1]:
            _write_files(program, folder, partial(_write_fixed, program, stage.path, starts[0], values))


def _write_fixed(
    program: StageProgram, source: Path, starts: Mapping[str, int], values: Sequence[tuple[Port, ...]], path: Path
) -> None:
    """Write the model of a file with free axes for inputs and outputs of these sizes.

    Raises: BackendError: it has constants in other files than that of the weights.
    """
    from onnxscript import ir

    model, names = ir.load(source), {start: name for name, start in starts.items()}
    for value in model.graph.initializers.values():
        if isinstance(found := value.const_value, ir.ExternalTensor):
            if found.location != WEIGHTS:
                raise BackendError(f"'{source}' has constants that are not weights of the stage")
            # The optimiser reads no file with several hard links.
            value.const_value = ir.tensor(program.weights[names[found.offset or 0]].detach(), name=value.name)
    for node in model.graph.all_nodes():
        for value in node.outputs:
            value.shape = None  # of the largest size, or of a dimension's name
    for value, one in zip((*model.graph.inputs, *model.graph.outputs), (*values[0], *values[1]), strict=True):
        value.shape = ir.Shape(one.dense_shape)
    _fold_constants(model)
    if not _refer(model, program, starts):
        raise BackendError(f"constants of '{source}' do not fit into one file")
    ir.save(model, path)


def _write_files(program: StageProgram, folder: Path, write: Callable[[Path], None]) -> list[Path]:
    """``write`` the file of a stage to ``folder``; the last of the files that are returned names the first one."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{secrets.token_hex(4)}.onnx"  # another process may prepare the same stage
    draft = path.with_suffix(".json")
    try:
        write(path)
        specs = {"inputs": [asdict(s) for s in program.inputs], "outputs": [asdict(s) for s in program.outputs]}
        draft.write_text(json.dumps({"file": path.name, "free": bool(program.free), **specs}), encoding="utf-8")
        draft.replace(folder / PORTS)
    except BaseException:
        for part in folder.glob(f"{path.stem}.*"):
            part.unlink()
        raise
    return [*folder.glob(f"{path.stem}.*"), folder / PORTS]


def open_onnx(folder: Path) -> OnnxStage:
    """Read the files of ``prepare_onnx`` in ``folder``. Raises: BackendError: the folder is not prepared, or damaged."""
    path = folder / PORTS
    try:
        data = parse_json(read_text(path, MAX_YAML_BYTES))
        specs = [[spec_from_dict(spec) for spec in data[side]] for side in ("inputs", "outputs")]
        file = folder / Path(data["file"]).name
    except (OSError, *MALFORMED) as failure:
        raise BackendError(f"stage folder '{folder}' is not prepared for ONNX ({failure}): prepare the stage again") from None
    return OnnxStage(file, _ports(specs[0]), _ports(specs[1]), free=bool(data.get("free")))


def require_shared(stage: OnnxStage, runtime: str) -> None:
    """Raises: BackendError: a value has a dtype that ONNX lacks."""
    for one in (*stage.inputs, *stage.outputs):
        if one.dtype not in ELEMENT_TYPES:
            raise BackendError(f"{runtime} cannot share '{one.name}' with torch: ONNX has no {one.dtype}")


@contextlib.contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A folder to build in, which is renamed to ``path`` at the end, unless another process made ``path`` first."""
    with drafted(path) as building:
        yield building
        with contextlib.suppress(OSError):
            building.rename(path)


def _ports(specs: Sequence[TensorSpec]) -> tuple[Port, ...]:
    return tuple(port(spec) for spec in specs)

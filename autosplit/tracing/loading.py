"""Make a module with example inputs from a model spec.

A spec is ``transformers:ClassName?field=value&...`` (random weights), ``transformers:/path/to/checkpoint`` or
``hub:org/name`` (trained weights), ``file.py:function?argument=value`` or
``package.module:function`` (a function that returns (module, inputs)), or a ``.pt2`` file. From Python it may also be a module,
an ``fx.GraphModule`` or an ``ExportedProgram``.
"""

import contextlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autosplit.compat.torchparts import FakeTensorMode, pytree
from autosplit.errors import BRIEF, ModelCodeError, ModelError, one_line, raise_faults
from autosplit.tracing import architectures, checkpoints
from autosplit.tracing.architectures import Given
from autosplit.tracing.importing import import_function
from autosplit.tracing.modelspec import parse_options, typed_options
from autosplit.tracing.tensorspec import is_dense, kind_of
from autosplit.values.plan import PYTHON_OBJECT, Source

WITHOUT_WEIGHTS = "no weights were loaded, and nothing was computed: this trace can be planned, and not run"


Inputs = torch.Tensor | Sequence[Any] | Mapping[str, Any] | Given
"""Example inputs: positional (a tensor or a sequence), by name (a mapping), or both."""


@dataclass(frozen=True, eq=False)
class Model:
    """A model with the example inputs that fix its shapes.

    A plan keeps ``source`` to make the model again. ``way_out`` tells the user what to do if the model fails on example inputs
    that were made up for it. ``notes`` say which weights it has, where a spec chose them.
    """

    name: str
    module: nn.Module | ExportedProgram
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    source: Source = PYTHON_OBJECT
    way_out: str = ""
    notes: tuple[str, ...] = ()


def load_model(
    source: str | Path | nn.Module | ExportedProgram,
    batch: int = 1,
    seq_len: int | None = None,
    *,
    inputs: Inputs | None = None,
    trust: bool = False,
    weights: bool = True,
) -> Model:
    """Load the model that ``source`` names, or take the model that it is.

    Args:
        source: a spec, or the model itself.
        batch: leading size of the example inputs that are made here.
        seq_len: tokens of text inputs; None for the model's default.
        inputs: example inputs in place of the model's own; a module needs them.
        weights: False to make fake weights and inputs, which have shapes and take no memory: such a model can be planned, and not
            run. An exported program, and a model whose code fails on these, have their own.
        trust: True to read a ``.pt2`` file: torch unpickles parts of it, which can run code of its maker.
    Raises:
        ModelError: the spec names nothing, has unknown options, is a file that is not trusted, or the inputs do not fit.
        MissingExtraError: an optional package is missing.

    >>> load_model("autosplit.examples.mlp:mlp?depth=2&width=8", batch=3).args[0].shape
    torch.Size([3, 8])
    """
    if not isinstance(batch, int) or batch < 1:
        shown = batch if isinstance(batch, int | float | str) else f"a {type(batch).__name__}"
        raise ModelError(f"batch must be a whole number of at least 1, not {shown}; example inputs go in inputs=(tensor, ...)")
    given = _given(inputs) if inputs is not None else None
    spec, note = "", ""
    if isinstance(source, str | Path):
        spec = str(source)
        weights = weights or spec.endswith(".pt2")
        try:
            found, name, own, note = _load_spec(spec, batch, seq_len, given, trust, weights)
        except ModelCodeError:  # it may do what fake tensors refuse, such as module.bfloat16(), or read their numbers
            if weights:
                raise
            return load_model(source, batch, seq_len, inputs=inputs, trust=trust)
    else:
        if not isinstance(source, nn.Module | ExportedProgram):
            way_out = "; a pair of a module and its inputs is given as module, inputs=inputs" if isinstance(source, tuple) else ""
            if callable(source):
                way_out = "; make a function the forward of a torch.nn.Module, and call a class to get its module"
            raise ModelError(
                f"a model is a spec, a module or an ExportedProgram, but here it is {BRIEF.repr(source):.60}{way_out}"
            )
        kind = type(source.graph_module if isinstance(source, ExportedProgram) else source)
        found, name, own = source, kind.__name__, Given((), {})
    if isinstance(found, ExportedProgram) and given is None:
        own = _with_batch(found, batch, _exported_inputs(name, found))
    args, kwargs = given or own
    if not args and not kwargs:
        raise ModelError(f"model '{name}' comes without example inputs; give them as inputs=(tensor, ...)")
    if weights:
        _require_dense(name, (args, kwargs))
    _require_batch(name, batch, [*args, *kwargs.values()])
    _require_eval(name, found)
    if isinstance(found, ExportedProgram):
        _require_exported_shapes(name, found, args, kwargs)
    made_up = inputs is None and bool(note)
    way_out = architectures.WAY_OUT if made_up else ""
    notes = tuple(filter(None, (note, "" if weights else WITHOUT_WEIGHTS)))
    return Model(name, found, args, kwargs, Source(spec, batch, seq_len), way_out, notes)


def _load_spec(
    spec: str, batch: int, seq_len: int | None, given: Given | None, trust: bool, weights: bool
) -> tuple[nn.Module | ExportedProgram, str, Given, str]:
    """The model, its name, its example inputs, and a note on weights that the spec chose."""
    target, options = parse_options(spec)
    tensors = contextlib.nullcontext() if weights else FakeTensorMode(allow_non_fake_inputs=True)
    if target.endswith(".pt2"):
        return _load_program(Path(target), options, trust), Path(target).stem, Given((), {}), ""
    place, colon, attribute = target.partition(":")
    if not (colon and place and attribute):
        what = "give 'transformers:ClassName', 'hub:org/name', 'file.py:function', 'package.module:function' or a path "
        what += "that ends in .pt2"
        if target.endswith(".py"):
            what = f"name a function of the file that returns (module, example inputs), as in '{target}:function'"
        elif Path(target).is_dir():
            what = f"a checkpoint is named as 'transformers:{target}'"
        elif Path(target).is_file():
            what += "; a planner's workload file needs search --format"
        raise ModelError(f"model '{spec}' is not a spec: {what}")
    if place == "hub" or (place == "transformers" and Path(attribute).is_dir()):
        folder = checkpoints.fetch(attribute) if place == "hub" else Path(attribute)
        with tensors:
            return checkpoints.load_checkpoint(folder, target, options, batch, seq_len, given, weights)
    if place == "transformers":
        if "/" in attribute:
            raise ModelError(f"model '{target}': there is no folder '{attribute}'")
        with tensors:
            module, named = architectures.build(attribute, options, batch, seq_len, given, weights)
        return module, attribute, Given((), named), architectures.RANDOM.format(attribute)
    made, inputs = _call(place, attribute, options, batch, seq_len, tensors)
    return made, attribute, _given(inputs), ""


def _load_program(path: Path, options: Mapping[str, str], trust: bool) -> ExportedProgram:
    if options:
        raise ModelError(f"model '{path}' is an exported program, which takes no options: {', '.join(options)}")
    if not path.exists():
        raise ModelError(f"model file '{path}' does not exist")
    if not trust:
        raise ModelError(
            f"model file '{path}' holds pickled objects, and reading them runs whatever code its maker put in; "
            "give --trust (trust=True in Python) if you trust its maker"
        )
    try:
        return torch.export.load(path)
    except Exception as failure:
        raise ModelError(f"model file '{path}' cannot be read as an exported program: {one_line(failure)}") from failure


def _call(
    place: str,
    attribute: str,
    options: Mapping[str, str],
    batch: int,
    seq_len: int | None,
    tensors: contextlib.AbstractContextManager[object],
) -> tuple[nn.Module, Inputs]:
    """Import the function, and call it with the options and with batch and seq_len if it takes them, within ``tensors``.

    The import stands outside: a tensor of the module would stay fake for later calls.
    """
    subject = f"model '{place}:{attribute}'"
    function = import_function(place, attribute, subject)
    if isinstance(function, nn.Module):
        raise ModelError(f"{subject} is a module; name a function without arguments that returns ({attribute}, example inputs)")
    parameters = inspect.signature(function).parameters
    defaults = {name: None if p.default is p.empty else p.default for name, p in parameters.items()}
    values = typed_options(
        options, {name: value for name, value in defaults.items() if name not in ("batch", "seq_len")}, subject
    )
    for name, value in (("batch", batch), ("seq_len", seq_len)):
        if name in parameters and value is not None:
            values[name] = value
        elif name == "seq_len" and value is not None:
            raise ModelError(f"{subject} takes no argument 'seq_len'; leave the sequence length out")
    missing = [name for name, p in parameters.items() if p.default is p.empty and p.kind in (0, 1, 3) and name not in values]
    if missing:
        raise ModelError(f"{subject} needs values for {', '.join(missing)}: add '?{missing[0]}=...'")
    try:
        with tensors:
            made = function(**values)
    except (Exception, SystemExit) as failure:
        raise ModelCodeError(f"{subject} failed: {type(failure).__name__}: {failure}") from failure
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
        raise ModelError(
            f"{subject} returned {type(made).__name__}, and (module, example inputs) is expected, "
            "for example 'return module, (torch.zeros(1, 64),)'"
        )
    return made


def call_of(args: Any, kwargs: Mapping[str, Any] | None, inputs: Inputs | None) -> Inputs | None:
    """The example inputs of ``trace(model, args, kwargs)``, or ``inputs``.

    Raises: ModelError: both are given, or ``args`` is a number.
    """
    if args is None and kwargs is None:
        return inputs
    if inputs is not None:
        raise ModelError("example inputs are given twice; give args and kwargs, or inputs")
    if isinstance(args, int | float | str):
        raise ModelError(f"args are the positional example inputs, not {args!r}; a batch size is given as batch={args!r}")
    positional = (args,) if isinstance(args, torch.Tensor) else tuple(args or ())
    return Given(positional, dict(kwargs or {}))


def _given(inputs: Inputs) -> Given:
    if isinstance(inputs, Given):
        return inputs
    if isinstance(inputs, Mapping):
        return Given((), dict(inputs))
    return Given((inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs), {})


def _require_dense(name: str, inputs: Any) -> None:
    """Refuse arrays, and tensors that cannot be copied to shared memory element by element."""
    faults = [
        f"input{pytree.keystr(path)[3:]} is {kind_of(value)}, and a dense tensor is expected"
        + "; torch.from_numpy makes one" * isinstance(value, np.ndarray)
        for path, value in pytree.tree_flatten_with_path(inputs)[0]
        if isinstance(value, np.ndarray) or (isinstance(value, torch.Tensor) and not is_dense(value))
    ]
    raise_faults(ModelError, f"model '{name}' cannot take its example inputs", faults)


def dense_inputs(program: ExportedProgram) -> dict[str, torch.Tensor]:
    """The tensors that an exported program takes, fake ones, by name; a dynamic dimension has a symbol for its size."""
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    names = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind is InputKind.USER_INPUT]
    return {name: values[name] for name in names if isinstance(values[name], torch.Tensor)}


def is_static(program: ExportedProgram) -> bool:
    """Whether no dimension of an exported program's inputs is dynamic."""
    return all(isinstance(size, int) for value in dense_inputs(program).values() for size in value.shape)


def frozen_dimensions(found: nn.Module | ExportedProgram, inputs: Sequence[torch.Tensor]) -> tuple[str, ...]:
    """A sentence that names the dynamic dimensions of an exported program and their fixed sizes; none for a static program."""
    if not isinstance(found, ExportedProgram):
        return ()
    fixed = [
        f"dimension {dim} of '{name}' is fixed to {tensor.shape[dim]}"
        for (name, value), tensor in zip(dense_inputs(found).items(), inputs, strict=True)
        for dim, size in enumerate(value.shape)
        if not isinstance(size, int)
    ]
    if not fixed:
        return ()
    return (
        f"the exported program has dynamic dimensions, and a traced graph has none: {', '.join(fixed)}. "
        "For other sizes trace it again with example inputs of those sizes: trace(program, inputs), or --batch.",
    )


def _exported_inputs(name: str, program: ExportedProgram) -> Given:
    """The example inputs that an exported program came with, none if it has none. Raises: ModelError: they are something else."""
    match program.example_inputs:
        case None:
            return Given((), {})
        case [list() | tuple() as args, dict() as kwargs] if all(isinstance(key, str) for key in kwargs):
            return Given(tuple(args), kwargs)
        case _:
            raise ModelError(
                f"model '{name}' holds example inputs that are not a pair of a tuple and a dict with names; export it again, or "
                "give example inputs as inputs=(tensor, ...)"
            )


def _with_batch(program: ExportedProgram, batch: int, inputs: Given) -> Given:
    """The program's own example inputs, repeated to ``batch`` items (if it is not 1) where the first dimension is dynamic."""
    leaves, spec = pytree.tree_flatten((inputs.args, inputs.kwargs))
    tensors = iter(dense_inputs(program).values())
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor) and batch != 1:
            expected = next(tensors, leaf)
            if expected.dim() and leaf.dim() and len(leaf) and is_dense(leaf) and not isinstance(expected.shape[0], int):
                leaves[place] = leaf[torch.arange(batch) % len(leaf)]
    return Given(*pytree.tree_unflatten(leaves, spec))


def _require_exported_shapes(name: str, program: ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse example inputs of other shapes and dtypes than those that the program was exported for."""
    names = program.call_spec.in_spec.child(1).context or []
    leaves, spec = pytree.tree_flatten((tuple(args), {key: kwargs[key] for key in [*names, *kwargs] if key in kwargs}))
    if spec != program.call_spec.in_spec:
        return  # ``trace`` names the arguments that the program takes
    given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    faults = []
    for (place, expected), tensor in zip(dense_inputs(program).items(), given, strict=False):
        sizes = [size if isinstance(size, int) else None for size in expected.shape]
        fits = len(sizes) == tensor.dim() and all(size in (None, found) for size, found in zip(sizes, tensor.shape, strict=True))
        if not fits or tensor.dtype != expected.dtype:
            wanted = ",".join("any" if size is None else str(size) for size in sizes)
            faults.append(f"'{place}' is {tensor.dtype} {list(tensor.shape)}, and {expected.dtype} [{wanted}] was exported")
    raise_faults(ModelError, f"model '{name}' cannot take its example inputs; export it for these shapes", faults)


def _require_batch(name: str, batch: int, inputs: Sequence[Any]) -> None:
    """Refuse a batch size, other than the default of 1, that no input has."""
    sizes = [value.shape[0] for value in inputs if isinstance(value, torch.Tensor) and value.dim() > 0]
    if batch != 1 and batch not in sizes:
        raise ModelError(
            f"model '{name}' comes with inputs of its own, whose leading sizes are {sizes}, and batch {batch} was asked for. "
            "Leave the batch out, or let its function take an argument 'batch'."
        )


def _require_eval(name: str, module: nn.Module | ExportedProgram) -> None:
    """Refuse a module in training mode; the user's module is not changed."""
    if isinstance(module, nn.Module) and not isinstance(module, fx.GraphModule) and module.training:
        raise ModelError(
            f"model '{name}' is in training mode, where dropout is random and batch norms change at each call. "
            "Call its eval() first."
        )

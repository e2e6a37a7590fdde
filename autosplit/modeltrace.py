"""trace(): a model as one graph, or as a family of graphs for requests of several sizes."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
from torch import nn
from torch.export import ExportedProgram

from autosplit.arguments import checked
from autosplit.errors import BRIEF, ModelError, UsageError, names
from autosplit.generating.steps import StepFamily, has_encoder, step_family
from autosplit.tracing import capturing, loading
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import At, Family, Places, named_tensors, trace_family
from autosplit.tracing.loading import Inputs
from autosplit.tracing.padding import with_checked_padding
from autosplit.values.plan import PYTHON_OBJECT, Source
from autosplit.values.samples import backend_fault
from autosplit.values.sequences import Sequences, parse_sequences
from autosplit.values.shapes import Sizes, parse_sizes

Model = str | Path | nn.Module | ExportedProgram

AXES = {"batch": 0, "seq": 1}
"""Axes of the inputs by the names of their dimensions, where an exported program does not name them."""


class Settings(TypedDict, total=False):
    """Settings of ``trace`` for one size and for several."""

    inputs: Inputs | None
    batch: int
    seq_len: int | None
    trust: bool
    values: Literal["finite", "any"]
    trust_backends: str | Sequence[str]
    weights: bool
    shapes: Places | None


Args = Sequence[Any] | torch.Tensor | None
Kwargs = Mapping[str, Any] | None


@overload
def trace(
    model: Model, *, generate: str | Sequences, trust: bool = ..., trust_backends: str | Sequence[str] = ...
) -> StepFamily: ...
@overload
def trace(model: Model, args: Args = ..., kwargs: Kwargs = ..., *, sizes: None = None, **given: Unpack[Settings]) -> Traced: ...
@overload
def trace(
    model: Model, args: Args = ..., kwargs: Kwargs = ..., *, sizes: Mapping[str, str | Sizes], **given: Unpack[Settings]
) -> Family: ...
@checked
def trace(
    model: Model,
    args: Sequence[Any] | torch.Tensor | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    inputs: Inputs | None = None,
    batch: int = 1,
    seq_len: int | None = None,
    trust: bool = False,
    values: Literal["finite", "any"] = "finite",
    trust_backends: str | Sequence[str] = (),
    weights: bool = True,
    shapes: Places | None = None,
    sizes: Mapping[str, str | Sizes] | None = None,
    generate: str | Sequences | None = None,
) -> Traced | Family:
    """Trace a model to one flat graph for one batch size, or with ``sizes`` or ``generate`` to a family of graphs.

    Args:
        model: a spec (see ``autosplit.tracing.loading``), a module, an ``fx.GraphModule`` or an ``ExportedProgram``.
        args, kwargs: example inputs, as in ``torch.export.export``; a module needs some, a spec brings its own.
        inputs: example inputs that are all positional (a tensor or a sequence) or all by name (a mapping).
        batch, seq_len: items in one request, and tokens in one item for text models.
        trust: True to read a ``.pt2`` file, which can run code of its maker.
        values: ``any`` if requests may hold NaN, infinity, integers beyond 31 bits or ids beyond their tables: an op that a
            backend computes otherwise than eager on such values runs on another one.
        weights: False to load and compute nothing: the trace can be planned on stated speeds, and not run.
        trust_backends: backends that get ops even where they compute otherwise than eager.
        sizes: dimension to the sizes that requests may have, such as ``{"seq": "16..512", "batch": range(1, 17)}``.
        shapes: parameter of the model to axis to dimension, such as ``{"input_ids": {1: "seq"}}``. A spec needs none for the
            dimensions ``seq`` and ``batch``, and an exported program none for its dynamic dimensions.
        generate: the sequences that a language model continues, such as ``"prompt=128,new=64"``; it takes no example inputs then.
    Raises: ModelError: the model cannot be loaded. TraceError: it cannot be captured. UsageError: an unknown backend, or sizes
        that do not fit the model.
    """
    if values not in ("finite", "any"):
        raise UsageError(f"values must be 'finite' or 'any', but is {BRIEF.repr(values)}")
    trusted = names("trust_backends", trust_backends)
    if trusted and (fault := backend_fault(*trusted)):
        raise UsageError(fault)
    given = loading.call_of(args, kwargs, inputs)

    def kept(traced: Traced) -> Traced:
        return replace(traced, source=replace(traced.source, values=values, trusted=trusted))

    if generate is not None:
        if given is not None or shapes is not None or sizes is not None:
            raise UsageError("a model that generates has inputs and sizes of its own; leave out inputs, shapes and sizes")
        steps = _steps(model, parse_sequences(generate) if isinstance(generate, str) else generate, trust)
        return replace(steps, variants=tuple(map(kept, steps.variants)))
    if sizes is None:
        if shapes is not None:
            raise UsageError("shapes name dimensions, and sizes are not given; give both, as in sizes={'seq': '16..512'}")
        return kept(capturing.trace(loading.load_model(model, batch, seq_len, inputs=given, trust=trust, weights=weights)))
    if not weights:
        raise UsageError("a model of several sizes is traced with its weights; leave out weights=False")
    allowed = {dim: parse_sizes(found) for dim, found in sizes.items()}
    largest = {dim: found[-1] for dim, found in allowed.items()}
    batch, seq_len = largest.get("batch", batch), largest.get("seq", seq_len)
    is_made = given is None and shapes is None and isinstance(model, str | Path) and not str(model).endswith(".pt2")
    size = (batch, seq_len) if is_made else (1, None)
    loaded = loading.load_model(model, *size, inputs=given, trust=trust)
    if shapes is None:
        shapes = _program_axes(loaded) if isinstance(loaded.module, ExportedProgram) else _spec_axes(loaded, allowed)
    family = with_checked_padding(trace_family(loaded, shapes, allowed))

    def make(sizes: At, num_draws: int = 0) -> Traced:
        return kept(family.make(sizes, num_draws))

    return replace(family, variants=tuple(map(kept, family.variants)), make=make)


def _steps(model: Model, sequences: Sequences, trust: bool) -> StepFamily:
    """The steps of a language model. Raises: as ``load_model``, ``step_family``. UsageError: an exported program, or no room."""
    if isinstance(model, ExportedProgram) or str(model).endswith(".pt2"):
        name = "the model" if isinstance(model, ExportedProgram) else f"'{model}'"
        raise UsageError(f"{name} is an exported program, which computes whole sequences; give the module that it was made of")
    notes: tuple[str, ...] = ()
    if isinstance(model, nn.Module):
        module, source = model, PYTHON_OBJECT
    else:
        loaded = loading.load_model(model, trust=trust)
        assert isinstance(loaded.module, nn.Module)  # only a .pt2 file holds anything else
        module, source, notes = loaded.module, Source(loaded.source.spec), loaded.notes
    if not has_encoder(module):
        sequences.require_room()
    family = step_family(module, sequences.max_sequences, sequences.max_length, prompt=sequences.prompt, new=sequences.new)
    variants = tuple(replace(traced, source=source, notes=(*notes, *traced.notes)) for traced in family.variants)
    return replace(family, variants=variants, sequences=sequences)


def _spec_axes(model: loading.Model, allowed: Mapping[str, Sizes]) -> Places:
    """The axes that change with the batch and the sequence length of a spec. Raises: UsageError: other dimensions, or none do."""
    if not model.source.spec or set(allowed) - {"batch", "seq"}:
        raise UsageError(
            f"which axes have the sizes of {', '.join(allowed)} is not known; give shapes={{'input_ids': {{1: 'seq'}}}} with the "
            "names of the model's own parameters"
        )
    other = {dim: sizes[0] if len(sizes) > 1 else sizes[0] + 1 for dim, sizes in allowed.items()}
    batch, seq_len = other.get("batch", model.source.batch), other.get("seq", model.source.seq_len)
    if len(set(other.values())) < len(other):
        seq_len = (seq_len or 0) + 1
    small = loading.load_model(model.source.spec, batch, seq_len, trust=True, weights=False)
    pairs = {"batch": (model.source.batch, batch), "seq": (model.source.seq_len, seq_len)}
    found = {}
    for (name, tensor), (_, its) in zip(named_tensors(model), named_tensors(small), strict=True):
        axes = {
            axis: dim
            for axis, pair in enumerate(zip(tensor.shape, its.shape, strict=True))
            for dim in allowed
            if pair[0] != pair[1] and pair == pairs[dim]
        }
        found[name] = axes
    return {name: axes for name, axes in found.items() if axes}


def _program_axes(model: loading.Model) -> Places:
    """The dynamic dimensions of an exported program: ``batch`` for the first axis, ``seq`` for another one."""
    assert isinstance(model.module, ExportedProgram)
    symbols: dict[str, str] = {}
    found: dict[str, dict[int, str]] = {}
    for name, value in loading.dense_inputs(model.module).items():
        for axis, size in enumerate(value.shape):
            if isinstance(size, int):
                continue
            free = next((dim for dim, at in AXES.items() if (at == 0) == (axis == 0) and dim not in symbols.values()), str(size))
            found.setdefault(name, {})[axis] = symbols.setdefault(str(size), free)
    if not found:
        raise ModelError(f"exported program '{model.name}' has no dynamic dimensions; export it with some")
    return found

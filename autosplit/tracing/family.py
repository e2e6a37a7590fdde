"""A model at several sizes: traces with the same ops over the same weights, so that one list of stages fits all of them.

One export with symbolic sizes gives all of them (``resizing``): the largest, the smallest and all small ones with a 1 are
compared with the module, and others need no pass of the model. Where torch makes none, each variant is traced on its own,
compared, and must have the ops of the others.
"""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from typing import Any

import torch
from torch.export import Dim, ExportedProgram, ShapesCollection

from autosplit.compat.torchparts import pytree
from autosplit.errors import BRIEF, TraceError, UsageError, close_names, raise_faults
from autosplit.tracing import architectures
from autosplit.tracing.callbinding import leaf_places, signature_of
from autosplit.tracing.capturing import Traced, export, flattened, trace, traced_of
from autosplit.tracing.flattening import Flat
from autosplit.tracing.loading import Model, dense_inputs
from autosplit.tracing.programs import user_line
from autosplit.tracing.resizing import Resizable, resizable
from autosplit.tracing.sizecheck import require_sizes
from autosplit.tracing.verifying import own_storage
from autosplit.values.graph import Graph
from autosplit.values.shapes import Sizes, size_fault, sizes_text

Places = Mapping[str, Mapping[int, str]]
"""Input or output to axis to dimension."""

At = Mapping[str, int]
"""One size for each dimension."""


Make = Callable[..., Traced]
"""``make(sizes, num_draws=0)`` traces the model at these sizes, and compares it with the module on so many inputs.

Raises: TraceError: the model has other ops there, or the graph computes something else.
"""

MASK = "attention_mask"
"""The parameter that marks padding for models of transformers."""

TIED = re.compile(r"The values of (\w+) = .* and (\w+) = .* must always be equal")
"""Words in torch's error for two dimensions that must be equal."""


class Traces(Sequence[Traced]):
    """The traces of a model at given sizes, each made when it is first asked for.

    Args:
        at: makes the trace at one size, or finds it.
        sizes: one for each trace.
    """

    def __init__(self, at: Callable[[At], Traced], sizes: Sequence[At]) -> None:
        self._places, self._made = range(len(sizes)), cache(lambda place: at(sizes[place]))

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, place: Any) -> Any:
        found = self._places[place]
        return self._made(found) if isinstance(found, int) else [self._made(one) for one in found]


@dataclass(frozen=True, eq=False)
class Family:
    """The traces of a model at several sizes.

    Attributes:
        variants: the traces, that of the largest sizes first. All have the same ops by name, in the same order, over the same
            weights.
        sizes: the sizes of each variant.
        allowed: dimension to the sizes that requests may have.
        dims: input of the graph to axis to dimension.
        out_dims: output of the graph to axis to dimension.
        shapes: parameter of the model to axis to dimension.
        masks: inputs that a call may leave out: ones at each place of a request, zeros where it is padded.
        unpaddable: dimension to the reason why padding along it changes answers; dimensions that may be padded are left out.
        make: traces the model at other sizes, each once.
        symbolic: the export with symbolic sizes, of which stages for every size are made; None where torch made none.
    """

    variants: Sequence[Traced]
    sizes: tuple[At, ...]
    allowed: Mapping[str, Sizes]
    dims: Places
    out_dims: Places
    shapes: Places = field(default_factory=dict)
    masks: tuple[str, ...] = ()
    unpaddable: Mapping[str, str] = field(default_factory=dict)
    make: Make = field(repr=False, default=lambda sizes, num_draws=0: _unmade(sizes))
    symbolic: Resizable | None = field(repr=False, default=None)

    @property
    def largest(self) -> At:
        """The largest size of each dimension."""
        return {dim: sizes[-1] for dim, sizes in self.allowed.items()}

    @property
    def graph(self) -> Graph:
        """The graph of the largest variant."""
        return self.variants[0].graph

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that the user should read: those of the largest trace, and why a dimension is not padded."""
        exact = (f"'{dim}' runs at exact sizes only: {reason}" for dim, reason in self.unpaddable.items())
        return (*self.variants[0].notes, *exact)

    def at(self, sizes: At) -> Traced:
        """The trace at these sizes. Raises: UsageError: a size that is not allowed. TraceError: the model has other ops there."""
        self._require(sizes)
        return self.variants[self.sizes.index(sizes)] if sizes in self.sizes else self.make(sizes)

    def only(self, sizes: Sequence[At]) -> "Family":
        """The family of the variants with these sizes, and of the largest one; errors as for ``at``.

        With a symbolic export, a variant is traced when it is first asked for.
        """
        wanted = (self.largest, *(at for at in sizes if at != self.largest))
        for at in wanted:
            self._require(at)
        traces = tuple(map(self.at, wanted)) if self.symbolic is None else Traces(self.at, wanted)
        return replace(self, variants=traces, sizes=wanted)

    def _require(self, sizes: At) -> None:
        faults = [fault for dim, size in sizes.items() if (fault := size_fault(dim, size, self.allowed[dim]))]
        raise_faults(UsageError, f"'{self.variants[0].graph.name}' has no such variant", faults)

    def sizes_of(self, tensors: Sequence[torch.Tensor]) -> dict[str, int]:
        """The sizes of a request, one tensor for each input of the graph.

        Raises: UsageError: with every fault: sizes that contradict each other or that are not allowed, an empty request.
        """
        found: dict[str, tuple[int, str]] = {}
        faults = []
        for name, tensor in zip(self.variants[0].graph.inputs, tensors, strict=True):
            for axis, dim in self.dims.get(name, {}).items():
                size = tensor.shape[axis] if axis < tensor.dim() else 0
                known, place = found.setdefault(dim, (size, f"'{name}' axis {axis}"))
                if known != size:
                    faults.append(f"'{dim}' is {known} in {place} and {size} in '{name}' axis {axis}")
        faults += [fault for dim, (size, _) in found.items() if (fault := size_fault(dim, size, self.allowed[dim]))]
        raise_faults(UsageError, f"a request does not fit '{self.variants[0].graph.name}'", faults)
        return {dim: found[dim][0] for dim in self.allowed}

    def __repr__(self) -> str:
        ranges = ", ".join(f"{dim} {sizes_text(sizes)}" for dim, sizes in self.allowed.items())
        return f"Family({self.variants[0].graph.name!r}, {ranges}, {len(self.variants)} variants)"


def as_family(model: Traced | Family, others: Sequence[Traced] = ()) -> Family:
    """A trace, and ``others`` at smaller sizes, as a family whose dimensions have no names; a family is itself."""
    return model if isinstance(model, Family) else Family((model, *others), ({},) * (1 + len(others)), {}, {}, {})


def resized(tensor: torch.Tensor, axes: Mapping[int, str], sizes: At) -> torch.Tensor:
    """The tensor with other sizes along these axes: its elements are repeated, or left out at the end."""
    for axis, dim in axes.items():
        tensor = tensor.index_select(axis, torch.arange(sizes[dim]) % tensor.shape[axis])
    return tensor


def trace_family(
    model: Model, shapes: Places, allowed: Mapping[str, Sizes], inputs_at: Callable[[At], tuple[Any, ...]] | None = None
) -> Family:
    """Trace a model at its largest and its smallest sizes.

    Args:
        model: with example inputs of any sizes.
        shapes: parameter of the model to axis to dimension, such as ``{"input_ids": {1: "seq"}}``.
        allowed: dimension to its sizes.
        inputs_at: makes the positional example inputs of each size, where parts of the largest ones would be no typical request.
    Raises: UsageError: with every fault of ``shapes``. TraceError: as ``capturing.trace``, or a dimension for which the model has
        other ops at other sizes.
    """
    args, kwargs = own_storage((tuple(model.args), dict(model.kwargs)))
    model, masks, shapes = _with_masks(replace(model, args=args, kwargs=kwargs), shapes)
    axes = _axes(model, shapes, allowed)

    def model_of(sizes: At) -> Model:
        found = model_at(model, axes, sizes)
        return found if inputs_at is None else replace(found, args=inputs_at(sizes))

    with architectures.without_caches(None if model.source.spec else model.module):
        largest, low = {dim: sizes[-1] for dim, sizes in allowed.items()}, _apart(allowed)
        try:
            make, symbolic = _maker(model_of, axes, allowed)
        except TraceError as failure:
            own = {dim: leaf.shape[axis] for name, leaf in named_tensors(model) for axis, dim in shapes.get(name, {}).items()}
            if dim := _refused(model_of, own, largest):
                raise TraceError(f"model '{model.name}' takes '{dim}' {own[dim]}, and not {largest[dim]}: {failure}") from failure
            raise
        variants = [make(at, 1) for at in (largest, low, *_with_ones(allowed))][:2]
        if symbolic is None and inputs_at is None:
            require_sizes(model_of, allowed)
    names = variants[0].graph.inputs
    dims = {name: dict(axes[place]) for place, name in enumerate(names) if axes.get(place)}
    out_dims = {name: _out_axes(variants, (largest, low), name) for name in variants[0].graph.outputs}
    found = Family(tuple(variants), (largest, low), allowed, dims, out_dims, shapes, masks, {}, make, symbolic)
    return found if low != largest else found.only([])


def model_at(model: Model, axes: Mapping[int, Mapping[int, str]], sizes: At) -> Model:
    """The model with its example inputs resized; ``axes`` is by position among the tensors of the inputs."""
    leaves, spec = pytree.tree_flatten((tuple(model.args), dict(model.kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    for number, place in enumerate(places):
        leaves[place] = resized(leaves[place], axes.get(number, {}), sizes)
    args, kwargs = pytree.tree_unflatten(leaves, spec)
    source = model.source
    source = replace(source, batch=sizes.get("batch", source.batch), seq_len=sizes.get("seq", source.seq_len))
    return replace(model, args=args, kwargs=kwargs, source=source)


def named_tensors(model: Model) -> list[tuple[str, torch.Tensor]]:
    """The tensors of the example inputs, with the names of their parameters, such as ``input_ids`` or ``sizes[0]``."""
    leaves, spec = pytree.tree_flatten((tuple(model.args), dict(model.kwargs)))
    if isinstance(model.module, ExportedProgram):
        return list(zip(dense_inputs(model.module), (leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), strict=True))
    named = [place.replace("'", "", 2) for place in leaf_places(spec, signature_of(model.module))]
    return [(name, leaf) for name, leaf in zip(named, leaves, strict=True) if isinstance(leaf, torch.Tensor)]


def _with_masks(model: Model, shapes: Places) -> tuple[Model, tuple[str, ...], Places]:
    """The model with an attention mask of ones among its inputs, if it takes one and none is given."""
    if isinstance(model.module, ExportedProgram) or MASK not in inspect.signature(model.module.forward).parameters:
        return model, (), shapes
    signature = inspect.signature(model.module.forward)
    bound = signature.bind_partial(*model.args, **model.kwargs).arguments
    if bound.get(MASK) is not None:
        return model, (MASK,), shapes
    first = next((name for name in shapes if name in bound and 1 in shapes[name]), "")
    tokens = bound.get(first)
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2 or tokens.is_floating_point() or MASK in bound:
        return model, (), shapes
    given = {**model.kwargs, MASK: torch.ones_like(tokens, dtype=torch.int64)}
    return replace(model, kwargs=given), (MASK,), {**shapes, MASK: shapes[first]}


def _axes(model: Model, shapes: Places, allowed: Mapping[str, Sizes]) -> dict[int, dict[int, str]]:
    """The axes by the position of a tensor among the inputs. Raises: UsageError: with every fault."""
    tensors = named_tensors(model)
    named = [name for name, _ in tensors]
    faults = [f"it takes no tensor '{name}'{close_names(name, named)}" for name in shapes if name not in named]
    faults += [f"sizes of '{dim}' are given, and no input has that dimension" for dim in set(allowed) - _dims(shapes)]
    faults += [f"'{dim}' has no sizes; give sizes={{'{dim}': '1..8'}}" for dim in sorted(_dims(shapes) - set(allowed))]
    seen: dict[str, tuple[int, str]] = {}
    for name, leaf in tensors:
        for axis, dim in shapes.get(name, {}).items():
            if axis not in range(leaf.dim()) or not leaf.shape[axis]:
                faults.append(f"'{name}' is {BRIEF.repr(leaf)}, and has no elements along axis {axis}")
            elif seen.setdefault(dim, (leaf.shape[axis], name))[0] != leaf.shape[axis]:
                size, other = seen[dim]
                faults.append(f"'{dim}' is {size} in '{other}' and {leaf.shape[axis]} in '{name}'")
    raise_faults(UsageError, f"the shapes do not fit model '{model.name}'", faults)
    return {place: dict(shapes.get(name, {})) for place, (name, _) in enumerate(tensors)}


def _dims(shapes: Places) -> set[str]:
    return {dim for axes in shapes.values() for dim in axes.values()}


def _apart(allowed: Mapping[str, Sizes]) -> dict[str, int]:
    """Small sizes, whose smallest and largest differ between dimensions if possible, so that these can be told apart."""
    found: dict[str, int] = {}
    for dim, sizes in allowed.items():
        taken = {(found[other], allowed[other][-1]) for other in found}
        found[dim] = next((size for size in sizes[:8] if (size, sizes[-1]) not in taken), sizes[0])
    return found


def _with_ones(allowed: Mapping[str, Sizes]) -> list[At]:
    """Small sizes with each choice of the dimensions that may be 1.

    An export with symbolic sizes holds for all that are at least 2, by torch's guards. At 1 the module may do something else.
    """
    one_or_more = {dim: sizes[:2] if sizes[0] == 1 else sizes[:1] for dim, sizes in allowed.items()}
    found = [dict(zip(allowed, sizes, strict=True)) for sizes in product(*one_or_more.values())]
    return [at for at in found if 1 in at.values()]


def _out_axes(variants: Sequence[Traced], sizes: Sequence[At], name: str) -> dict[int, str]:
    """The axes of an output that are as long as a dimension; '' for an axis whose size is something else of the sizes."""
    shapes = [variant.graph.values[name].shape for variant in variants]
    pairs = {(sizes[0][dim], sizes[1][dim]): dim for dim in sizes[0]}
    return {axis: pairs.get(pair, "") for axis, pair in enumerate(zip(*shapes, strict=True)) if pair[0] != pair[1]}


def _maker(
    model_of: Callable[[At], Model], axes: Mapping[int, Mapping[int, str]], allowed: Mapping[str, Sizes]
) -> tuple[Make, Resizable | None]:
    """A function that traces the model at given sizes, and the symbolic export.

    A trace of the symbolic export needs no pass of the model. One that is made anew is compared with the module in any case.
    """
    largest = {dim: sizes[-1] for dim, sizes in allowed.items()}
    full = model_of(largest)
    try:
        exported = export(full, _symbolic(full, axes, allowed))
        names = list(dense_inputs(exported))
        free = {dim for dim, sizes in allowed.items() if len(sizes) > 1}
        named = {names[place]: {axis: dim for axis, dim in found.items() if dim in free} for place, found in axes.items()}
        plan = resizable(exported, named)
        first = flattened(full, plan.static(largest), 1)
    except TraceError as failure:
        if tied := TIED.search(str(failure.__cause__)):
            raise TraceError(
                f"model '{full.name}' needs '{tied[1]}' and '{tied[2]}' to be equal; give both axes one name in shapes"
            ) from failure
        return _once(*_one_by_one(model_of, largest, failure), largest), None
    flat = Flat(first.program, first.in_leaves, first.out_leaves, first.copied)

    def make(sizes: At, num_draws: int = 0) -> Traced:
        return traced_of(model_of(sizes), exported, plan.at(flat, sizes), num_draws)

    return _once(make, first, largest), replace(plan, renamed=dict(zip(first.graph.inputs, names, strict=True)))


def _once(make: Make, first: Traced, largest: At) -> Make:
    """The function with a memory: it makes a trace again only to compare it with the module."""
    known = {tuple(largest.values()): first}

    def found(sizes: At, num_draws: int = 0) -> Traced:
        at = tuple(sizes[dim] for dim in largest)
        if at not in known or (num_draws and known[at].module_error is None):
            known[at] = make(sizes, num_draws)
        return known[at]

    return found


def _refused(model_of: Callable[[At], Model], own: At, largest: At) -> str:
    """The dimension for which a model cannot be traced at its largest sizes: it can at its ``own`` size of that; '' if none."""
    for dim in own:
        if own[dim] != largest[dim]:
            with suppress(TraceError):
                trace(model_of({**largest, dim: own[dim]}), num_draws=0)
                return dim
    return ""


def _symbolic(model: Model, axes: Mapping[int, Mapping[int, str]], allowed: Mapping[str, Sizes]) -> Any:
    """The symbolic dimensions of the tensors, as a ``ShapesCollection``, whose methods have no types."""
    tensors = [leaf for leaf in pytree.tree_leaves((model.args, dict(model.kwargs))) if isinstance(leaf, torch.Tensor)]
    # torch counts from 2, so that 1 to 2 would be one size, and no symbol
    dims = {dim: Dim(dim, min=sizes[0], max=max(sizes[-1], 3)) for dim, sizes in allowed.items() if len(sizes) > 1}
    collection: Any = ShapesCollection
    found = collection()
    for place, tensor in enumerate(tensors):
        if symbols := {axis: dims[dim] for axis, dim in axes.get(place, {}).items() if dim in dims}:
            found[tensor] = symbols
    return found


def _one_by_one(model_of: Callable[[At], Model], largest: At, symbolic_failure: TraceError) -> tuple[Make, Traced]:
    """A function that traces the model anew for each size, and the largest trace. Raises: TraceError: none can be made."""
    first = trace(model_of(largest), num_draws=1)

    def make(sizes: At, num_draws: int = 0) -> Traced:
        there = model_of(sizes)
        apart = ", ".join(f"'{dim}' {largest[dim]} and {size}" for dim, size in sizes.items() if size != largest[dim])
        try:
            found = trace(there, num_draws=max(num_draws, 1))
        except TraceError as failure:
            raise TraceError(f"model '{there.name}' does not compute at other sizes ({apart}): {failure}") from failure
        if fault := _other_ops(first, found):
            raise TraceError(
                f"model '{there.name}' computes with other ops at other sizes ({apart}): {fault}. Give only sizes at which it "
                f"has the same ops, or compute with tensors there. With symbolic sizes: {symbolic_failure}"
            ) from symbolic_failure
        return found

    return make, first


def _other_ops(first: Traced, other: Traced) -> str:
    """The first op that only one of two traces has, with its line; '' if all are the same."""
    pairs = [[(op.name, op.operator, op.weights) for op in traced.graph.ops] for traced in (first, other)]
    if pairs[0] == pairs[1] and first.graph.outputs == other.graph.outputs:
        return ""
    at = next((n for n, (a, b) in enumerate(zip(*pairs, strict=False)) if a != b), min(map(len, pairs)))
    for traced in (first, other):
        if at < len(traced.graph.ops):
            op = traced.graph.ops[at]
            line = user_line(next(node for node in traced.program.graph.nodes if node.name == op.name))
            return f"op '{op.name}' ({op.operator}{f', {line}' if line else ''}) is not in both"
    return "they return other values"


def _unmade(sizes: At) -> Traced:
    raise UsageError(f"this family has no variant of {dict(sizes)}, and nothing to make one of")

"""trace() turns a model into one flat, functional ATen graph with static shapes, and the torch-free Graph of it.

``torch.export`` in its non-strict form captures the model; ``run_decompositions({})`` makes it functional and leaves every
operator as it is (the usual table of decompositions changes the last bits). One real pass records the strides and alignment of
every value. Then the graph is compared with the model itself (``verifying``). A trace that is not compared needs no real pass:
fake tensors tell the layouts.
"""

import contextlib
import inspect
import io
import logging
import re
import textwrap
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import Signature
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.nn.modules import rnn

from autosplit.compat.runtimes import kept_kernels
from autosplit.compat.torchparts import pytree
from autosplit.errors import BRIEF, TraceError, UsageError, is_interrupt
from autosplit.tracing import architectures, devicecopies, flattening
from autosplit.tracing.callbinding import bind, leaf_places, signature_of
from autosplit.tracing.differing import NumericalError
from autosplit.tracing.flattening import Fixed
from autosplit.tracing.loading import WITHOUT_WEIGHTS, Model, frozen_dimensions, is_static
from autosplit.tracing.programs import observed, weight, weight_names
from autosplit.tracing.tensorspec import TensorSpec, differences, laid_out, layout, spec_of
from autosplit.tracing.verifying import NUM_DRAWS, own_storage, verify
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.plan import PYTHON_OBJECT, Source

WITHOUT_CACHE = "the model returns a key-value cache, which no graph can hold: it was traced with config.use_cache = False"

TRACED_LINE = re.compile(r'File "(.+)", line (\d+), in .*\n\s*(.+)')
"""A line of the user's in the text of an error that a pass over an exported graph raises."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A model as one graph, for planning (``graph``) and for running (``program``).

    Attributes:
        program: the same graph as a flat fx program. Its placeholders are ``graph.inputs``, its node names are the names of ops
            and values, its get_attr nodes read the weights, and it returns a tuple of ``graph.outputs``.
        in_spec, out_spec: the pytree containers of the model's inputs and outputs.
        example_inputs: one tensor for each of ``graph.inputs``.
        specs: the memory layout of every value.
        in_leaves, out_leaves: for each leaf of ``in_spec`` and ``out_spec`` the value's name, or the constant that it always is.
        source: the spec, batch and sequence length from which a plan makes the model again.
        module_error: the largest error of ``program`` against the user's module over the example inputs and fresh ones of
            the same shapes, both in eager. 0.0 means bit for bit, None that they were not compared. Reports show it beside
            the error of a plan against ``program``, for only both together say how far the plan is from the module.
        notes: sentences about the trace that the user should read, such as a dynamic dimension that is fixed.
        signature: the parameters of the user's module; None where their names are not known.
        copied: (op, value that it reads) to the devices that explicit copies between them lead to, in order.
        unread: names in the model's state dict that no op reads: unused weights, and second names of shared ones.
    """

    graph: Graph
    program: fx.GraphModule
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    example_inputs: tuple[torch.Tensor, ...]
    specs: Mapping[str, TensorSpec]
    in_leaves: tuple[str | Fixed, ...]
    out_leaves: tuple[str | Fixed, ...]
    source: Source = PYTHON_OBJECT
    module_error: NumericalError | None = None
    notes: tuple[str, ...] = ()
    signature: Signature | None = None
    copied: Mapping[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def flatten_inputs(self, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, ...]:
        """The tensors of one request, one for each of ``graph.inputs``, laid out as in the trace.

        The request is called as the module is: positional, by name or mixed, and defaults are filled in.

        Raises: UsageError: other arguments, shapes, dtypes or constants than those of the trace.
        """
        tensors, faults = self.bound_inputs(*args, **kwargs)
        specs = [self.specs[name] for name in self.graph.inputs]
        faults += differences(specs, tensors)
        if faults:
            raise UsageError(
                f"these inputs do not fit the trace of '{self.graph.name}': {'; '.join(faults)}. "
                "Shapes are fixed when a model is traced; trace it again for others."
            )
        return tuple(laid_out(tensor, spec) for tensor, spec in zip(tensors, specs, strict=True))

    def bound_inputs(self, *args: Any, **kwargs: Any) -> tuple[list[Any], list[str]]:
        """The values of a call for ``graph.inputs``, of any shapes, and a sentence for each other constant than in the trace.

        Raises: UsageError: other arguments than those of the trace.
        """
        if self.signature is not None:
            positional, by_name = self.in_spec.children()
            args, kwargs = bind(self.signature, positional.children(), by_name.context or (), args, kwargs)
        given = _leaves(self.in_spec, args, kwargs)
        faults = [
            f"{name} was {BRIEF.repr(leaf.value)} in the trace and is {BRIEF.repr(value)} now"
            for name, leaf, value in zip(leaf_places(self.in_spec, self.signature), self.in_leaves, given, strict=True)
            if isinstance(leaf, Fixed) and not (type(leaf.value) is type(value) and bool(leaf.value == value))
        ]
        return [value for leaf, value in zip(self.in_leaves, given, strict=True) if not isinstance(leaf, Fixed)], faults

    def unflatten_outputs(self, values: Sequence[torch.Tensor]) -> Any:
        """The return value of the model, made of the tensors of ``graph.outputs`` in their order."""
        named = dict(zip(self.graph.outputs, values, strict=True))
        leaves = [leaf.value if isinstance(leaf, Fixed) else named[leaf] for leaf in self.out_leaves]
        return pytree.tree_unflatten(leaves, self.out_spec)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The unsplit model under inference_mode: the reference for every split of it."""
        inputs = self.flatten_inputs(*args, **kwargs)
        with torch.inference_mode():
            return self.unflatten_outputs(self.program(*inputs))

    def __repr__(self) -> str:
        return f"Traced({self.graph!r}{''.join(f', note: {note}' for note in self.notes)})"

    def _repr_html_(self) -> str:
        return self.graph._repr_html_()


def trace(model: Model, *, num_draws: int = NUM_DRAWS) -> Traced:
    """Trace a model to one flat graph for the shapes of its example inputs.

    Args:
        model: in eval mode.
        num_draws: inputs on which the graph is compared with the model, the example ones first. With 0 nothing is computed.
    Raises: TraceError: the model cannot be captured (a branch on data, a cache object), or not in a form that may be cut
        (changed buffers, random numbers), or the graph computes something else than the model.

    >>> from autosplit.tracing.loading import load_model
    >>> trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=8")).graph.outputs
    ('linear_1',)
    """
    args, kwargs = own_storage((tuple(model.args), dict(model.kwargs)))  # torch.export takes one tensor given twice as one input
    model = replace(model, args=args, kwargs=kwargs)
    try:
        exported = export(model)
    except TraceError as failure:
        with architectures.without_caches(model.module) as num_caches:
            if model.source.spec or not num_caches or "Cache" not in str(failure):
                raise
            found = trace(model, num_draws=num_draws)
        return replace(found, notes=(*found.notes, WITHOUT_CACHE))
    traced = flattened(model, exported, num_draws)
    return replace(traced, notes=(*traced.notes, *frozen_dimensions(model.module, traced.example_inputs)))


def flattened(model: Model, exported: ExportedProgram, num_draws: int) -> Traced:
    """The trace of a decomposed static export; errors as for ``trace``."""
    if not any(map(flattening.sorts_integers, exported.graph.nodes)):
        return traced_of(model, exported, flattening.flatten(model.name, exported), num_draws)
    try:
        return traced_of(model, exported, flattening.flatten(model.name, exported, stable_sort=True), num_draws)
    except TraceError:  # the order of equal integers shows in the outputs
        return traced_of(model, exported, flattening.flatten(model.name, exported), num_draws)


def traced_of(model: Model, exported: ExportedProgram, flat: flattening.Flat, num_draws: int) -> Traced:
    """Run the flat program once for its layouts, and compare it with the model; ``exported`` says only how it is called.

    With 0 ``num_draws`` the layouts are those of fake tensors.
    """
    if not any(map(flattening.is_op, flat.program.graph.nodes)):
        raise TraceError(f"model '{model.name}' cannot be traced: it returns no tensor. Return what it computes.")
    in_spec, out_spec = exported.call_spec.in_spec, exported.call_spec.out_spec
    given = _leaves(in_spec, model.args, model.kwargs)
    example_inputs = tuple(value for leaf, value in zip(flat.in_leaves, given, strict=True) if not isinstance(leaf, Fixed))
    notes = model.notes
    try:
        outputs, specs = observed(flat.program, example_inputs, computed=num_draws > 0 and WITHOUT_WEIGHTS not in notes)
        graph = graph_of(model.name, flat.program, specs)
        traced = Traced(
            graph, flat.program, in_spec, out_spec, example_inputs, specs, flat.in_leaves, flat.out_leaves, model.source,
            signature=signature_of(model.module), copied=flat.copied,
            unread=tuple(name for name in _state_names(model.module) if name not in graph.weights),
        )  # fmt: skip
        absent = devicecopies.absent_kinds(flat.copied)
        if absent and num_draws:
            notes = (*notes, f"the model copies to {', '.join(absent)}, which torch does not see here: it was not compared")
        if absent or WITHOUT_WEIGHTS in notes or not num_draws:
            return replace(traced, notes=notes)
        found = model.module
        module = flattening.move_reserved(found).module() if isinstance(found, ExportedProgram) else found
        found_outputs = traced.unflatten_outputs(outputs)
        error, said = verify(model.name, module, traced.run, model.args, model.kwargs, found_outputs, num_draws)
    except TraceError:
        raise
    except Exception as failure:
        if is_interrupt(failure):
            raise KeyboardInterrupt from None
        raise _fails_itself(model, (_own_failure(model) if num_draws else None) or failure) from failure
    return replace(traced, module_error=error, notes=(*notes, *said))


def _state_names(found: torch.nn.Module | ExportedProgram) -> list[str]:
    """The names in a model's state dict; a module may have hooks that make a state dict costly."""
    if isinstance(found, ExportedProgram):
        return list(found.state_dict)
    named = (*found.named_parameters(remove_duplicate=False), *found.named_buffers(remove_duplicate=False))
    return [name for name, _ in named]


def export(model: Model, dynamic: Any = None) -> ExportedProgram:
    """The decomposed export, with static shapes, or dynamic ones (a ``ShapesCollection``). Raises: TraceError: none exists."""
    found = model.module
    if hidden := _hidden_part(found):
        raise TraceError(
            f"model '{model.name}' cannot be traced: {hidden} is compiled by torch.jit, or holds weights packed by quantization, "
            "and no graph can be made of that. Give the model as it was before."
        )
    try:
        with torch.no_grad(), _quiet():
            if isinstance(found, ExportedProgram):
                found = flattening.move_reserved(found)
                found = found if dynamic is not None or is_static(found) else found.module()
            if not isinstance(found, ExportedProgram):
                args, kwargs = model.args, dict(model.kwargs)
                shapes = None if dynamic is None else dynamic.dynamic_shapes(found, args, kwargs)
                found = flattening.move_reserved(torch.export.export(found, args, kwargs, dynamic_shapes=shapes, strict=False))
            with kept_kernels():
                functional: ExportedProgram = found.run_decompositions({})
            return functional
    except Exception as failure:
        if is_interrupt(failure):
            raise KeyboardInterrupt from None
        if model.way_out and (own := _own_failure(model)):
            raise _fails_itself(model, own) from own
        others = f". It may be with others, such as an attention_mask. {model.way_out}" if model.way_out else ""
        made_up = " with the inputs made up for it" if model.way_out else ""
        reason = _reason(failure).rstrip(".") if others else _reason(failure)
        raise TraceError(f"model '{model.name}' cannot be traced{made_up}: {reason}{others}") from failure


def _own_failure(model: Model) -> Exception | None:
    """The exception that the module itself raises on its example inputs: if there is one, tracing is not the cause."""
    try:
        with torch.inference_mode(), _quiet():
            model.module(*model.args, **model.kwargs)
    except Exception as failure:
        return failure
    return None


def _fails_itself(model: Model, failure: Exception) -> TraceError:
    inputs = "the inputs made up for it" if model.way_out else "its example inputs"
    return TraceError(f"model '{model.name}' fails on {inputs}: {_reason(failure)}{'. ' * bool(model.way_out)}{model.way_out}")


def _hidden_part(found: torch.nn.Module | ExportedProgram) -> str:
    """The first module that torch.export cannot look into, by path and class, or ''."""
    for path, part in found.named_modules() if isinstance(found, torch.nn.Module) else ():
        if isinstance(part, torch.jit.ScriptModule) or any(isinstance(held, torch.ScriptObject) for held in vars(part).values()):
            return f"module '{path}' ({type(part).__name__})" if path else f"the {type(part).__name__}"
    return ""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Torch prints partial graphs and hints when an export fails; the TraceError has the essentials."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _reason(failure: Exception) -> str:
    """The fault, its line in the user's code, and the way out."""
    # Loaded here because it brings sympy: 0.9 s for every worker, which reads stages but traces nothing.
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    text = textwrap.shorten(str(failure).strip().split("\n")[0], 300, placeholder=" …")
    place = _user_place(failure)
    if isinstance(failure, GuardOnDataDependentSymNode):
        return (
            f"the branch or loop at {place or 'an unknown line'} depends on the values in a tensor. "
            "Compute both sides and choose with torch.where, or move the decision out of the model."
        )
    if "mutation on a view chain" in text or "mutated that has internal overlap" in text:
        return (
            f"{place or 'an unknown line'} writes through as_strided, or through a view whose elements share memory. "
            "Write to a copy, x.clone(), or compute a new tensor."
        )
    if "FakeTensor" in text and any(frame.filename == rnn.__file__ for frame in traceback.extract_tb(failure.__traceback__)):
        return (
            f"the recurrent layer at {place} takes a packed sequence, whose sizes depend on values. "
            "Give it the padded tensor, and take the outputs at the lengths afterwards."
        )
    if "Cache" in text or "not a known type" in text:
        return (
            f"{text.split('. ')[0]}. A graph takes and returns tensors in lists, tuples, dicts and registered classes only. "
            "If it is a cache, turn it off: '?use_cache=false', or config.use_cache = False."
        )
    return f"{type(failure).__name__}{f' at {place}' if place else ''}: {text}"


def _user_place(failure: BaseException) -> str:
    """The innermost line of the failure outside torch, its callees and autosplit, as 'file:line: code'.

    A pass over the exported graph raises far from the user's line, and writes that into its text.
    """
    own = (str(Path(torch.__file__).parent), __file__, inspect.__file__, contextlib.__file__, "<")
    frames = [frame for frame in traceback.extract_tb(failure.__traceback__) if not frame.filename.startswith(own)]
    if frames:
        return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}"
    passed = [found for found in TRACED_LINE.findall(str(failure)) if not found[0].startswith(own)]
    return "{}:{}: {}".format(*passed[-1]) if passed else ""


def graph_of(name: str, program: fx.GraphModule, specs: Mapping[str, TensorSpec]) -> Graph:
    """The torch-free graph of a flat program."""
    weights = {target: _weight(target, program) for target in weight_names(program.graph)}
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    return Graph(
        name=name,
        inputs=tuple(node.name for node in program.graph.nodes if node.op == "placeholder"),
        outputs=tuple(node.name for node in output.args[0]),
        ops=tuple(_op(node, specs, program) for node in filter(flattening.is_op, program.graph.nodes)),
        values={name: Value(name, spec.shape, spec.dtype, spec.num_bytes) for name, spec in specs.items()},
        weights=weights,
    ).verify()


def _weight(target: str, program: fx.GraphModule) -> Value:
    tensor = weight(program, target)
    return Value(target, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)


def _op(node: fx.Node, specs: Mapping[str, TensorSpec], program: fx.GraphModule) -> Op:
    picks = sorted((user for user in node.users if flattening.is_pick(user)), key=flattening.pick_index)
    return Op(
        name=node.name,
        operator=str(node.target),
        module=_module_path(node),
        inputs=tuple(source.name for source in node.all_input_nodes if source.op != "get_attr"),
        outputs=(node.name,) if node.name in specs else tuple(pick.name for pick in picks),
        weights=tuple(str(source.target) for source in node.all_input_nodes if source.op == "get_attr"),
        signature=_signature(node, specs, program),
    )


def _module_path(node: fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return re.sub(r"^L\['self'\]\.?", "", str(stack[-1][0])) if stack else ""


def _signature(node: fx.Node, specs: Mapping[str, TensorSpec], program: fx.GraphModule) -> str:
    """Operator and arguments, tensors by dtype, shape and (where not dense) strides, weights marked: the work, not the place.

    For example ``aten.linear.default(float32[1,8], weight float32[8,8], weight float32[8])``.
    """

    def text(value: Any) -> str:
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return "weight " + layout(spec_of("", weight(program, str(value.target))))
            return layout(specs[value.name])
        if isinstance(value, list | tuple):
            return "[" + ", ".join(text(item) for item in value) + "]"
        return repr(value)

    arguments = [text(value) for value in node.args] + [f"{name}={text(value)}" for name, value in node.kwargs.items()]
    return f"{node.target}({', '.join(arguments)})"


def _leaves(spec: pytree.TreeSpec, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of the arguments in the order of the trace. Raises: UsageError: another structure."""
    names = list(spec.child(1).context or [])
    ordered = {name: kwargs[name] for name in names if name in kwargs} | {k: v for k, v in kwargs.items() if k not in names}
    leaves, found = pytree.tree_flatten((tuple(args), ordered))
    if found != spec:
        raise UsageError(
            f"the trace takes {spec.child(0).num_children} positional arguments and by name [{', '.join(names)}]; "
            f"given are {len(args)} and [{', '.join(kwargs)}], or the containers differ"
        )
    return leaves

"""One op of a model alone: on small tensors of its ranks, dtypes and layouts, with its own attributes, so that it can be tried.

Sizes are renamed in the order of their appearance, so that the same operator of two models is one case; sizes 0 and 1 stay. Ops
that only move values keep the sizes of the model, which their attributes depend on, but count as one case for all sizes. Ops of
other packages keep them too.
"""

import contextlib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autosplit.backends.hardvalues import draw
from autosplit.backends.ports import port
from autosplit.tracing.flattening import is_pick, pick_index
from autosplit.tracing.indexlimits import base_name, divisor, index_limits
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import TensorSpec, laid_out, spec_of
from autosplit.tracing.valueranges import MOVING

SIZES = (18, 19, 5, 6, 7, 8, 9, 10)
"""Small sizes that stand for the sizes of a model. The first two are longer than a vector register of 16 floats, and not a
multiple of it, so that both the vector code and the rest of a loop run."""

LEAST_SIZE = 5
"""A smaller number among the arguments may be a dimension, a kernel or a stride, and stays."""


@dataclass(frozen=True, eq=False)
class Case:
    """One op to be tried: its key, its node in the model, and the small sizes that stand for the model's."""

    key: str
    node: fx.Node
    renamed: Mapping[int, int]

    def arguments(self) -> dict[fx.Node, torch.Tensor]:
        """The tensors in place of its arguments, made anew: those of a model's cases together are as large as its weights."""
        return {source: _standing_for(source, self.renamed, source is divisor(self.node)) for source in self.node.all_input_nodes}


def case_of(node: fx.Node) -> Case | None:
    """The case of an op whose arguments carry their shapes and dtypes in ``meta["val"]``; None if it cannot run alone."""
    sources = node.all_input_nodes
    own = base_name(node) in MOVING or getattr(node.target, "namespace", "aten") != "aten"
    attempts = [{}] if own else [_renamed(sources, 2), _renamed(sources, LEAST_SIZE), {}]
    for renamed in attempts:
        with contextlib.suppress(Exception), torch.no_grad():
            found = Case(_key(node, renamed), node, renamed)
            call(node, found.arguments(), renamed)
            return found
    return None


def _renamed(sources: Sequence[fx.Node], least: int) -> dict[int, int]:
    """Size in the model to the small size that stands for it."""
    sizes = dict.fromkeys(size for source in sources for size in source.meta["val"].shape if size >= least)
    return dict(zip(sizes, SIZES, strict=False))


def _standing_for(source: fx.Node, renamed: Mapping[int, int], is_divisor: bool) -> torch.Tensor:
    """Zeros without gaps, ones for a divisor, whose dimensions lie in memory in the order of the model's value."""
    value, order = source.meta["val"], _order(source)
    shape = [renamed.get(value.shape[dim], value.shape[dim]) for dim in order]
    dense = (torch.ones if is_divisor else torch.zeros)(shape, dtype=value.dtype)
    return dense.permute([order.index(dim) for dim in range(len(order))])


def _order(source: fx.Node) -> tuple[int, ...]:
    """The dimensions of a value from the largest stride to the smallest."""
    value = source.meta["val"]
    return port(TensorSpec(source.name, tuple(value.shape), tuple(value.stride()), "float32")).order


def call(node: fx.Node, arguments: Mapping[fx.Node, torch.Tensor], renamed: Mapping[int, int]) -> Any:
    """Run an op on these tensors in place of its arguments."""
    target: Callable[..., Any] = node.target  # type: ignore[assignment]
    args, kwargs = (fx.map_arg(part, arguments.__getitem__) for part in _resized((node.args, node.kwargs), renamed))
    return target(*args, **kwargs)


def _resized(args: Any, renamed: Mapping[int, int]) -> Any:
    """The arguments of an op with its sizes renamed."""
    if isinstance(args, list | tuple):
        return type(args)(_resized(item, renamed) for item in args)
    if isinstance(args, dict):
        return {name: _resized(item, renamed) for name, item in args.items()}
    return renamed.get(args, args) if isinstance(args, int) and args >= LEAST_SIZE else args


def _key(node: fx.Node, renamed: Mapping[int, int]) -> str:
    """Operator, dtypes, shapes and layouts of the arguments, and attributes; without sizes if they are not renamed."""

    def named(source: fx.Node) -> str:
        value = source.meta["val"]
        sizes = [str(renamed.get(size, size) if renamed or size < 2 else "n") for size in value.shape]
        kind, order = "weight " if source.op == "get_attr" else "", _order(source)
        turned = "" if order == tuple(range(len(order))) else f" by {','.join(map(str, order))}"
        return f"{kind}{str(value.dtype).removeprefix('torch.')}[{','.join(sizes)}{turned}]"

    def told(item: Any) -> str:
        if isinstance(item, fx.Node):
            return named(item)
        if isinstance(item, list | tuple):
            return f"[{', '.join(map(told, item))}]"
        if isinstance(item, int) and not isinstance(item, bool) and not renamed and base_name(node) in MOVING:
            return "n"
        return str(item)

    args = [told(item) for item in _resized(node.args, renamed)]
    args += [f"{name}={told(item)}" for name, item in _resized(dict(node.kwargs), renamed).items()]
    text = f"{node.target}({', '.join(args)})"
    return re.sub(r"\[n(, n)*\]", "[n]", text)


def probe_program(cases: Sequence[Case]) -> StageProgram:
    """A stage that runs each case alone, on inputs of its own: op ``case0``, ``case1``, and so on."""
    graph, weights, inputs, outputs = fx.Graph(), {}, [], []
    copies: list[dict[fx.Node, fx.Node]] = [{} for _ in cases]
    given = [case.arguments() for case in cases]
    for number, (case, arguments) in enumerate(zip(cases, given, strict=True)):
        for place, (source, value) in enumerate(arguments.items()):
            name = f"input{number}_{place}"
            if source.op == "get_attr":
                limits = index_limits(case.node, lambda one, held=arguments: held[one].shape).get(source)  # type: ignore[misc]
                drawn = draw(value.shape, value.dtype, "finite", 0, 3, limits)
                weights[name] = laid_out(drawn, replace(spec_of(name, value), offset_bytes=0))
                copies[number][source] = graph.get_attr(name)
            else:
                copies[number][source] = graph.create_node("placeholder", name, name=name)
                inputs.append(replace(spec_of(name, value), offset_bytes=0))
    for number, (case, arguments) in enumerate(zip(cases, given, strict=True)):
        args, kwargs = fx.map_arg(_resized((case.node.args, dict(case.node.kwargs)), case.renamed), copies[number].__getitem__)
        made = graph.create_node("call_function", case.node.target, args, kwargs, name=f"case{number}")
        with torch.no_grad():
            result = call(case.node, arguments, case.renamed)
        for place, value in enumerate(result if isinstance(result, list | tuple) else [result]):
            picked = any(is_pick(user) and pick_index(user) == place for user in case.node.users)
            if isinstance(result, torch.Tensor):
                outputs.append((made, value))
            elif picked:
                pick = graph.create_node("call_function", operator.getitem, (made, place), name=f"case{number}_{place}")
                outputs.append((pick, value))
    graph.output(tuple(node for node, _ in outputs))
    specs = tuple(replace(spec_of(node.name, value), offset_bytes=0) for node, value in outputs)
    return StageProgram("probe", fx.GraphModule(weights, graph, class_name="Probe"), tuple(inputs), specs)

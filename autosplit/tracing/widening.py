"""The right values of a program with bf16 or f16 tensors: its ops computed in f32 on the same weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autosplit.tracing.programs import Observer, computed_values, state_names, weight, weight_names
from autosplit.values.samples import Precision

SHORT: Mapping[torch.dtype, Precision] = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Dtypes whose rounding counts, the coarsest one first."""


def own_precision(program: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> Precision:
    """The coarsest of f32, f16 and bf16 among inputs, weights, casts and made tensors of a program; f32 counts for all others."""
    found = {tensor.dtype for tensor in (*inputs, *(weight(program, name) for name in weight_names(program.graph)))}
    for node in program.graph.nodes:
        map_aggregate((node.args, node.kwargs), lambda leaf: found.add(leaf) if isinstance(leaf, torch.dtype) else None)
    return next((precision for dtype, precision in SHORT.items() if dtype in found), "f32")


def in_f32(program: fx.GraphModule, inputs: Sequence[torch.Tensor], own: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The outputs of a program computed in f32, rounded once to the dtypes of ``own``, its own outputs.

    They are ``own`` where an op takes no f32.
    """
    try:
        with torch.inference_mode():
            found = Wide(program).run(*inputs)
    except Exception:  # a custom operator, or one that reads bits
        return list(own)
    return [wide.to(value.dtype) for wide, value in zip(found, own, strict=True)]


def values_in_f32(program: fx.GraphModule, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every value of a pass in f32; of the program's own dtypes where an op takes no f32."""
    try:
        return computed_values(program, inputs, observer=Wide)
    except Exception:
        return computed_values(program, inputs)


class Wide(Observer):
    """Runs a program with f32 in place of bf16 and f16, a weight at a time. It writes to copies of states."""

    def __init__(self, program: fx.GraphModule, see: Callable[[fx.Node, Any], None] = lambda node, value: None) -> None:
        super().__init__(program, see)
        self._states: dict[Any, Any] = dict.fromkeys(state_names(program.graph))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an operator; an argument that names a short dtype names f32, and so do its results."""
        return map_aggregate(super().call_function(target, *map_aggregate((args, kwargs), _widened)), _widened)

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An input."""
        return _widened(super().placeholder(target, args, kwargs))

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A weight, or the copy of a state."""
        if target not in self._states:
            return _widened(super().get_attr(target, args, kwargs))
        if self._states[target] is None:
            self._states[target] = _widened(super().get_attr(target, args, kwargs).clone())
        return self._states[target]


def _widened(leaf: Any) -> Any:
    """A short tensor in f32, f32 in place of a short dtype, and all else as it is."""
    if isinstance(leaf, torch.Tensor):
        return leaf.float() if leaf.dtype in SHORT else leaf
    return torch.float32 if isinstance(leaf, torch.dtype) and leaf in SHORT else leaf

"""The values of a graph whose zeros need the right sign, because an op makes another number of -0 than of 0.

A backward pass: from arguments of such ops to all values that may pass the sign on. The outputs of the model need no sign:
``torch.equal`` takes -0 and 0 as equal.
"""

from typing import Any

import torch
from torch import fx

from autosplit.tracing.indexlimits import base_name, divisor

OBSERVING = ("reciprocal", "rsqrt", "atan2", "signbit", "digamma", "complex", "view_as_complex")
"""Operators whose result differs for -0 and 0 in any argument, beside division, ``copysign``, powers and views of bits."""

WITHOUT = ("abs", "exp", "exp2", "cos", "cosh", "sigmoid", "softmax", "_softmax", "_safe_softmax", "erfc", "softplus", "norm")
"""Operators that make no -0, and the same of -0 as of 0."""


def observed_zeros(graph: fx.Graph) -> set[fx.Node]:
    """The nodes whose zeros must have the sign of eager's.

    >>> graph = fx.Graph()
    >>> x = graph.placeholder("x")
    >>> y = graph.call_function(torch.ops.aten.neg.default, (x,))
    >>> z = graph.call_function(torch.ops.aten.reciprocal.default, (y,))
    >>> [node.name for node in graph.nodes if node in observed_zeros(graph)]
    ['x', 'neg_default']
    """
    found: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node in found and _makes_none(node):
            found.remove(node)
        if node.op == "call_function":
            found |= {source for source in node.all_input_nodes if node in found or _observes(node, source)}
    return found


def _observes(node: fx.Node, source: fx.Node) -> bool:
    name, args = base_name(node), node.args
    if name == "pow":  # with a negative exponent
        return not (isinstance(args[1], int | float) and args[1] >= 0)
    if name == "copysign":
        return args[1] is source
    return divisor(node) is source or name in OBSERVING or (name == "view" and isinstance(args[1], torch.dtype))


def _makes_none(node: fx.Node) -> bool:
    """Whether an op makes no -0, and the same of -0 as of 0 in its arguments."""
    name, args = base_name(node), [*node.args, *node.kwargs.values()]
    value: Any = node.meta.get("val")
    if isinstance(value, torch.Tensor) and not (value.dtype.is_floating_point or value.dtype.is_complex):
        return True
    if name in ("add", "sub", "rsub"):
        return isinstance(args[1], int | float) and args[1] != 0
    if name in ("clamp", "clamp_min"):
        low: Any = node.kwargs.get("min", node.args[1] if len(node.args) > 1 else None)
        return isinstance(low, int | float) and low > 0
    return name in WITHOUT or (name == "pow" and isinstance(args[1], int | float) and args[1] % 2 == 0)

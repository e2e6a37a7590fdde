"""Translations of torch ops for ``torch.onnx.export``."""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autosplit.compat.torchparts import OpOverload, schema_of

GROUPED = ("aten::_grouped_mm", "transformers::grouped_mm_fallback")
"""Operators that multiply consecutive groups of rows, one for each expert of a mixture, with a matrix of their own."""


ATTENTION = torch.ops.aten.scaled_dot_product_attention.default


def translations(graph: fx.Graph) -> dict[Any, Callable[..., Any]]:
    """The translations of ops in a graph that torch.onnx lacks, and of attention, which it gets wrong for rows masked whole."""
    targets = {node.target for node in graph.nodes if isinstance(node.target, OpOverload)}
    grouped = {target: _grouped_mm for target in targets if schema_of(target).name in GROUPED}
    return grouped | ({ATTENTION: _attention} if ATTENTION in targets else {})


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """torch.onnx's attention, but 0 as in torch where a mask of booleans leaves nothing of a row; it gives a mean of all."""
    from onnxscript import opset18 as op
    from onnxscript.function_libs.torch_lib.ops.nn import aten_scaled_dot_product_attention as translated

    result = translated(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if attn_mask is None or attn_mask.dtype.name != "BOOL":
        return result
    some = op.ReduceMax(op.Cast(attn_mask, to=6), op.Constant(value_ints=[-1]), keepdims=1)
    return op.Where(op.Cast(some, to=9), result, op.CastLike(op.Constant(value_float=0.0), result))


def _grouped_mm(rows: Any, weight: Any, offs: Any, bias: Any = None, out_dtype: Any = None) -> Any:
    """Multiply the rows (S, K) of each group, which ends at ``offs`` (E,), with its matrix of ``weight`` (E, K, N)."""
    from onnxscript import opset18 as op

    if bias is not None or len(rows.shape) != 2 or len(weight.shape) != 3:
        raise NotImplementedError("grouped products have a translation for rows (S, K) and weights (E, K, N) without bias only")

    def at(tensor: Any, start: Any, end: Any) -> Any:
        return op.Slice(tensor, start, end, op.Constant(value_ints=[0]))

    def number(value: int) -> Any:
        return op.Constant(value_ints=[value])

    bounds = op.Concat(number(0), op.Cast(offs, to=7), axis=0)
    ends = [at(bounds, number(expert), number(expert + 1)) for expert in range(weight.shape[0] + 1)]
    products = [
        op.MatMul(at(rows, ends[k], ends[k + 1]), op.Squeeze(at(weight, number(k), number(k + 1)), number(0)))
        for k in range(weight.shape[0])
    ]
    return op.Concat(*products, axis=0)

"""Products of a few rows with a weight as it is stored: the operator ``autosplit::few_rows``, compiled.

Memory bounds such a product, because it computes little for each weight. One core of an AMD EPYC that ten processes shared read
the weights of Llamas of 25 and 100 M parameters so fast (GB/s of processor time, weights of 1.5 to 49 MB):

====  ============  ==============
rows  here          ONNX Runtime
====  ============  ==============
1     29 to 31      16 to 20
2     29 to 31      15 to 18
4     20 to 28      14 to 16
8     9 to 16       12 to 13
====  ============  ==============
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from autosplit.tracing.programs import PREPARED

Array = np.ndarray[Any, Any]

SHARE_BYTES = 2 << 20
"""Fewest bytes of a weight that a thread reads: it takes 70 us for them, and 30 to wake."""

_library: Any = torch.library  # its functions have no types
_operators = _library.Library("autosplit", "FRAGMENT")
_operators.define("few_rows(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor")
FEW_ROWS = torch.ops.autosplit.few_rows.default


def multiply(x: Array, weight: Array, bias: Array, found: Array, start: int, end: int) -> None:
    """Multiply rows with a part of a weight: columns ``start`` to ``end`` of ``found = x @ weight.T + bias``.

    Two rows of the weight that lie far apart are read at a time: with neighbours, whose bytes share a page, memory gives a third.
    Two or four rows of x go with them; the last one counts several times where there are fewer. Four rows in two pairs read 98 MB
    of weights at 21 GB/s in place of 28.

    Args:
        x: float32 ``[rows, size]``.
        weight: float32 ``[features, size]``.
        bias: float32 ``[features]``, or ``[0]`` for none.
        found: float32 ``[rows, features]``.
        start, end: the features.
    """
    half, last = (end - start + 1) // 2, len(x) - 1
    for n0 in range(start, start + half):
        n1 = min(n0 + half, end - 1)
        b0, b1 = (bias[n0], bias[n1]) if len(bias) else (np.float32(0), np.float32(0))
        for m0 in range(0, last + 1, 4):
            m1 = min(m0 + 1, last)
            s00 = s01 = s10 = s11 = s20 = s21 = s30 = s31 = np.float32(0)
            if m1 == last:
                for part in range(x.shape[1]):
                    w0, w1 = weight[n0, part], weight[n1, part]
                    s00 += x[m0, part] * w0
                    s01 += x[m0, part] * w1
                    s10 += x[m1, part] * w0
                    s11 += x[m1, part] * w1
            else:
                m2, m3 = m0 + 2, min(m0 + 3, last)
                for part in range(x.shape[1]):
                    w0, w1 = weight[n0, part], weight[n1, part]
                    s00 += x[m0, part] * w0
                    s01 += x[m0, part] * w1
                    s10 += x[m1, part] * w0
                    s11 += x[m1, part] * w1
                    s20 += x[m2, part] * w0
                    s21 += x[m2, part] * w1
                    s30 += x[m3, part] * w0
                    s31 += x[m3, part] * w1
                found[m2, n0], found[m2, n1], found[m3, n0], found[m3, n1] = s20 + b0, s21 + b1, s30 + b0, s31 + b1
            found[m0, n0], found[m0, n1], found[m1, n0], found[m1, n1] = s00 + b0, s01 + b1, s10 + b0, s11 + b1


@cache
def _compiled() -> Callable[..., None]:
    from autosplit.jit import summing  # loads numba

    return summing("void(f4[:,::1], f4[:,::1], f4[::1], f4[:,::1], i8, i8)")(multiply)


@cache
def _threads(number: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(number)


def prepare_few_rows(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, empty: Callable[..., torch.Tensor] = torch.empty
) -> tuple[torch.Tensor, Callable[[], object]]:
    """The memory of the answer, and a function that computes it from the contents of the arguments at its call.

    As many threads divide a large weight as torch has at the call.
    """
    features = len(weight)
    found = empty((*x.shape[:-1], features), dtype=x.dtype)
    tensors = x.view(-1, x.shape[-1]), weight, torch.empty(0) if bias is None else bias, found.view(-1, features)
    call = partial(_compiled(), *[tensor.detach().numpy() for tensor in tensors])
    most = max(1, weight.nbytes // SHARE_BYTES)

    def run() -> None:
        count = min(most, torch.get_num_threads())
        ends = [features * share // count for share in range(count + 1)]
        others = [_threads(count - 1).submit(call, *ends[share : share + 2]) for share in range(1, count)]
        call(*ends[:2])
        for one in others:
            one.result()

    return found, run


def few_rows(*arguments: Any) -> torch.Tensor:
    """The operator ``autosplit::few_rows``: ``aten.linear`` of dense float32."""
    found, run = prepare_few_rows(*arguments)
    run()
    return found


def _shaped(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """An empty answer of the operator."""
    return x.new_empty(*x.shape[:-1], len(weight))


_operators.impl("few_rows", few_rows, "CPU")
_library.register_fake("autosplit::few_rows", _shaped, lib=_operators)
PREPARED[FEW_ROWS] = prepare_few_rows

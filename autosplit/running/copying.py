"""Copy tensors into and out of rings: one ``memmove`` where layouts agree, and memory for answers that is used again.

A copy kernel of torch would split a copy of more than 32,768 elements among its threads, and in the host these threads wait on
the cores of the workers. New memory for each answer is slow too: glibc gets it from the kernel and gives it back, and the
first write to 600 KB of new memory takes ten times as long as copying 600 KB.
"""

import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch

from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec, extent_bytes, is_laid_out, storage_bytes

KEPT_BYTES = 64 << 20
"""The most memory that is kept for the answers of one value; larger answers get new memory each time."""

_TRIES = 2
"""Kept arrays to try before new memory is allocated: a caller may still hold some of them."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def copier(spec: TensorSpec) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A function that copies into a tensor of this spec another one, which has the shape and dtype of the spec."""
    num_bytes = _whole_bytes(spec)

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        if num_bytes and is_laid_out(source, spec, anywhere=True):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), num_bytes)
        else:
            with torch.no_grad():
                copy_into(target, source)

    return copy


def prepared_copy(spec: TensorSpec, target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
    """A call that copies between two tensors of the shape and dtype of a spec that stay where they are."""
    num_bytes = _whole_bytes(spec)
    if num_bytes and all(is_laid_out(one, spec, anywhere=True) for one in (target, source)):
        return partial(ctypes.memmove, target.data_ptr(), source.data_ptr(), num_bytes)
    return partial(copy_into, target, source)


def _whole_bytes(spec: TensorSpec) -> int:
    """The bytes of a tensor, or 0 where there are gaps between them, which may belong to other tensors."""
    return spec.num_bytes if extent_bytes(spec) == spec.num_bytes else 0


class CopyPool:
    """Private copies of tensors of one value, in memory that is used again once no caller holds the copy.

    Args:
        specs: the layout at the sizes of each variant. An array that is kept has room for each of them; the pages of it that no
            request wrote take no memory.
        max_kept: the most arrays to keep, within ``KEPT_BYTES``.
    """

    def __init__(self, specs: Sequence[TensorSpec], max_kept: int) -> None:
        self._specs, self._dtype = specs, specs[0].torch_dtype
        self._num_bytes = max(map(storage_bytes, specs))
        self._max_kept = min(max_kept, KEPT_BYTES // self._num_bytes) if self._num_bytes else 0
        self._kept: deque[tuple[Any, weakref.ref[Any]]] = deque()
        self._copiers = cache(lambda variant: copier(specs[variant]))
        self._views = cache(lambda variant: _view_of(specs[variant]))

    def copy(self, source: torch.Tensor, variant: int = 0) -> torch.Tensor:
        """A copy of ``source``, which has the shape and dtype of the variant's spec. Not for several threads at once."""
        tensor = self.empty(variant)
        self._copiers(variant)(tensor, source)
        return tensor

    def empty(self, variant: int = 0) -> torch.Tensor:
        """Memory for one tensor, with any contents. Not for several threads at once."""
        for _ in range(min(_TRIES, len(self._kept))):
            array, lent = self._kept[0]
            self._kept.rotate(-1)
            if lent() is None:
                self._kept.pop()
                return self._lend(array, variant)
        if len(self._kept) >= self._max_kept:
            return empty_like_spec(self._specs[variant])
        return self._lend(torch.empty(self._num_bytes, dtype=torch.uint8).numpy(), variant)

    def _lend(self, array: Any, variant: int) -> torch.Tensor:
        """Keep the array, and lend its memory as a tensor. The tensor and its views hold a NumPy view, which ends with them."""
        shape, dtype, offset_bytes, strides = self._views(variant)
        view = np.ndarray(shape, dtype, array, offset_bytes, strides)
        self._kept.append((array, weakref.ref(view)))
        tensor = torch.from_numpy(view)
        return tensor if tensor.dtype == self._dtype else tensor.view(self._dtype)


def _view_of(spec: TensorSpec) -> tuple[tuple[int, ...], Any, int, tuple[int, ...]]:
    """Shape, dtype, offset and strides in bytes of a NumPy array of this layout; integers stand for a dtype of torch alone."""
    dtype = spec.torch_dtype if spec.in_numpy else _INTEGERS[spec.torch_dtype.itemsize]
    return (
        spec.shape,
        torch.empty(0, dtype=dtype).numpy().dtype,
        spec.offset_bytes,
        tuple(dtype.itemsize * one for one in spec.stride),
    )

"""Copy tensors into and out of rings: one ``memmove`` where layouts agree, and memory for answers that is used again.

A copy kernel of torch would split a copy of more than 32,768 elements among its threads, and in the host these threads wait on
the cores of the workers. New memory for each answer is slow too: glibc gets it from the kernel and gives it back, and the
first write to 600 KB of new memory takes ten times as long as copying 600 KB.
"""

import ctypes
import weakref
from collections import deque
from typing import Any

import torch

from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec, extent_bytes, is_laid_out

KEPT_BYTES = 64 << 20
"""The most memory that is kept for the answers of one value; larger answers get new memory each time."""

_TRIES = 2
"""Kept arrays to try before new memory is allocated: a caller may still hold some of them."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copier:
    """Copies values into tensors of one spec."""

    __slots__ = ("_num_bytes", "_spec")

    def __init__(self, spec: TensorSpec) -> None:
        self._spec = spec
        self._num_bytes = spec.num_bytes if extent_bytes(spec) == spec.num_bytes else 0  # gaps may belong to other tensors

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source``, which has the spec's shape and dtype, into ``target``, which has its strides too."""
        if self._num_bytes and is_laid_out(source, self._spec, anywhere=True):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), self._num_bytes)
        else:
            with torch.no_grad():
                copy_into(target, source)


class CopyPool:
    """Private copies of tensors of one spec, in memory that is used again once no caller holds the copy.

    Args:
        spec: the tensors' layout.
        max_kept: the most arrays to keep, within ``KEPT_BYTES``.
    """

    def __init__(self, spec: TensorSpec, max_kept: int) -> None:
        self._spec = spec
        self._dtype = spec.torch_dtype
        self._copier = Copier(spec)
        num_bytes = extent_bytes(spec)
        self._max_kept = min(max_kept, KEPT_BYTES // num_bytes) if num_bytes else 0
        self._kept: deque[tuple[Any, weakref.ref[Any]]] = deque()

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of ``source``, which has the spec's shape and dtype. Not for several threads at once."""
        tensor = self.empty()
        self._copier.copy(tensor, source)
        return tensor

    def empty(self) -> torch.Tensor:
        """Memory for one tensor, with any contents. Not for several threads at once."""
        for _ in range(min(_TRIES, len(self._kept))):
            array, lent = self._kept[0]
            self._kept.rotate(-1)
            if lent() is None:
                self._kept.pop()
                return self._lend(array)
        tensor = empty_like_spec(self._spec)
        if len(self._kept) >= self._max_kept:
            return tensor
        return self._lend(_array(tensor))

    def _lend(self, array: Any) -> torch.Tensor:
        """Keep the array, and lend its memory as a tensor. The tensor and its views hold a NumPy view, which ends with them."""
        view = array.view()
        self._kept.append((array, weakref.ref(view)))
        tensor = torch.from_numpy(view)
        return tensor if tensor.dtype == self._dtype else tensor.view(self._dtype)


def _array(tensor: torch.Tensor) -> Any:
    """The tensor as a NumPy array, as integers if NumPy does not have its dtype."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.itemsize]).numpy()

"""CopyPool between places of memory that stay: one ``memmove`` where two tensors lie alike, and answers in memory used again.

A kernel of torch would do, but it shares a copy of more than 32,768 elements among its threads, and in the host these
threads wait on the cores of the workers. New memory for each answer is as bad: glibc takes it from the kernel and gives it
back, and touching 600 KB for the first time takes ten times as long as copying it.
"""

import ctypes
import sys
from collections import deque
from typing import Any

import torch

from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec, extent_bytes

KEPT_BYTES = 64 << 20
"""The most memory that is kept for the answers of one value; larger answers are allocated anew each time."""

_LOOKS = 2
"""How many kept pieces are looked at before memory is allocated: a caller may hold on to some of them."""

_HELD_BY_NOBODY = 3
"""References to a kept array during the look: in the deque, in a variable, and as the argument."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Copier:
    """CopyPool values into tensors of one spec."""

    __slots__ = ("_num_bytes", "_stride")

    def __init__(self, spec: TensorSpec) -> None:
        self._stride = spec.stride
        # Gaps may belong to others, and a lazily conjugated tensor does not lie in memory as it reads.
        moves = extent_bytes(spec) == spec.num_bytes and not spec.torch_dtype.is_complex
        self._num_bytes = spec.num_bytes if moves else -1

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Write the values of ``source`` to ``target``, which lies as the spec says; ``source`` has its shape and dtype."""
        if (
            source.nbytes == self._num_bytes
            and source.stride() == self._stride
            and source.__class__ is torch.Tensor
            and source.is_cpu
            and not source.is_neg()
        ):
            ctypes.memmove(target.data_ptr(), source.data_ptr(), self._num_bytes)
        else:
            with torch.no_grad():
                copy_into(target, source)


class CopyPool:
    """Private copies of tensors of one spec, in memory that is used again once nobody holds the copy any more.

    Args:
        spec: the tensors' layout.
        max_kept: how many pieces of memory are kept at most, within ``KEPT_BYTES``.
    """

    def __init__(self, spec: TensorSpec, max_kept: int) -> None:
        self._spec = spec
        self._dtype = spec.torch_dtype
        self._copier = Copier(spec)
        num_bytes = extent_bytes(spec)
        self._max_kept = min(max_kept, KEPT_BYTES // num_bytes) if num_bytes else 0
        self._kept: deque[Any] = deque()

    def __len__(self) -> int:
        """Pieces of memory that are kept."""
        return len(self._kept)

    def copy(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of ``source``, which has the spec's shape and dtype; not for several threads at once."""
        tensor = self._tensor()
        self._copier.copy(tensor, source)
        return tensor

    def _tensor(self) -> torch.Tensor:
        for _ in range(min(_LOOKS, len(self._kept))):
            array = self._kept[0]
            self._kept.rotate(-1)
            if sys.getrefcount(array) == _HELD_BY_NOBODY:
                return self._lend(array)
        tensor = empty_like_spec(self._spec)
        if len(self._kept) >= self._max_kept:
            return tensor
        self._kept.append(_array(tensor))
        return self._lend(self._kept[-1])

    def _lend(self, array: Any) -> torch.Tensor:
        """A tensor over the array: it, and every view of it, hold a reference to the array."""
        tensor = torch.from_numpy(array)
        return tensor if tensor.dtype == self._dtype else tensor.view(self._dtype)


def _array(tensor: torch.Tensor) -> Any:
    """The tensor as a NumPy array; of integers if NumPy does not know its dtype."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.itemsize]).numpy()

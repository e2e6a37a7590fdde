"""Hand tensors with any strides to runtimes that know dense tensors only.

A tensor whose strides are a permutation of a dense tensor's (channels_last, transposed) is that tensor seen through ``permute``.
The exported stage holds these permutes, and the runtime cancels them against its own transposes: nothing is copied at run time.
"""

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec


@dataclass(frozen=True, slots=True)
class Port:
    """The way to hand one value of a stage to a runtime as a dense tensor.

    ``order`` lists the dimensions from the largest stride to the smallest, repeated ones first, so that ``value.permute(order)``
    is dense, of shape ``dense_shape``. ``natural`` says that this is the order of the shape. ``copied`` says that no permutation
    is dense (the tensor is expanded, or has gaps): then the value is copied in this order, which allows every traced ``view``.
    """

    spec: TensorSpec
    order: tuple[int, ...]
    dense_shape: tuple[int, ...]
    natural: bool
    copied: bool

    @property
    def name(self) -> str:
        """The value's name."""
        return self.spec.name

    @property
    def dtype(self) -> torch.dtype:
        """The value's dtype."""
        return self.spec.torch_dtype

    @property
    def inverse(self) -> tuple[int, ...]:
        """The permutation that undoes ``order``."""
        return tuple(self.order.index(position) for position in range(len(self.order)))

    def dense(self, value: torch.Tensor) -> torch.Tensor:
        """The dense tensor for the runtime: a view if the value has the spec's strides, else a copy."""
        return value.contiguous() if self.natural else value.permute(self.order).contiguous()

    def restore(self, value: torch.Tensor, copy: torch.Tensor | None = None) -> torch.Tensor:
        """The value with the spec's strides from a dense tensor: a view, or where it is ``copied`` a copy, in given memory."""
        if self.copied:
            copy = empty_like_spec(self.spec) if copy is None else copy
            copy_into(copy, value if self.natural else value.permute(self.inverse))
            return copy
        return value if self.natural else value.as_strided(self.spec.shape, self.spec.stride)


class BoundMemory:
    """Memory that a runtime reads or writes in place: its own, bound once, or for each request that of a large tensor.

    Args:
        bind: lets the runtime read or write the memory of a dense tensor.
        memory: a tensor with the shape, dtype and device of the input or output.
        most_bytes: largest tensor that is copied; binding takes longer than copying a small one.
    """

    def __init__(self, bind: Callable[[torch.Tensor], None], memory: torch.Tensor, most_bytes: int) -> None:
        self.memory, self._bind = memory, bind
        self._expected = memory.dtype, memory.shape, memory.device.type
        self._num_bytes, self._address = memory.nbytes, memory.data_ptr()
        self._stays = memory.is_cpu and self._num_bytes <= most_bytes
        if self._stays:
            bind(memory)

    def read(self, value: torch.Tensor) -> None:
        """Let the runtime read a dense value. Raises: ValueError: its dtype, shape or device differs."""
        if (value.dtype, value.shape, value.device.type) != self._expected:  # its address is read as far as the shape says
            dtype, shape, device = self._expected
            found = f"{value.dtype} {list(value.shape)} on {value.device.type}"
            raise ValueError(f"an input is {found}, and {dtype} {list(shape)} on {device} is expected")
        if self._stays:
            ctypes.memmove(self._address, value.data_ptr(), self._num_bytes)
        else:
            self.memory = value
            self._bind(value)

    def renew(self) -> None:
        """Let the runtime write to new memory if there is none that stays."""
        if not self._stays:
            self.memory = torch.empty_like(self.memory)
            self._bind(self.memory)

    def own(self) -> torch.Tensor:
        """The value in memory that no later request changes."""
        return self.memory.clone() if self._stays else self.memory


def port(spec: TensorSpec) -> Port:
    """The port for a spec. Dimensions of size 1 may have any stride in a dense tensor.

    >>> port(TensorSpec("image", (2, 3, 4, 5), (60, 1, 15, 3), "float32")).order
    (0, 2, 3, 1)
    """
    shape, stride = tuple(spec.shape), tuple(spec.stride)
    natural = tuple(range(len(shape)))
    by_stride = tuple(sorted(natural, key=lambda dim: (stride[dim] > 0, -stride[dim], dim)))
    dense = [order for order in (natural, by_stride) if 0 in shape or _steps(order, shape, stride) == _dense_steps(order, shape)]
    order = dense[0] if dense else by_stride
    return Port(spec, order, tuple(shape[dim] for dim in order), order == natural, copied=not dense)


def _steps(order: Sequence[int], shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    """The strides in this order, without dimensions of size 1."""
    return [stride[dim] for dim in order if shape[dim] != 1]


def _dense_steps(order: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The strides of a dense tensor with this order of dimensions, without dimensions of size 1."""
    steps, step = [], 1
    for dim in reversed(order):
        if shape[dim] != 1:
            steps.append(step)
        step *= shape[dim]
    return steps[::-1]


class DenseStage(torch.nn.Module):
    """A stage that takes and returns the dense tensors of its ports."""

    def __init__(self, stage: torch.nn.Module, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
        super().__init__()
        self.stage = stage
        self.inverses = [None if source.natural else source.inverse for source in inputs]
        self.orders = [None if target.natural else target.order for target in outputs]

    def forward(self, *values: torch.Tensor) -> tuple[Any, ...]:
        """Permute, run the stage, permute."""
        outputs = self.stage(*map(_permuted, values, self.inverses))
        return tuple(map(_permuted, outputs, self.orders))


def _permuted(value: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """Permute the dimensions; with None a converter writes no node."""
    return value if order is None else value.permute(*order)

"""Tensors keep their strides across a cut, and other runtimes know dense tensors only: views bridge the two.

A tensor whose strides are a permutation of a dense tensor's (channels_last, a transposed one) is that dense tensor seen
through ``permute``. The stage is exported with these permutes inside, where the runtime's optimiser cancels them against
its own transposes, and at run time nothing is copied.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autosplit.tracing.tensorspec import TensorSpec, copy_into, empty_like_spec


@dataclass(frozen=True, slots=True)
class Port:
    """How one value of a stage is handed to a runtime as a dense tensor.

    ``order`` lists the dimensions from the largest stride to the smallest, so ``value.permute(order)`` is dense, of shape
    ``dense_shape``. ``natural`` is True where the order is that of the shape. ``copied`` is True where no permutation makes
    the spec's strides dense (an expanded tensor, or one with gaps): there the value is copied, in the order of its strides too,
    so that every ``view`` that a stage was traced with can be had of the copy. Repeated dimensions come first.
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
        """The value as the runtime reads it: a view where its strides are the spec's, else a copy."""
        return value.contiguous() if self.natural else value.permute(self.order).contiguous()

    def restore(self, value: torch.Tensor) -> torch.Tensor:
        """The dense tensor with the spec's shape and strides: a view, or a copy where ``copied``."""
        if self.copied:
            copy = empty_like_spec(self.spec)
            copy_into(copy, value if self.natural else value.permute(self.inverse))
            return copy
        return value if self.natural else value.as_strided(self.spec.shape, self.spec.stride)


def port(spec: TensorSpec) -> Port:
    """How the value of this spec is handed over. A dimension of size 1 has no say in what is dense.

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
    """The strides in this order, without the dimensions of size 1."""
    return [stride[dim] for dim in order if shape[dim] != 1]


def _dense_steps(order: Sequence[int], shape: Sequence[int]) -> list[int]:
    """The strides that a dense tensor of this order has, without the dimensions of size 1."""
    steps, step = [], 1
    for dim in reversed(order):
        if shape[dim] != 1:
            steps.append(step)
        step *= shape[dim]
    return steps[::-1]


class DenseStage(torch.nn.Module):
    """A stage whose inputs and outputs are the dense tensors of its ports."""

    def __init__(self, stage: torch.nn.Module, inputs: Sequence[Port], outputs: Sequence[Port]) -> None:
        super().__init__()
        self.stage = stage
        self.inverses = [None if source.natural else source.inverse for source in inputs]
        self.orders = [None if target.natural else target.order for target in outputs]

    def forward(self, *values: torch.Tensor) -> tuple[Any, ...]:
        """Permute, run the stage, permute."""
        outputs = self.stage(*map(_permuted, values, self.inverses))
        return tuple(map(_permuted, outputs, self.orders))


class LogicalStage(torch.nn.Module):
    """A stage whose inputs and outputs are dense in the order of their shapes, for callers that know no strides.

    Inside, each input gets the strides of its port, as a traced ``view`` may need them.
    """

    def __init__(self, stage: torch.nn.Module, inputs: Sequence[Port]) -> None:
        super().__init__()
        self.stage = stage
        self.orders = [None if source.natural else (source.order, source.inverse) for source in inputs]

    def forward(self, *values: torch.Tensor) -> Any:
        """Lay the inputs out, run the stage."""
        pairs = zip(values, self.orders, strict=True)
        return self.stage(*[value.permute(p[0]).contiguous().permute(p[1]) if p else value for value, p in pairs])


def _permuted(value: torch.Tensor, order: tuple[int, ...] | None) -> torch.Tensor:
    """The dimensions in another order; None leaves them, so that a converter writes no node for it."""
    return value if order is None else value.permute(*order)

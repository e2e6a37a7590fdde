"""The error of one tensor, or of all outputs of a stage, against the expected values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autosplit.errors import BackendError


@dataclass(frozen=True, slots=True)
class NumericalError:
    """The largest error over several outputs, as ``difference`` defines it; ``output`` is the one with the relative error."""

    absolute: float
    relative: float
    output: str


def difference(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Absolute and relative error of ``found``, which has the shape and dtype of ``expected``.

    For floating point and complex numbers the absolute error is the largest difference, and the relative one is that divided by
    the largest magnitude in ``expected``. A NaN or an infinity must stand in the same place in both tensors, else both errors
    are infinite. For integers and booleans both errors are the share of elements that differ.

    >>> difference(torch.tensor([1.0, math.inf]), torch.tensor([4.0, math.inf]))
    (3.0, 0.75)
    """
    if expected.numel() == 0:
        return 0.0, 0.0
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        share = float((found != expected).double().mean())
        return share, share
    if expected.itemsize == 1:  # torch defines hardly any op on 8-bit floats
        found, expected = found.float(), expected.float()
    same = (found == expected) | (found.isnan() & expected.isnan())
    if bool(same.all()):
        return 0.0, 0.0
    if not bool((found.isfinite() & expected.isfinite() | same).all()):
        return math.inf, math.inf
    wide = torch.complex128 if expected.dtype.is_complex else torch.float64
    absolute = float((found.to(wide) - expected.to(wide)).abs()[~same].max())
    scale = float(expected[expected.isfinite()].abs().max())
    return absolute, absolute / scale if scale else math.inf


def compare(names: Sequence[str], found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> NumericalError:
    """The largest error of ``found`` against ``expected``, output by output.

    >>> compare(["y"], [torch.tensor([1.0, 2.0])], [torch.tensor([1.0, 4.0])])
    NumericalError(absolute=2.0, relative=0.5, output='y')

    Raises: BackendError: number, shape or dtype of the outputs differ.
    """
    if len(found) != len(expected):
        raise BackendError(f"{len(found)} outputs came back, and the stage has {len(expected)}")
    worst = NumericalError(0.0, 0.0, names[0] if names else "")
    for name, value, reference in zip(names, found, expected, strict=True):
        if value.shape != reference.shape or value.dtype != reference.dtype:
            raise BackendError(
                f"output '{name}' came back as {value.dtype} {tuple(value.shape)}, not {reference.dtype} {tuple(reference.shape)}"
            )
        worst = larger(worst, NumericalError(*difference(value, reference), name))
    return worst


def larger(one: NumericalError, other: NumericalError) -> NumericalError:
    """Both errors in one: the larger absolute error, and the larger relative error with its output."""
    worse = one if other.relative <= one.relative else other
    return NumericalError(max(one.absolute, other.absolute), worse.relative, worse.output)

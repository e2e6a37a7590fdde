"""How far a tensor is from the one it should be: the one definition of absolute and relative error."""

import math

import torch


def difference(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Absolute and relative error of ``found``, of the shape and dtype of ``expected``.

    Of floating point and complex numbers: the largest absolute difference, and that divided by the largest magnitude in
    ``expected``. A NaN or an infinity is right where the other has the same, and both errors are infinite where it has not;
    the others are compared with each other. Of integers and booleans both are the share of elements that differ.

    >>> difference(torch.tensor([1.0, math.inf]), torch.tensor([4.0, math.inf]))
    (3.0, 0.75)
    """
    if expected.numel() == 0:
        return 0.0, 0.0
    if not expected.dtype.is_floating_point and not expected.dtype.is_complex:
        share = float((found != expected).double().mean())
        return share, share
    if expected.itemsize == 1:  # hardly an op is defined on 8 bits
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

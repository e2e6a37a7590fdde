"""Sizes at which a module does not compute, found by passes of it at few sizes of each dimension.

An export with symbolic sizes holds for all of them. Without one, only the ends of a range are traced before a model is measured.
"""

import random
from collections.abc import Callable, Mapping

import torch

from autosplit.errors import SHOWN_FAULTS, TraceError
from autosplit.tracing.loading import Model
from autosplit.tracing.verifying import own_storage
from autosplit.values.shapes import Sizes

MOST_TRIED = 16
"""Sizes of a dimension that are tried too after one has failed, to name some at which the module computes; of more those next to
the ends, at which multiples of a number show, and random ones."""


def require_sizes(model_of: Callable[[Mapping[str, int]], Model], allowed: Mapping[str, Sizes]) -> None:
    """Refuse a range in the middle or next to the ends of which a module does not compute; the largest sizes were traced.

    One that wants multiples of a number fails next to an end, and one that fails from a size on at an end. Other gaps are not
    found. Raises: TraceError: a module does not compute at some sizes of a dimension, the other ones at their largest.
    """
    largest = {dim: sizes[-1] for dim, sizes in allowed.items()}
    for dim, sizes in allowed.items():
        few = {*sizes[:2], sizes[len(sizes) // 2], *sizes[-2:-1]} - {sizes[-1]}
        found = {size: _failure(model_of({**largest, dim: size})) for size in few}
        if set(found.values()) <= {None}:
            continue
        found |= {size: _failure(model_of({**largest, dim: size})) for size in _tried(sizes) if size not in found}
        failures = {size: failure for size, failure in sorted(found.items()) if failure is not None}
        shown, (first, *_) = list(map(str, failures))[:SHOWN_FAULTS], failures.values()
        more = f" and {len(failures) - len(shown)} more" * (len(failures) > len(shown))
        [reason, *_] = str(first).splitlines() or [type(first).__name__]
        raise TraceError(
            f"model '{model_of(largest).name}' does not compute at '{dim}' {', '.join(shown)}{more} (of {len(found)} sizes that "
            f"were tried): {reason}. Give only sizes at which it does, such as "
            f"{','.join(str(size) for size in sorted(found) if size not in failures)}"
        ) from first


def _failure(model: Model) -> Exception | None:
    """What a pass of the module raises."""
    args, kwargs = own_storage((model.args, dict(model.kwargs)))
    try:
        with torch.inference_mode():
            model.module(*args, **kwargs)
        return None
    except Exception as failure:  # whatever the module raises
        return failure


def _tried(sizes: Sizes) -> list[int]:
    if len(sizes) <= MOST_TRIED:
        return list(sizes)
    ends = [*sizes[:4], *sizes[-4:]]
    return sorted({*ends, *random.Random(0).sample(sizes[4:-4], min(MOST_TRIED - len(ends), len(sizes) - len(ends)))})

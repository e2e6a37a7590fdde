"""Sizes at which a module does not compute, found by a pass of it at some sizes of each dimension.

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
"""Sizes of a dimension that are tried; of more those next to the ends, at which multiples of a number show, and random ones."""


def require_sizes(model_of: Callable[[Mapping[str, int]], Model], allowed: Mapping[str, Sizes]) -> None:
    """Raises: TraceError: a module does not compute at some sizes of a dimension, the other ones at their largest."""
    largest = {dim: sizes[-1] for dim, sizes in allowed.items()}
    for dim, sizes in allowed.items():
        tried, failures = _tried(sizes), dict[int, Exception]()
        for size in tried:
            model = model_of({**largest, dim: size})
            args, kwargs = own_storage((model.args, dict(model.kwargs)))
            try:
                with torch.inference_mode():
                    model.module(*args, **kwargs)
            except Exception as failure:  # whatever the module raises
                failures[size] = failure
        if failures:
            shown, (first, *_) = list(map(str, failures))[:SHOWN_FAULTS], failures.values()
            more = f" and {len(failures) - len(shown)} more" * (len(failures) > len(shown))
            [reason, *_] = str(first).splitlines() or [type(first).__name__]
            raise TraceError(
                f"model '{model.name}' does not compute at '{dim}' {', '.join(shown)}{more} (of {len(tried)} sizes that were "
                f"tried): {reason}. Give only sizes at which it does, such as "
                f"{','.join(str(size) for size in tried if size not in failures)}"
            ) from first


def _tried(sizes: Sizes) -> list[int]:
    if len(sizes) <= MOST_TRIED:
        return list(sizes)
    ends = [*sizes[:4], *sizes[-4:]]
    return sorted({*ends, *random.Random(0).sample(sizes[4:-4], min(MOST_TRIED - len(ends), len(sizes) - len(ends)))})

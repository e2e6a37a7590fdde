"""Refuse requests whose integers break the assumptions of a placement: an id beyond its table, or more than 32 bits.

Runtimes answer such requests with numbers that mean nothing, where torch raises or computes right.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from autosplit.tracing.splitting import saved_limits
from autosplit.tracing.valueranges import Assumed

FEW = 256
"""Most numbers that are looked at as a list."""

Check = Callable[[Sequence[torch.Tensor]], None]


def check_of(folder: Path, assumed: Assumed) -> Check | None:
    """A function that raises IndexError for inputs that the saved stage may not get; None if it may get all."""
    held = saved_limits(folder, assumed)
    if not held:
        return None

    def check(inputs: Sequence[torch.Tensor]) -> None:
        for place, name, low, high in held:
            if inputs[place].numel():
                array = inputs[place].numpy(force=True)  # torch takes twice as long on a few ids, and numpy longer than a list
                numbers = array.ravel().tolist() if array.size <= FEW else (array.min(), array.max())
                least, most = int(min(numbers)), int(max(numbers))
                if not (low <= least and most <= high):
                    value = least if least < low else most
                    raise IndexError(f"input '{name}' holds {value}, and {low} to {high} are computed right here")

    return check

"""Check that the rows of a request depend neither on each other nor on their places in it.

The shapes of a pipeline do not say whether dimension 0 holds independent rows: it may be the time of a recurrent net, or a scale
may be computed over all rows. So three requests are run and compared::

    first       0 1 2 3      rows of the first draw
    second      a b c d      rows of the second draw, eight times as large
    mixed       d 0 b 2      even rows of the first and odd rows of the second, each one place further
"""

from collections.abc import Callable, Sequence

import torch

from autosplit.errors import UsageError
from autosplit.running.request import Tensors
from autosplit.tracing.differing import compare

ROW_TOLERANCE = 0.01
"""Largest relative difference by rounding between two answers to one row; a bf16 value that rounds the other way is 0.4 % off."""

SECOND_SCALE = 8.0
"""How much larger the second draw is: with a scale over all rows in 8 bits, the rows of the first are then off by about 3 %."""


def require_independent_rows(
    run: Callable[[Sequence[torch.Tensor]], Tensors], outputs: Sequence[str], example: Sequence[torch.Tensor]
) -> None:
    """Run three requests, and compare their answers row by row; a request of one row is not tried.

    Args:
        run: answers a request; all inputs and outputs have as many rows on dimension 0 as those of ``example``.
        outputs: the names of the answers.
        example: inputs of one request, whose rows differ.
    Raises: UsageError: rows depend on each other or on their places.
    """
    num_rows = example[0].shape[0]
    if num_rows == 1:
        return
    first = list(example)
    second = [value.flip(0) * SECOND_SCALE if value.is_floating_point() else value.flip(0) for value in first]
    mixed = [_mix(one, other) for one, other in zip(first, second, strict=True)]
    of_first, of_second, of_mixed = (run(inputs) for inputs in (first, second, mixed))
    for name, one, other, found in zip(outputs, of_first, of_second, of_mixed, strict=True):
        back = found.roll(-1, 0)
        for start, expected in ((0, one), (1, other)):
            error = compare([name], [back[start::2]], [expected[start::2]])
            if not error.relative <= ROW_TOLERANCE:
                raise UsageError(
                    f"requests cannot be joined: output '{name}' of a row changes with the other rows of a request "
                    f"or with its place, by {error.relative:.3g} of the largest value ({ROW_TOLERANCE:g} is rounding). "
                    f"Send whole requests of {num_rows} rows."
                )


def _mix(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Even rows of the first and odd rows of the second, each one place further."""
    rows = first.clone()
    rows[1::2] = second[1::2]
    return rows.roll(1, 0)

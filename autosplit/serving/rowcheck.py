"""Check that the rows of a request depend neither on each other nor on their places in it.

The shapes of a pipeline do not say whether dimension 0 holds independent rows: it may be the time of a recurrent net, or a scale
may be computed over all rows. So three requests are run and compared::

    first       0 1 2 3      rows of the first draw
    second      a b c d      rows of the second draw, eight times as large
    mixed       d 0 b 2      even rows of the first and odd rows of the second, each one place further
"""

from collections.abc import Sequence

import torch

from autosplit.errors import StageError, UsageError
from autosplit.running.engine import Engine
from autosplit.tracing.differing import compare
from autosplit.tracing.tensorspec import TensorSpec

ROW_TOLERANCE = 0.01
"""Largest relative difference by rounding between two answers to one row; a bf16 value that rounds the other way is 0.4 % off."""

SECOND_SCALE = 8.0
"""How much larger the second draw is: with a scale over all rows in 8 bits, the rows of the first are then off by about 3 %."""


def require_independent_rows(
    pipeline: Engine, batched: Sequence[bool], num_rows: int, example: Sequence[torch.Tensor] | None
) -> None:
    """Run a pipeline on three requests, and compare their answers row by row.

    Args:
        pipeline: takes ``num_rows`` rows on dimension 0 of each batched input, and gives as many in each output.
        batched: for each input whether it has rows; the others are the same in all three requests.
        num_rows: rows of a request; a request of one row is not tried.
        example: inputs of one request, whose rows differ. None draws normal floating-point values, and 0 and 1 for all others.
    Raises: UsageError: rows depend on each other or on their places, the pipeline fails on these inputs, or they do not fit.
    """
    if num_rows == 1:
        return
    if example is None:
        generator = torch.Generator().manual_seed(0)
        specs = [pipeline.wiring.input_specs.get(name) for name in pipeline.wiring.inputs]
        first, second = ([_draw(spec, num_rows, generator) for spec in specs] for _ in range(2))
        second = [SECOND_SCALE * value if value.is_floating_point() else value for value in second]
    else:
        first = list(example)
        second = [value.flip(0) if rows else value for value, rows in zip(first, batched, strict=True)]
    second = [other if rows else one for one, other, rows in zip(first, second, batched, strict=True)]
    mixed = [_mix(one, other) if rows else one for one, other, rows in zip(first, second, batched, strict=True)]
    try:
        of_first, of_second, of_mixed = (pipeline.run(inputs) for inputs in (first, second, mixed))
    except StageError as failure:
        reason = str(failure).partition("\n")[0]
        raise UsageError(f"rows cannot be tried on made-up values; give inputs of one request as example=. {reason}") from None
    for name, one, other, found in zip(pipeline.wiring.outputs, of_first, of_second, of_mixed, strict=True):
        back = found.roll(-1, 0)
        for start, expected in ((0, one), (1, other)):
            error = compare([name], [back[start::2]], [expected[start::2]])
            if not error.relative <= ROW_TOLERANCE:
                raise UsageError(
                    f"requests cannot be sliced and gathered: output '{name}' of a row changes with the other rows of a request "
                    f"or with its place, by {error.relative:.3g} of the largest value ({ROW_TOLERANCE:g} is rounding). "
                    f"Send whole requests of {num_rows} rows to the pipeline itself."
                )


def _draw(spec: TensorSpec | None, num_rows: int, generator: torch.Generator) -> torch.Tensor:
    """Normal values, or 0 and 1 for whole numbers and booleans; zeros for an input that no stage reads."""
    if spec is None:
        return torch.zeros(num_rows)
    if spec.torch_dtype.is_floating_point or spec.torch_dtype.is_complex:
        return torch.randn(spec.shape, generator=generator).to(spec.torch_dtype)
    return torch.randint(0, 2, spec.shape, generator=generator).to(spec.torch_dtype)


def _mix(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Even rows of the first and odd rows of the second, each one place further."""
    rows = first.clone()
    rows[1::2] = second[1::2]
    return rows.roll(1, 0)

"""Rows that depend on each other or on their places are found; a model of one size takes requests of fewer rows."""

from collections.abc import Callable

import pytest
import torch

import autosplit
from autosplit.errors import UsageError
from autosplit.shapes.rowcheck import require_independent_rows
from autosplit.values.plan import UNKNOWN, Plan, Stage

ROWS = 4


def quantized(x: torch.Tensor) -> torch.Tensor:
    step = x.abs().amax() / 127
    return (x / step).round().clamp(-127, 127) * step


def weighted_by_place(x: torch.Tensor) -> torch.Tensor:
    return x * torch.arange(1.0, ROWS + 1)[:, None]


def over_time(x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.nn.GRU(2, 2)(x[:, None])[0][:, 0].detach()


def less_its_mean(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean(0)


@pytest.mark.parametrize("function", [quantized, weighted_by_place, over_time, less_its_mean])
def test_rows_that_depend_on_each_other_or_on_their_places_are_refused(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Seven rows of a model with one scale for the whole batch were off by 0.31 of 3.5; a recurrent net was cut in time."""
    example = torch.randn(ROWS, 2, generator=torch.Generator().manual_seed(0))
    require_independent_rows(lambda inputs: (inputs[0] * 2,), ["y"], [example])
    with pytest.raises(UsageError, match="output 'y' of a row changes with the other rows of a request or with its place"):
        require_independent_rows(lambda inputs: (function(inputs[0]),), ["y"], [example])


def test_plan_for_four_rows_takes_requests_of_fewer_and_joins_them() -> None:
    net = torch.nn.Linear(2, 3).eval()
    traced = autosplit.trace(net, torch.randn(ROWS, 2))
    stage = Stage("all", tuple(op.name for op in traced.graph.ops), ("cpu:0",))
    plan = Plan(traced.source, traced.graph.hash, "", (stage,), UNKNOWN, process="caller")
    with autosplit.open_pipeline(autosplit.rows_family(traced), plan, max_wait_s=60) as model:
        asked = [torch.randn(count, 2) for count in (1, 2, 1)]
        futures = [model.submit(x) for x in asked]  # together they fill the batch, so that none waits for the 60 s
        for x, future in zip(asked, futures, strict=True):
            assert torch.allclose(future.result(10), net(x), atol=1e-6)
        assert (model.pipeline.batches.num_batches, model.pipeline.batches.num_padding) == (1, 0)
        with pytest.raises(UsageError, match=r"'batch' is 5, and sizes are 1\.\.4"):
            model(torch.randn(5, 2))


def test_model_whose_rows_differ_or_mix_is_no_family_of_rows() -> None:
    class Mixed(torch.nn.Module):
        """Subtracts the mean of the rows."""

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            """The rows of ``x`` without their mean, plus ``y``."""
            return x - x.mean(0) + y

    with pytest.raises(UsageError, match=r"one number of rows, and have: 'x' 4, 'y' 2, .* 4"):
        autosplit.rows_family(autosplit.trace(Mixed().eval(), (torch.randn(4, 2), torch.randn(2))))
    with pytest.raises(UsageError, match="requests cannot be joined"):
        autosplit.rows_family(autosplit.trace(Mixed().eval(), (torch.randn(4, 2), torch.randn(4, 2))))

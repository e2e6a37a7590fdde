"""A pipeline for requests of several sizes: replays, values of one shape at all sizes, real stages, and their memory."""

import itertools

import pytest
import torch
from contract import MIXED, WIDTHS
from pipelines import CORES, Once, at_widths, increment, local, request, spawned, spec

from autosplit.errors import PlanError
from autosplit.running.pipeline import Pipeline
from autosplit.running.stage import StagePlacement, Variant

pytestmark = pytest.mark.timeout(60)


def test_a_replay_after_a_death_keeps_every_shape() -> None:
    stages = [at_widths(local(name, Once(7, 1), *ends, 2), *WIDTHS) for name, ends in (("a", ("x", "h")), ("b", ("h", "y")))]
    with Pipeline(stages, ["x"], ["y"]) as pipeline:
        futures = [pipeline.submit(request(number, width)) for number, width in enumerate(MIXED)]
        found = [future.result(20)[0] for future in futures]
        assert pipeline.restarts == 2
    assert [len(value) for value in found] == MIXED
    assert [float(value[0]) for value in found] == [number + 2 for number in range(len(MIXED))]


def test_a_killed_process_costs_no_shape() -> None:
    stage = at_widths(spawned("a", "increment", "x", "y", CORES), *WIDTHS)
    with Pipeline([stage], ["x"], ["y"], max_in_flight=4) as pipeline:
        futures = []
        for number, width in zip(range(60), itertools.cycle(MIXED), strict=False):
            futures.append(pipeline.submit(request(number, width)))
            if number == 20:
                pipeline._transport.deployment.workers[0].kill()  # type: ignore[attr-defined]
        found = [future.result(30)[0] for future in futures]
        assert pipeline.restarts == 1
    assert [len(value) for value in found] == [width for _, width in zip(range(60), itertools.cycle(MIXED), strict=False)]
    assert [float(value[0]) for value in found] == [number + 1 for number in range(60)]


def total(x: torch.Tensor) -> torch.Tensor:
    """A value of one shape, whatever the size of the request."""
    return x.sum().expand(4)


def test_the_size_of_a_request_passes_a_cut_whose_values_all_have_one_shape() -> None:
    first = at_widths(local("a", total, "x", "h"), *WIDTHS)
    first = StagePlacement(
        "a", first.module, first.inputs, (spec("h"),), first.devices,
        variants=tuple(Variant(one.module, one.inputs, (spec("h"),)) for one in first.variants),
    )  # fmt: skip
    second = local("b", lambda h: h[:1].expand(4), "h", "y")
    second = StagePlacement(
        "b", second.module, second.inputs, second.outputs, second.devices,
        variants=tuple(Variant(_widening(width), (spec("h"),), (spec("y", width),)) for width in WIDTHS),
    )  # fmt: skip
    with Pipeline([first, second], ["x"], ["y"]) as pipeline:
        found = pipeline.run_many([request(1, width) for width in MIXED])
    assert [value.tolist() for (value,) in found] == [[float(width)] * width for width in MIXED]


def _widening(width: int) -> object:
    return local("b", lambda h: h[:1].expand(width), "h", "y").module


def test_variants_that_do_not_fit_together_are_refused() -> None:
    plain, wide = local("a", increment, "x", "h"), at_widths(local("b", increment, "h", "y"), 2)
    with pytest.raises(PlanError, match="stages have different numbers of variants: 'a' 0, 'b' 1"):
        Pipeline([plain, wide], ["x"], ["y"])
    with pytest.raises(
        PlanError, match=r"variant 1: stage 'b' reads 'h' as float32 \[2\], and stage 'a' makes it as float32 \[8\]"
    ):
        Pipeline([at_widths(plain, 8), wide], ["x"], ["y"])
    with pytest.raises(
        PlanError, match=r"stage 'a' reads \[\('x', 'float32'\)\], and at the sizes of variant 1 \[\('z', 'float32'\)\]"
    ):
        other = Variant(plain.module, (spec("z", 2),), (spec("h", 2),))
        Pipeline([StagePlacement("a", plain.module, plain.inputs, plain.outputs, plain.devices, variants=(other,))], ["x"], ["h"])

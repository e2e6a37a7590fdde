"""The contract of a transport, for batches of requests over another engine; batches themselves are in ``test_service``."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
from contract import ROOM, TransportContract
from pipelines import WIDTH, at_widths, local

from autosplit.errors import WorkerError
from autosplit.running.engine import Engine
from autosplit.running.intake import Intake
from autosplit.running.pipeline import InProcess
from autosplit.shapes.batching import Asked, Bucket, Grid
from autosplit.shapes.joining import JoiningTransport, SizedRequest

pytestmark = pytest.mark.timeout(60)


class Joining(Engine):
    """An engine over another one, which is closed with it; requests have the sizes of variants, and each is a batch."""

    def __init__(self, engine: Engine, widths: Sequence[int]) -> None:
        self.engine, self.known = engine, Intake(engine.wiring)
        largest = SimpleNamespace(graph=SimpleNamespace(inputs=["x"], outputs=["y"]), specs=engine.wiring.input_specs)
        dims = {name: {0: "width"} for name in ("x", "y")}
        family = cast(Any, SimpleNamespace(variants=[largest], dims=dims, out_dims=dims))
        grid = Grid.of([Bucket(number, {"width": width}, 1.0) for number, width in enumerate(widths)], exact=["width"])
        super().__init__(lambda _: JoiningTransport(engine, family, grid, 0.0), engine.wiring, ROOM, intake=self.sized)

    def sized(self, inputs: Any, deadline_ns: int = 0, *, caller_keeps_inputs: bool = False, variant: int = 0) -> SizedRequest:
        """A request of the size of a variant."""
        one = self.known(inputs, deadline_ns, caller_keeps_inputs=caller_keeps_inputs, variant=variant)
        asked = Asked({"width": len(inputs[0])}, 1.0)
        return SizedRequest(one.inputs, deadline_ns, one.submitted_ns, caller_keeps_inputs=caller_keeps_inputs, asked=asked)

    def close(self, *, drain: bool = True) -> None:
        """Close both."""
        super().close(drain=drain)
        self.engine.close()


class TestJoining(TransportContract):
    """Batches on copies in the caller's process."""

    def open(self, function: Callable[..., Any], replicas: int = 1, widths: Sequence[int] = ()) -> Engine:
        """As many batches under way as copies, and one more."""
        stage = at_widths(local("a", function, "x", "y", max(2, replicas)), *widths)
        return Joining(InProcess([stage], ["x"], ["y"]), (WIDTH, *widths))


def test_restarts_before_a_pipeline_was_opened_again_count_once() -> None:
    """The engine below goes on counting, so that each was counted by both."""
    with Joining(InProcess([local("a", lambda x: x, "x", "y")], ["x"], ["y"]), (WIDTH,)) as pipeline:
        pipeline.engine._past_restarts = 3
        pipeline._admission.fail(WorkerError("three workers died"))
        pipeline.reopen()
        assert pipeline.restarts == pipeline.engine.restarts == 3

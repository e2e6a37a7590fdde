"""A session: inputs queued by name, runs that do not block up to a limit, outputs in order."""

import threading
from collections.abc import Callable

import pytest
import torch
from pipelines import Gate, increment, local

from autosplit.errors import RefusedError, StageError, UsageError
from autosplit.running.pipeline import Pipeline
from autosplit.serving.session import Policy, Session

pytestmark = pytest.mark.timeout(60)


def opened(function: Callable[..., torch.Tensor]) -> Pipeline:
    return Pipeline([local("a", function, "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=0)


def fetch_all(session: Session) -> list[float]:
    found = []
    while session.has_next_output():
        found.append(float(session.get_output(10)[0][0]))
    return found


def test_the_sequence_of_the_tvm_rfc() -> None:
    """RFC 0014 of TVM, section 3.3: two inputs are pushed before the second run, and each run takes the next one."""
    with opened(increment) as pipeline:
        session = Session(pipeline)
        session.set_input("x", torch.full((4,), 1.0))
        session.run()
        session.set_input("x", torch.full((4,), 2.0))
        session.set_input("x", torch.full((4,), 3.0))
        session.run()
        found = [float(session.get_output(10)[0][0])]
        session.run()
        assert [*found, *fetch_all(session)] == [2, 3, 4]
        session.run()
        assert fetch_all(session) == [4], "the last value serves all further runs"


def test_the_loop_of_the_tvm_rfc_fetches_every_answer() -> None:
    gate = Gate()
    with opened(gate) as pipeline:
        session = Session(pipeline)
        for number in range(5):
            session.set_input("x", torch.full((4,), float(number)))
            session.run()  # none blocks, though the pipeline has room for one request
        assert not session.is_output_ready()
        gate.opened.set()
        assert fetch_all(session) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("when_full", ["block", "refuse", "drop_oldest"])
def test_the_policy_decides_at_the_limit(when_full: Policy) -> None:
    gate = Gate()
    with opened(gate) as pipeline:
        session = Session(pipeline, limit=2, when_full=when_full)
        for number in range(2):
            session.set_input("x", torch.full((4,), float(number)))
            session.run()
        session.set_input("x", torch.full((4,), 2.0))
        if when_full == "drop_oldest":
            session.run()
        else:
            with pytest.raises(RefusedError, match="2 runs are unfinished, which is the limit"):
                session.run(timeout_s=0.01)
        gate.opened.set()
        if when_full == "drop_oldest":
            with pytest.raises(RefusedError, match="the run was dropped: 2 later runs"):
                session.get_output(10)
            assert fetch_all(session) == [2, 3]
        else:
            assert fetch_all(session) == [1, 2]
            session.run()
            assert fetch_all(session) == [3], "a refused run leaves its input in the queue"


def test_a_run_blocks_at_the_limit_until_another_has_finished() -> None:
    with opened(increment) as pipeline:
        session = Session(pipeline, limit=1)
        for number in range(20):
            session.set_input("x", torch.full((4,), float(number)))
            session.run()
        assert fetch_all(session) == list(range(1, 21))


def test_misuse_of_a_session_is_told() -> None:
    with opened(increment) as pipeline:
        with pytest.raises(UsageError, match="limit must be at least 1 run, but is 0"):
            Session(pipeline, limit=0)
        with pytest.raises(UsageError, match="when_full must be one of block, refuse, drop_oldest, but is 'drop'"):
            Session(pipeline, when_full="drop")  # type: ignore[arg-type]
        session = Session(pipeline)
        for value in (torch.ones(5), None):
            with pytest.raises(UsageError, match="the input does not fit the pipeline"):
                session.set_input("x", value)  # type: ignore[arg-type]


def test_a_session_steps_through_a_pipeline() -> None:
    def fail_on_2(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if x[0] == 2:
            raise ValueError("two")
        return x + y

    with Pipeline([local("a", fail_on_2, "x y", "z")], ["x", "y"], ["z"]) as pipeline:
        session = Session(pipeline)
        with pytest.raises(UsageError, match="no output to wait for"):
            session.get_output()
        with pytest.raises(UsageError, match="no input 'q'; the inputs are: x, y"):
            session.set_input("q", torch.zeros(4))
        value = torch.zeros(4)
        session.set_input("x", value)
        with pytest.raises(UsageError, match="inputs were not set: y"):
            session.run()
        session.set_input("y", torch.full((4,), 10.0))
        for number in range(4):
            value.fill_(number)
            session.run()
        assert session.get_output(10)[0][0] == 10 and session.get_output(10)[0][0] == 11
        with pytest.raises(StageError, match="two"):
            session.get_output(10)
        assert session.get_output(10)[0][0] == 13 and not session.has_next_output()


def test_outputs_that_are_not_there_can_be_fetched_later() -> None:
    gate = threading.Event()

    def hold(x: torch.Tensor) -> torch.Tensor:
        gate.wait(30)
        return x

    with Pipeline([local("a", hold, "x", "y")], ["x"], ["y"]) as pipeline:
        session = Session(pipeline)
        session.set_input("x", torch.ones(4))
        session.run()
        with pytest.raises(TimeoutError):
            session.get_output(0.02)
        assert session.has_next_output() and not session.is_output_ready()
        gate.set()
        assert session.get_output(10)[0][0] == 1

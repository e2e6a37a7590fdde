"""A stage in the caller's own process: the same requests and answers as from workers, without rings."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipelines import Gate, double, fail_on_7, local, request, wait_until

from autosplit.errors import DeadlineError, PlanError, RefusedError, StageError, UsageError
from autosplit.running import localstage, statusblock, turns
from autosplit.running.engine import Engine
from autosplit.running.localstage import LocalStage
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.running.recording import record
from autosplit.serving.session import Session

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(params=[1, 3], ids=["in the calling thread", "three threads"])
def engine(request: pytest.FixtureRequest) -> InProcess:
    return InProcess([local("a", double, "x", "y", replicas=request.param)], ["x"], ["y"])


@pytest.mark.parametrize("make", [Pipeline, InProcess])
@pytest.mark.parametrize("replicas", [1, 2])
def test_a_future_holds_what_is_made_of_the_outputs_or_why_it_cannot_be_made(make: Callable[..., Any], replicas: int) -> None:
    with make([local("a", double, "x", "y", replicas=replicas)], ["x"], ["y"]) as engine:
        assert engine.submit(request(4), returns=lambda outputs: outputs[0].sum().item()).result(10) == 32
        with pytest.raises(IndexError):
            engine.submit(request(4), returns=lambda outputs: outputs[1]).result(10)
        assert engine.run(request(1))[0][0] == 2


def test_every_way_to_ask_gives_the_same_answers(engine: Engine) -> None:
    requests = [request(number) for number in range(20)]
    expected = [2.0 * number for number in range(20)]
    with engine:
        futures = [engine.submit(inputs) for inputs in requests]
        assert [float(future.result(10)[0][0]) for future in futures] == expected
        assert [float(answer[0][0]) for answer in engine.run_many(requests)] == expected
        assert [float(answer[0][0]) for answer in engine.stream(iter(requests))] == expected
        assert float(engine.run(requests[3])[0][0]) == 6
        assert not wait(futures).not_done and all(future.done() and future.exception() is None for future in futures)
        session = Session(engine)
        session.set_input("x", request(5)[0])
        session.run()
        assert session.get_output(10)[0][0] == 10
        assert engine.occupancy.num_answered == 20 * 3 + 2 and engine.occupancy.num_running == engine.occupancy.num_waiting == 0


@pytest.mark.parametrize("drain", [True, False])
def test_close_waits_for_the_place_of_an_answer_that_is_being_given(monkeypatch: pytest.MonkeyPatch, drain: bool) -> None:
    # its thread was told nothing, and close waited for ever
    finish, giving, go_on = LocalStage.finish, threading.Event(), threading.Event()

    def finish_late(*arguments: Any) -> None:
        finish(*arguments)
        giving.set()
        go_on.wait(30)

    monkeypatch.setattr(LocalStage, "finish", finish_late)
    engine = InProcess([local("a", double, "x", "y", replicas=2)], ["x"], ["y"])
    future = engine.submit(request(3))
    assert giving.wait(30)
    closing = threading.Thread(target=engine.close, kwargs={"drain": drain}, daemon=True)
    closing.start()
    closing.join(0.2)
    assert closing.is_alive()
    go_on.set()
    closing.join(30)
    assert not closing.is_alive() and float(future.result(0)[0][0]) == 6


def test_one_slow_request_does_not_make_a_quick_stage_slow_for_event_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = 1

    def take_time(x: torch.Tensor) -> torch.Tensor:
        nonlocal now_ns
        now_ns += int(x[0]) * turns.SHORT_NS
        return x + 1

    clock = SimpleNamespace(monotonic_ns=lambda: now_ns, perf_counter=time.perf_counter)
    for module in (localstage, statusblock):
        monkeypatch.setattr(module, "time", clock)
    with InProcess([local("a", take_time, "x", "y")], ["x"], ["y"]) as engine:
        seen = []
        for times_short in (0, 0, 2, 0, 2, 2, 2, 0):
            engine.run([torch.full((4,), float(times_short))])
            seen.append(engine.returns_immediately)
    assert seen == [True, True, True, True, True, True, False, True]


def test_an_answer_does_not_change_with_the_inputs_nor_with_later_answers(engine: Engine) -> None:
    with engine:
        value = torch.ones(4)
        first = engine.submit([value])
        value.fill_(5)
        second = engine.submit([value])
        value.fill_(9)
        assert first.result(10)[0].tolist() == [2.0] * 4 and second.result(10)[0].tolist() == [10.0] * 4


def test_an_input_that_is_returned_as_it_is_is_the_answers_own() -> None:
    with InProcess([local("a", lambda x: x, "x", "y")], ["x"], ["x", "y"]) as engine:
        [value] = request(1)
        passed, same = engine.run([value])
        value.fill_(9)
        assert passed.tolist() == same.tolist() == [1.0] * 4


def test_a_request_that_fails_or_is_late_hurts_nobody_else() -> None:
    with InProcess([local("a", fail_on_7, "x", "y")], ["x"], ["y"]) as engine:
        failed, late, good = (engine.submit(request(7)), engine.submit(request(1), deadline_s=1e-9), engine.submit(request(2)))
        with pytest.raises(StageError, match=r"stage 'a' .* failed on request 0: ValueError"):
            failed.result()
        with pytest.raises(DeadlineError, match="request 1 was skipped"):
            late.result()
        assert good.result()[0][0] == 3
        [stage] = engine.stats(clear=True).stages
        assert (stage.num_requests, stage.num_failed, stage.num_skipped) == (1, 1, 1)
        with pytest.raises(UsageError, match="float32"):
            engine.submit([torch.zeros(3)])


def test_a_stage_that_exits_ends_neither_its_thread_nor_other_requests(caplog: pytest.LogCaptureFixture) -> None:
    with InProcess([local("a", lambda x: exec("raise SystemExit") if x[0] < 2 else x, "x", "y", 2)], ["x"], ["y"]) as engine:
        futures = [engine.submit(request(number)) for number in range(4)]
        assert [future.exception(10) is None for future in futures] == [False, False, True, True]
    engine.close()  # a second time
    assert "request 0 ended the thread of its copy" in caplog.text


def test_more_urgent_requests_of_other_threads_come_first_and_a_full_engine_refuses() -> None:
    gate = Gate()
    with InProcess([local("a", gate, "x", "y")], ["x"], ["y"]) as engine:
        threads = [threading.Thread(target=engine.submit, args=(request(0),))]
        threads[0].start()
        assert gate.entered.acquire(timeout=10)
        for number, priority in [(1, 5), (2, -1)]:
            threads.append(threading.Thread(target=engine.submit, args=(request(number),), kwargs={"priority": priority}))
            threads[-1].start()
            wait_until(lambda number=number: engine.occupancy.num_waiting >= number)
        with pytest.raises(RefusedError, match=r"1 requests are running \(limit 1\)"):
            engine.submit(request(3), timeout_s=0)
        gate.opened.set()
        for thread in threads:
            thread.join(10)
    assert gate.seen == [0, 2, 1]


def test_one_thread_computes_what_others_bring_and_a_thread_that_is_interrupted_leaves_nothing_behind() -> None:
    gate, answers, failures = Gate(), [], []

    class Interrupt(BaseException):
        pass

    def compute(x: torch.Tensor) -> torch.Tensor:
        gate(x)
        if x[0] == 3:
            raise Interrupt
        return 2 * x

    def ask(number: int) -> None:
        try:
            answers.append(engine.submit(request(number)).result()[0][0].item())
        except (Interrupt, RefusedError) as failure:
            failures.append(str(failure))

    with InProcess([local("a", compute, "x", "y")], ["x"], ["y"]) as engine:
        threads = [threading.Thread(target=ask, args=(number,)) for number in (0, 1, 3, 2)]
        for number, thread in enumerate(threads):
            thread.start()
            wait_until(lambda number=number: engine.occupancy.num_waiting >= number)
            assert number or gate.entered.acquire(timeout=10)
        gate.opened.set()
        for thread in threads:
            thread.join(10)
        assert sorted(answers) == [2, 4] and gate.seen == [0, 1, 3, 2], "the first thread was interrupted in the third request"
        assert sorted(failures) == ["", "the thread that computed the request was interrupted; submit it again"]
        assert engine.submit(request(5)).result()[0][0] == 10


def test_it_tells_what_workers_tell(engine: Engine) -> None:
    with engine:
        engine.run_many([request(number) for number in range(6)])
        stats = engine.stats()
        assert stats.num_requests == sum(stage.num_requests for stage in stats.stages) == 6 and stats.latency.count == 6
        assert {worker.state for worker in engine.health()} == {"waiting"} and len(engine.pids) == engine.max_in_flight
        assert len(engine.made_ns(4)[0]) == 4 and len(record(engine)) == 12


def test_what_cannot_be_in_the_callers_process_is_refused() -> None:
    with pytest.raises(PlanError, match="can hold one stage, and there are 2"):
        InProcess([local("a", double, "x", "u"), local("b", double, "u", "y")], ["x"], ["y"])

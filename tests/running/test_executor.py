"""The schedule itself, on null devices: order, back-pressure, priorities, deadlines, cancelling, failures, replays."""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from functools import partial
from typing import Any

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import Gate, Once, add, double, fail_on_7, increment, local, request, spawned

from autosplit.devices.calls import begin
from autosplit.devices.processes import MemoryHeld
from autosplit.errors import BackendError, DeadlineError, PlanError, RefusedError, StageError, UsageError, WorkerError
from autosplit.running import monitor
from autosplit.running.copying import CopyPool
from autosplit.running.modules import LocalFunction
from autosplit.running.monitor import WorkerReport
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.running.recovery import Recovery
from autosplit.running.stage import StagePlacement
from autosplit.running.stageworker import StageWorker
from autosplit.running.waitingroom import WaitingRoom

pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module", autouse=True)
def memory_unread() -> Iterator[None]:
    """Reports leave the memory of workers out: they are threads of this process, whose memory map takes 0.1 s to read."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(monitor, "memory_held", lambda pid, before_bytes: MemoryHeld(0, 0, 0, 0))
        yield


@st.composite
def networks(draw: st.DrawFn) -> tuple[list[StagePlacement], list[tuple[int, int]]]:
    """A random network: stage ``k`` adds two earlier values (0 is the input), with random replicas and depths."""
    reads: list[tuple[int, int]] = []
    stages = []
    for number in range(1, draw(st.integers(1, 5)) + 1):
        pair = (draw(st.integers(0, number - 1)), draw(st.integers(0, number - 1)))
        reads.append(pair)
        settings = {"replicas": draw(st.integers(1, 3)), "queue_depth": draw(st.integers(1, 3))}
        stages.append(local(f"s{number}", add, f"v{pair[0]} v{pair[1]}", f"v{number}", **settings))
    return stages, reads


@settings(max_examples=examples(25), deadline=None)
@given(networks(), st.data())
def test_any_network_gives_every_answer_in_order(
    network: tuple[list[StagePlacement], list[tuple[int, int]]], data: st.DataObject
) -> None:
    stages, reads = network
    outputs = data.draw(st.lists(st.integers(0, len(stages)), min_size=1, max_size=4))
    window = data.draw(st.one_of(st.none(), st.integers(1, 9)))
    with Pipeline(stages, ["v0"], [f"v{one}" for one in outputs], max_in_flight=window) as pipeline:
        answers = pipeline.run_many([request(number) for number in range(30)])
    for number, answer in enumerate(answers):
        values = [float(number)]
        for one, other in reads:
            values.append(values[one] + values[other])
        assert [float(value[0]) for value in answer] == [values[one] for one in outputs]


def test_a_stream_takes_requests_in_as_its_answers_are_taken() -> None:
    taken: list[int] = []

    def requests() -> Iterator[list[torch.Tensor]]:
        for number in range(40):
            taken.append(number)
            yield request(number)

    with Pipeline([local("s", fail_on_7, "x", "y")], ["x"], ["y"]) as pipeline:
        answers = pipeline.stream(requests())
        for number in range(7):
            assert next(answers)[0][0] == number + 1
            assert len(taken) == number + 2 * pipeline.wiring.window
        with pytest.raises(StageError, match="seven"):
            next(answers)
        assert [answer[0].item() for (answer,) in pipeline.stream(map(request, range(10, 40)))] == list(range(11, 41))


def test_stages_run_in_inference_mode_and_answers_are_ordinary_tensors() -> None:
    def mode(x: torch.Tensor) -> torch.Tensor:
        return x + torch.is_inference_mode_enabled()

    with Pipeline([local("s", mode, "x", "y")], ["x"], ["y"]) as pipeline:
        (answer,) = pipeline.run(request(0))
        assert answer[0] == 1 and not answer.is_inference()


def test_a_request_that_fails_fails_alone() -> None:
    stages = [local("a", fail_on_7, "x", "u", 2), local("b", double, "u", "y"), local("c", add, "y x", "z", 3)]
    with Pipeline(stages, ["x"], ["z", "u"]) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(20)]
        for number, future in enumerate(futures):
            if number != 7:
                assert [float(value[0]) for value in future.result(10)] == [3 * number + 2, number + 1]
        with pytest.raises(StageError) as caught:
            futures[7].result(10)
        stats = pipeline.stats()
    text = str(caught.value)
    assert "stage 'a' (replica 1 of 2, device 'null:0') failed on request 7: ValueError: seven is not for me" in text
    assert "Traceback" in text and "fail_on_7" in text
    assert [stage.num_failed for stage in stats.stages] == [0, 1, 1, 0, 1, 0]


def test_an_output_that_does_not_fit_is_the_stages_fault_and_hurts_nobody_else() -> None:
    made = {1: torch.zeros(2), 2: None, 3: [torch.zeros(4)] * 3, 4: torch.zeros(4, device="meta"), 5: torch.zeros(4).to_sparse()}
    made[6] = [[1.0]]
    announced = "output 0 is {}, and a dense torch.float32 [4] was announced"
    texts = [
        "output 0 is torch.float32 [2], and torch.float32 [4] was announced",
        "stage 'a' (replica 0 of 1, device 'null:0') failed on request 2: ValueError: "
        "it returned 0 outputs instead of the 1 announced",
        "failed on request 3: ValueError: it returned 3 outputs instead of the 1 announced",
        *map(announced.format, ["torch.strided on meta", "torch.sparse_coo on cpu", "list"]),
    ]
    with Pipeline([local("a", lambda x: made.get(int(x[0]), x), "x", "y")], ["x"], ["y"]) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(8)]
        for future, text in zip(futures[1:7], texts, strict=True):
            assert text in str(future.exception(10))
        assert [future.result(10)[0][0] for future in (futures[0], futures[7])] == [0, 7]


def test_a_stage_that_cannot_be_loaded_leaves_nothing_running() -> None:
    def live() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if thread.name.startswith(("good", "bad"))}

    class Broken(LocalFunction):
        def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> Any:
            raise BackendError("it is broken")

    bad = StagePlacement("bad", Broken(double), (), (), local("n", double, "x", "y").devices)
    with pytest.raises(BackendError, match="stage 'bad' could not be loaded on device 'null:0'"):
        Pipeline([local("good", double, "x", "y"), bad], ["x"], ["y"])
    assert live() == set()


def test_a_sooner_request_overtakes_a_hundred_in_the_queue() -> None:
    """What is in the rings keeps its order, so no more is let in than keeps the stages at work."""
    gate, depth = Gate(), 4
    stages = [local("a", double, "x", "u", queue_depth=depth), local("b", gate, "u", "y", queue_depth=depth)]
    with Pipeline(stages, ["x"], ["y"], queue_capacity=100) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(100)]
        urgent = pipeline.submit(request(1000), priority=-1)
        gate.opened.set()
        assert urgent.result(10)[0][0] == 2001
        assert [float(future.result(10)[0][0]) for future in futures] == [2 * number + 1 for number in range(100)]
    assert gate.seen.index(2000) == pipeline.wiring.window <= len(stages) * depth


def test_a_caller_that_enters_too_late_lets_the_next_one_in() -> None:
    """Nothing is under way then, so that no answer would call the next one."""
    gate = Gate()
    with Pipeline([local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=0) as pipeline:
        futures = {0: pipeline.submit(request(0))}
        entrance = pipeline._admission._waiting_room
        callers = [
            threading.Thread(target=lambda n=n, s=s: futures.update({n: pipeline.submit(request(n), deadline_s=s)}))
            for n, s in ((1, 1e-3), (2, None))
        ]
        for number, caller in enumerate(callers):
            caller.start()
            while entrance._num_here <= number:
                time.sleep(0.001)
        gate.opened.set()
        for caller in callers:
            caller.join(10)
        with pytest.raises(DeadlineError):
            futures[1].result(10)
        assert [float(futures[number].result(10)[0][0]) for number in (0, 2)] == [1, 3]


def test_a_request_that_waits_is_copied_without_the_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They took 7 ms of two cores for each request of 600 KB, so that 12 requests in flight were slower than 4."""
    gate, copied = Gate(), []
    copy = CopyPool.copy
    monkeypatch.setattr(CopyPool, "copy", lambda pool, source, *at: copied.append(source) or copy(pool, source, *at))
    with Pipeline([local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=2) as pipeline:
        values = [request(number) for number in range(3)]
        futures = [pipeline.submit(value) for value in values]
        assert [id(one) for one in copied] == [id(value[0]) for value in values[1:]]
        gate.opened.set()
        assert [float(future.result(10)[0][0]) for future in futures] == [1, 2, 3]


@pytest.mark.parametrize(("make", "replicas"), [(partial(Pipeline, max_in_flight=2), 1), (InProcess, 2)])
def test_callers_enter_once_half_of_the_queue_is_free_and_nobody_overtakes_them(make: Callable[..., Any], replicas: int) -> None:
    """Callers that came while there was room kept those that waited out for as long as the load lasted."""
    let_out = threading.Semaphore(0)

    def hold(x: torch.Tensor) -> torch.Tensor:
        let_out.acquire(timeout=30)
        return x

    with make([local("a", hold, "x", "y", replicas=replicas)], ["x"], ["y"], queue_capacity=4) as engine:
        futures = [engine.submit(request(number)) for number in range(2)]
        while engine.occupancy.num_waiting:  # a copy that starts late would take its request from the full queue
            time.sleep(0.001)
        futures += [engine.submit(request(number)) for number in range(2, 6)]
        entrance = engine._admission._waiting_room
        outside = [threading.Thread(target=lambda n=n: futures.append(engine.submit(request(n)))) for n in (6, 7)]
        for number, caller in enumerate(outside):
            caller.start()
            while entrance._num_here <= number:
                time.sleep(0.001)
            if number == 0:
                let_out.release()
                assert wait(futures[:2], 10, FIRST_COMPLETED).done
                while engine.occupancy.num_waiting != 3:
                    time.sleep(0.001)
        with pytest.raises(RefusedError, match=r"3 are waiting \(limit 4\)"):
            engine.submit(request(9), timeout_s=0)
        assert len(futures) == 6 and engine.occupancy.num_waiting == 3 and not engine.returns_immediately
        let_out.release(7)
        for caller in outside:
            caller.join(10)
        assert sorted(float(future.result(10)[0][0]) for future in futures) == list(range(8))


def test_a_late_request_is_skipped_at_the_next_border() -> None:
    gate = Gate()
    seen: list[float] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(float(x[0]))
        return x

    with Pipeline([local("a", gate, "x", "u"), local("b", note, "u", "y")], ["x"], ["y"], max_in_flight=2) as pipeline:
        futures = [
            pipeline.submit(request(0)),
            pipeline.submit(request(1), deadline_s=0.05),
            pipeline.submit(request(2), deadline_s=0.05),
        ]
        time.sleep(0.1)
        gate.opened.set()
        assert futures[0].result(10)[0][0] == 1
        with pytest.raises(DeadlineError, match="request 1 was skipped: its deadline passed"):
            futures[1].result(10)
        with pytest.raises(DeadlineError, match="while it waited in the admission queue"):
            futures[2].result(10)
        assert pipeline.run(request(3))[0][0] == 4
        assert pipeline.stats().stages[0].num_skipped == 1
    assert seen == [1.0, 4.0] and gate.seen == [0, 3]


def test_a_deadline_in_the_queue_is_told_when_it_passes_and_makes_room() -> None:
    gate = Gate()
    with Pipeline([local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=3) as pipeline:
        futures = [pipeline.submit(request(0))]
        futures += [pipeline.submit(request(number), deadline_s=limit_s) for number, limit_s in [(1, 60), (2, 0.1), (3, 0.05)]]
        waiting = pipeline.submit(request(4))
        for future in futures[2:]:
            with pytest.raises(DeadlineError, match="while it waited in the admission queue"):
                future.result(10)
        assert pipeline.occupancy.num_waiting == 2 and not futures[0].done()
        waiting.cancel()
        assert pipeline.occupancy.num_waiting == 1
        gate.opened.set()
        assert [float(future.result(10)[0][0]) for future in futures[:2]] == [1, 2]
    assert gate.seen == [0, 1]


def test_a_cancelled_request_is_skipped_in_the_queue_and_at_borders() -> None:
    gate = Gate()
    with Pipeline([local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=2) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(3)]
        gate.entered.acquire()
        assert futures[1].cancel() and futures[2].cancel()
        gate.opened.set()
        assert futures[0].result(10)[0][0] == 1
        with pytest.raises(CancelledError):
            futures[1].result(10)
        assert pipeline.run(request(5))[0][0] == 6
    assert gate.seen == [0, 5]


def test_whoever_waits_for_a_request_that_was_cancelled_in_the_queue_is_told() -> None:
    gate = Gate()
    with Pipeline([local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(2)]
        waiter = threading.Timer(0.05, futures[1].cancel)
        waiter.start()
        assert wait(futures, timeout=30, return_when=FIRST_COMPLETED).done == {futures[1]}
        gate.opened.set()


def test_an_answer_of_unlike_stages_waits_for_no_other_request_and_none_is_computed_twice_for_a_caller() -> None:
    """Two replicas feed one more stage, so there is one lane: a death replays requests that have their answers."""
    gate, dies = Gate(), Once(3, 1)
    stages = [local("a", lambda x: x + 1, "x", "u"), local("b", lambda u: dies(gate(u)) if u[0] % 2 else u + 1, "u", "y", 2)]
    with Pipeline(stages, ["x"], ["y"], max_in_flight=4) as pipeline:
        slow, quick = pipeline.submit(request(0)), pipeline.submit(request(1))
        assert quick.result(10)[0][0] == 3 and not slow.done()
        assert (pipeline.occupancy.num_running, pipeline.occupancy.num_answered) == (1, 1)
        gate.opened.set()
        dying = pipeline.submit(request(2))
        assert [float(future.result(20)[0][0]) for future in (slow, quick)] == [3, 3]
        assert dying.result(20)[0][0] == 5


@settings(max_examples=10, deadline=None)
@given(networks(), st.integers(0, 29), st.integers(0, 4))
def test_a_replay_loses_nothing(network: tuple[list[StagePlacement], list[tuple[int, int]]], number: int, victim: int) -> None:
    stages, reads = network
    deadly = Once(number, 1)

    def add_or_die(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return deadly(x) - 1 + y

    first = local("s0", add_or_die, "w w", "v0", 1 + victim % 2, queue_depth=1)
    with Pipeline([first, *stages], ["w"], [f"v{len(stages)}"]) as pipeline:
        answers = pipeline.run_many([request(k) for k in range(30)])
        assert pipeline.stats().restarts == 1
    for k, answer in enumerate(answers):
        values = [2.0 * k]
        for one, other in reads:
            values.append(values[one] + values[other])
        assert float(answer[0][0]) == values[-1]


def test_reports_asked_for_under_load_disturb_nothing() -> None:
    """Found late: a report that reached a worker between its waits for two rings made it take a token twice."""

    def slow(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        time.sleep(0.001)
        return x + y

    stages = [local("a", double, "x", "u"), local("b", increment, "u", "v"), local("c", slow, "u v", "y", queue_depth=1)]
    with Pipeline(stages, ["x"], ["y", "v"], max_in_flight=8) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(16)]
        for number in range(16, 100):
            futures.append(pipeline.submit(request(number)))
            pipeline.stats()
        assert [float(future.result(10)[0][0]) for future in futures] == [4 * number + 1 for number in range(100)]


def test_a_request_keeps_the_number_that_its_sender_gave_in_errors_and_records() -> None:
    with Pipeline([local("a", fail_on_7, "x", "y")], ["x"], ["y"]) as pipeline:
        right, wrong = (pipeline.submit_unbounded(request(value), number=number) for value, number in ((1, 40), (7, 90)))
        assert right.result(10)[0][0] == 2
        with pytest.raises(StageError, match="failed on request 90"):
            wrong.result(10)
        assert (right.number, wrong.number) == (40, 90)
        assert [[event.number for event in events] for events in pipeline.events()] == [[40, 90]]


def test_a_report_that_came_too_late_is_not_taken_for_the_next() -> None:
    with Pipeline([local("a", double, "x", "y")], ["x"], ["y"]) as pipeline:
        pipeline.run(request(0))
        deployment = pipeline._transport.deployment
        begin(deployment.workers[0], "during a report", StageWorker.events, False)  # and nobody waits for the reply
        assert deployment.workers[0].connection.poll(20)
        pipeline.run_many([request(number) for number in range(3)])
        assert [len(events) for events in pipeline.events()] == [4]


def test_a_request_that_kills_twice_is_given_up_and_the_others_go_on() -> None:
    stages = [local("a", increment, "x", "u"), local("b", Once(8, 2), "u", "y")]
    with Pipeline(stages, ["x"], ["y"]) as pipeline:
        futures = [pipeline.submit(request(number)) for number in range(20)]
        for number, future in enumerate(futures):
            if number != 7:
                assert future.result(10)[0][0] == number + 2
        with pytest.raises(
            WorkerError, match=r"stage 'b' \(replica 0, device 'null:0'\) died while it ran request 7; .* given up"
        ):
            futures[7].result(10)
        assert pipeline.stats().restarts == 2


@pytest.mark.timeout(30)
def test_a_request_that_comes_while_an_idle_pipeline_recovers_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    recovering, asked = threading.Event(), threading.Event()
    replace_dead, enter = Recovery.replace_dead, WaitingRoom.enter

    def replace(*args: Any) -> Any:
        recovering.set()
        assert asked.wait(20)
        return replace_dead(*args)

    def ask(*args: Any) -> bool:
        asked.set()  # the lock is held, and is free once it waits
        return enter(*args)

    monkeypatch.setattr(Recovery, "replace_dead", replace)
    monkeypatch.setattr(WaitingRoom, "enter", ask)
    with Pipeline([spawned("a", "increment", "x", "y")], ["x"], ["y"], queue_capacity=0) as pipeline:
        os.kill(pipeline.pids[0], signal.SIGKILL)
        assert recovering.wait(20)
        assert pipeline.submit(request(1)).result(20)[0][0] == 2


def test_close_ends_all_that_it_holds_also_when_it_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate()
    pipeline = Pipeline([local("a", gate, "x", "y")], ["x"], ["y"])
    future = pipeline.submit(request(0))

    def interrupt(*_: object) -> None:
        threading.Timer(0.1, gate.opened.set).start()
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline._admission, "wait_until", interrupt)
    with pytest.raises(KeyboardInterrupt):
        pipeline.close()
    assert [thread.name for thread in threading.enumerate() if thread.name in ("autosplit-rings", "a/0 on null:0")] == []
    assert future.done()


@pytest.mark.parametrize(
    "inputs,fault",
    [
        ([], "0 inputs were given, and the pipeline takes 1: x"),
        (None, "a request is a list of tensors, one for each input, but is NoneType"),
        (torch.zeros(1, 4), "a request is a list of tensors, one for each input, but is one tensor"),
        ([torch.zeros(3)], r"'x' is float32\[3\], and float32\[4\] is expected"),
        ([torch.zeros(4, dtype=torch.int64)], r"'x' is int64\[4\], and float32\[4\] is expected"),
        ([torch.zeros(4, device="meta")], r"'x' is torch.strided on meta, and a dense float32\[4\] is expected"),
        ([torch.zeros(4).to_sparse()], r"'x' is torch.sparse_coo on cpu, and a dense float32\[4\] is expected"),
        ([torch.zeros(4).numpy()], r"'x' is ndarray, and a dense float32\[4\] is expected"),
    ],
)
def test_inputs_that_do_not_fit_hurt_nobody_else(inputs: list[torch.Tensor], fault: str) -> None:
    with Pipeline([local("a", double, "x", "y")], ["x"], ["y"]) as pipeline:
        with pytest.raises(UsageError, match=fault):
            pipeline.submit(inputs)
        assert pipeline.run(request(1))[0][0] == 2


def test_an_input_that_no_stage_reads_must_be_a_tensor_too() -> None:
    with Pipeline([local("a", double, "x", "y")], ["x", "z"], ["y", "z"], max_in_flight=1) as pipeline:
        with pytest.raises(UsageError, match="input 'z' is NoneType, and a dense tensor is expected"):
            pipeline.submit([*request(1), None])  # type: ignore[list-item]
        futures = [pipeline.submit([*request(number), *request(number)]) for number in range(3)]
        assert [float(future.result(10)[1][0]) for future in futures] == [0, 1, 2]


def test_settings_out_of_range_hurt_nobody_else() -> None:
    gate = Gate()
    with Pipeline([local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=9) as pipeline:
        futures = [pipeline.submit(request(0))]
        for priority in ("high", 1.5):
            with pytest.raises(UsageError, match="priority must be a whole number, lower is sooner, but is "):
                pipeline.submit(request(0), priority=priority)  # type: ignore[arg-type]
        futures += [pipeline.submit(request(1), priority=sign * 2**70, deadline_s=1e300) for sign in (1, -1)]
        gate.opened.set()
        assert [float(future.result(10)[0][0]) for future in futures] == [1, 2, 2]


def test_a_callback_that_exits_or_waits_for_its_own_pipeline_hurts_nobody_else(caplog: pytest.LogCaptureFixture) -> None:
    with Pipeline([local("a", Gate(), "x", "y")], ["x"], ["y"], max_in_flight=1, queue_capacity=1) as pipeline:
        seen: list[str] = []

        def wait(task: Any) -> Any:
            def callback(done: "Future[Any]") -> None:
                with pytest.raises(UsageError, match="a callback of an answer cannot wait for the same pipeline, nor close it"):
                    task()
                seen.append(task.__name__)

            return callback

        def run() -> None:
            pipeline.run(request(1))

        def run_many() -> None:
            pipeline.run_many([request(1)])

        def submit() -> None:
            for _ in range(3):
                pipeline.submit(request(1))

        gate = pipeline.wiring.stages[0].module.function  # type: ignore[attr-defined]
        for callback in (lambda done: sys.exit(), wait(run), wait(run_many), wait(submit), wait(pipeline.close)):
            gate.opened.clear()
            future = pipeline.submit(request(0))
            future.add_done_callback(callback)
            gate.opened.set()
            assert future.result(10)[0][0] == 1 and pipeline.run(request(2))[0][0] == 3
        assert seen == ["run", "run_many", "submit", "close"] and "a callback of request 0 ended its thread" in caplog.text


def test_limits_of_months_are_waited_for() -> None:
    gate = Gate()
    with Pipeline([local("a", gate, "x", "y", hang_s=1e9)], ["x"], ["y"], max_in_flight=1) as pipeline:
        first = pipeline.submit(request(0))
        gate.entered.acquire()
        second = pipeline.submit(request(1), deadline_s=1e8)  # it waits in the queue
        threading.Timer(0.05, gate.opened.set).start()
        third = pipeline.submit(request(3), timeout_s=math.inf)  # there is no room for it
        assert [float(future.result(10)[0][0]) for future in (first, second, third)] == [1, 2, 4]
        assert pipeline.run(request(2))[0][0] == 3
    with Pipeline([local("a", Once(1, 1), "x", "y", 2, hang_s=1e9)], ["x"], ["y"]) as pipeline:
        answers = pipeline.run_many([request(number) for number in range(4)])  # one is paused while the other is replaced
        assert [float(answer[0][0]) for answer in answers] == [1, 2, 3, 4]
        assert pipeline.restarts == 1


def test_a_parameter_group_of_no_stage_is_refused() -> None:
    with pytest.raises(PlanError, match="group 'g' names 'none'; the stages are: a"):
        Pipeline([local("a", double, "x", "y")], ["x"], ["y"], groups={"g": ["a", "none"]})


def test_stats_add_up_and_can_be_cleared() -> None:
    with Pipeline([local("a", double, "x", "u", 2), local("b", increment, "u", "y")], ["x"], ["y"]) as pipeline:
        pipeline.run_many([request(number) for number in range(10)])
        stats = pipeline.stats(clear=True)
        assert [stage.busy.count for stage in stats.stages] == [5, 5, 10]
        assert stats.num_requests == stats.latency.count == 10
        assert 0 < stats.bottleneck_s < stats.latency.max_s
        assert [row["stage"] for row in stats.rows()] == ["a", "a", "b"]
        assert "10 requests" in stats._repr_html_() and len(stats.frame()) == 3 and stats.to_dict()["restarts"] == 0
        assert pipeline.stats().num_requests == 0


def test_no_request_is_lost_between_two_stats(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipeline([local("a", double, "x", "y")], ["x"], ["y"]) as pipeline:
        reports = pipeline.reports

        def answered_meanwhile(*, clear: bool) -> list[WorkerReport]:
            pipeline.run(request(1))
            return reports(clear=clear)

        pipeline.run(request(0))
        monkeypatch.setattr(pipeline, "reports", answered_meanwhile)
        first = pipeline.stats(clear=True)
        monkeypatch.setattr(pipeline, "reports", reports)
        assert first.num_requests + pipeline.stats().num_requests == 2

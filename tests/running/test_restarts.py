"""Deaths are counted for each worker, or blamed on a request; only a stage that cannot run at all ends its pipeline."""

import queue
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from pipelines import NULL, Gate, Once, increment, local, request, spec

from autosplit.errors import BackendError, DeadlineError, RefusedError, UsageError, WorkerError
from autosplit.running.modules import LocalFunction
from autosplit.running.nullworker import SimulatedDeath
from autosplit.running.pipeline import Pipeline
from autosplit.running.recovery import LONGEST_PAUSE_S, WINDOW_S, RestartHistory
from autosplit.running.stage import StagePlacement
from autosplit.serving.hostmanager import HostManager

pytestmark = pytest.mark.timeout(60)


def after(count: int, num_done: int = 0, up_s: float = 0.0, idle: bool = False) -> RestartHistory:
    """The history after so many equal deaths."""
    history = RestartHistory()
    for _ in range(count):
        history = history.after(num_done, up_s, idle)
    return history


def test_pauses_grow_with_deaths_that_bring_nothing_and_end_with_progress() -> None:
    assert [after(count).pause_s for count in range(5)] == [0, 0, 0.1, 0.2, 0.4]
    assert after(20).pause_s == LONGEST_PAUSE_S
    assert after(20).after(1, 0.0, idle=False) == RestartHistory(num_done=1, num_deaths=1)
    assert after(20).after(0, WINDOW_S, idle=False) == RestartHistory(num_deaths=1, num_fruitless=1)


def test_deaths_that_hold_up_no_request_never_add_up_to_giving_up() -> None:
    record = after(20, up_s=1.0, idle=True)
    assert record.num_fruitless == 0 and record.pause_s == LONGEST_PAUSE_S


@dataclass(frozen=True, slots=True)
class Loading(LocalFunction):
    """A function whose worker calls ``on_load`` with 0, 1, 2 ... each time it loads the stage."""

    on_load: Callable[[int], None] = field(default=lambda count: None, kw_only=True)
    loads: list[int] = field(default_factory=list, kw_only=True)

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> Any:
        self.loads.append(len(self.loads))
        self.on_load(self.loads[-1])
        return LocalFunction.load(self, threads, device, shared)


def stage(module: LocalFunction, replicas: int = 1) -> StagePlacement:
    return StagePlacement("a", module, (spec("x"),), (spec("y"),), (NULL,) * replicas)


def dies_while_it_loads(*counts: int) -> Callable[[int], None]:
    def on_load(count: int) -> None:
        if count in counts:
            raise SimulatedDeath

    return on_load


def test_requests_that_crash_their_worker_fail_alone_however_many_there_are() -> None:
    with Pipeline([local("a", Once(7, 99), "x", "y"), local("b", increment, "y", "z")], ["x"], ["z"]) as pipeline:
        futures = [pipeline.submit(request(7 if k % 2 else k)) for k in range(12)]
        for k, future in enumerate(futures):
            if k % 2:
                assert f"while it ran request {k}; the request was tried 2 times and is given up" in str(future.exception(20))
            else:
                assert future.result(20)[0][0] == k + 2
        assert pipeline.failure is None and pipeline.restarts == 12


def test_a_result_that_was_handed_over_during_a_recovery_is_not_computed_again() -> None:
    """A slow stage made no progress while one before it died again and again: each time its result was thrown away."""
    slow, dying, busy = Gate(), Once(1, 1), threading.Event()

    def first(x: torch.Tensor) -> torch.Tensor:
        if x[0] == 1:
            busy.wait(20)  # the next stage has begun the request before
        return dying(x)

    stages = [local("a", first, "x", "y"), local("b", slow, "y", "z")]
    with Pipeline(stages, ["x"], ["z"]) as pipeline:
        futures = [pipeline.submit(request(k)) for k in range(3)]
        assert slow.entered.acquire(timeout=20)
        busy.set()
        while pipeline._transport.deployment.workers[0].alive():
            time.sleep(0.001)
        slow.opened.set()
        assert [float(future.result(20)[0][0]) for future in futures] == [2, 3, 4]
    assert slow.seen == [1, 2, 3]


def test_a_callback_of_a_request_that_expired_during_a_recovery_may_ask_for_statistics() -> None:
    loading, expired = threading.Event(), threading.Event()

    def on_load(count: int) -> None:
        if count:
            loading.set()
            expired.wait(20)

    with Pipeline([stage(Loading(Once(0, 1), on_load=on_load))], ["x"], ["y"], max_in_flight=1) as pipeline:
        first = pipeline.submit(request(0))
        assert loading.wait(20)
        late = pipeline.submit(request(1), deadline_s=0.01)
        restarts: queue.Queue[int] = queue.Queue()
        late.add_done_callback(lambda done: restarts.put(pipeline.stats().restarts))
        time.sleep(0.02)
        expired.set()
        assert first.result(20)[0][0] == 1 and isinstance(late.exception(20), DeadlineError) and restarts.get(timeout=20) == 1


def test_a_worker_that_dies_while_it_loads_is_tried_again() -> None:
    module = Loading(Once(3, 1), on_load=dies_while_it_loads(1, 2, 3))
    with Pipeline([stage(module)], ["x"], ["y"], max_restarts=3) as pipeline:
        assert [float(answer[0][0]) for answer in pipeline.run_many([request(k) for k in range(6)])] == [1, 2, 3, 4, 5, 6]
        assert pipeline.restarts == 4


def test_a_stage_that_cannot_be_loaded_ends_the_pipeline_and_it_can_be_opened_again() -> None:
    gate, deadly = Gate(), Once(0, 9)
    module = Loading(lambda x: deadly(gate(x) - 1), on_load=dies_while_it_loads(*range(1, 5)))
    with Pipeline([stage(module)], ["x"], ["y"], max_restarts=2, max_in_flight=2, queue_capacity=40) as pipeline:
        with pytest.raises(UsageError, match="the pipeline runs and need not be opened again"):
            pipeline.reopen()
        failed: list[int] = []
        futures = [pipeline.submit(request(k), priority=k % 3) for k in range(20)]
        for k, future in enumerate(futures):
            future.add_done_callback(lambda done, k=k: failed.append(k))
        gate.opened.set()
        text = str(futures[0].exception(20))
        assert "failed while it loaded" in text and "gives up after 2 restarts of that worker without progress" in text
        assert all(isinstance(future.exception(20), WorkerError) for future in futures)
        waiting = [k for k in failed if k > 1]
        assert waiting == sorted(waiting, key=lambda k: (k % 3, k))  # in the order in which they would have been fed
        with pytest.raises(WorkerError, match="gives up"):
            pipeline.submit(request(1))
        with pytest.raises(WorkerError, match="died during loading") as died:
            pipeline.reopen()
        assert died.value.backend == "local"
        with pytest.raises(WorkerError, match="gives up"):
            pipeline.run(request(1))
        pipeline.reopen()
        assert pipeline.run(request(4))[0][0] == 5 and pipeline.failure is None and pipeline.restarts == 3
    with pytest.raises(RefusedError, match="the pipeline is closed and cannot be opened again"):
        pipeline.reopen()


def test_a_stage_that_says_why_it_cannot_be_loaded_ends_the_pipeline_at_once() -> None:
    def on_load(count: int) -> None:
        if count == 1:
            raise ValueError("the weights are gone")

    with Pipeline([stage(Loading(Once(0, 1), on_load=on_load))], ["x"], ["y"]) as pipeline:
        with pytest.raises(BackendError, match="the weights are gone"):
            pipeline.run(request(0))
        pipeline.reopen()
        assert pipeline.run(request(1))[0][0] == 2


def test_a_pipeline_that_is_opened_again_answers_nothing_before_the_last_of_those_that_failed() -> None:
    answered, held = list[int](), threading.Event()
    with Pipeline([stage(Loading(Once(0, 1), on_load=dies_while_it_loads(1)))], ["x"], ["y"], max_restarts=0) as pipeline:
        futures = [pipeline.submit(request(k)) for k in range(2)]
        futures[0].add_done_callback(lambda done: held.wait(20))
        futures[1].add_done_callback(lambda done: answered.append(1))
        with pytest.raises(WorkerError):
            futures[0].result(20)

        def ask() -> None:
            while pipeline.failure is not None:
                time.sleep(0.001)
            pipeline.run(request(2))
            answered.append(2)

        asking = threading.Thread(target=ask)
        asking.start()
        threading.Timer(0.3, held.set).start()
        pipeline.reopen()
        asking.join(20)
    assert answered == [1, 2]


def test_a_network_that_has_given_up_is_opened_again_in_its_host() -> None:
    module = Loading(Once(0, 1), on_load=dies_while_it_loads(1))
    with HostManager() as host:
        host.add_network("net", [stage(module)], ["x"], ["y"], max_restarts=0)
        with pytest.raises(WorkerError, match="gives up after 0 restarts"):
            host.run("net", request(0))
        assert host.networks() == {"net": "failed"}
        host["net"].reopen()
        assert host.networks() == {"net": "ready"} and host.run("net", request(1))[0][0] == 2


@pytest.mark.parametrize("drain", [False, True])
def test_close_waits_for_no_stage_that_never_ends_to_load(drain: bool) -> None:
    loading, forever = threading.Event(), threading.Event()

    def on_load(count: int) -> None:
        if count:
            loading.set()
            forever.wait(30)

    pipeline = Pipeline([stage(Loading(Once(0, 1), on_load=on_load))], ["x"], ["y"])
    futures = [pipeline.submit(request(k)) for k in range(3)]
    assert loading.wait(20)
    if drain:
        futures[0].add_done_callback(lambda done: forever.set())
        threading.Timer(0.2, forever.set).start()
    start_s = time.monotonic()
    pipeline.close(drain=drain)
    assert time.monotonic() - start_s < 10 and all(future.done() for future in futures)
    assert drain == all(future.exception() is None for future in futures)
    forever.set()


def test_close_waits_for_no_pause_before_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autosplit.running.recovery.FIRST_PAUSE_S", 40.0)
    monkeypatch.setattr("autosplit.running.recovery.LONGEST_PAUSE_S", 40.0)
    died = threading.Event()

    def on_load(count: int) -> None:
        if count:
            died.set()
            raise SimulatedDeath

    pipeline = Pipeline([stage(Loading(Once(0, 1), on_load=on_load))], ["x"], ["y"])
    future = pipeline.submit(request(0))
    assert died.wait(20)
    pipeline.close(drain=False)
    assert "the pipeline was closed" in str(future.exception(0))


@pytest.mark.parametrize("replicas", [1, 2])
def test_every_answer_comes_once_while_workers_die_at_each_second_load(replicas: int) -> None:
    """Workers die between requests and again while their successors load; callbacks tell the order of the answers."""
    armed = threading.Event()

    def die(count: int) -> None:
        if armed.is_set() and count % 2:
            raise SimulatedDeath

    def function() -> Callable[[torch.Tensor], torch.Tensor]:
        chance = random.Random(replicas)

        def increment_or_die(x: torch.Tensor) -> torch.Tensor:
            if armed.is_set() and chance.random() < 0.02:
                raise SimulatedDeath
            return x + 1

        return increment_or_die

    values = ["x", "u", "y"]
    stages = [
        StagePlacement(f"to_{made}", Loading(function(), on_load=die), (spec(read),), (spec(made),), (NULL,) * replicas)
        for read, made in pairwise(values)
    ]
    seen: list[int] = []
    with Pipeline(stages, ["x"], ["y"], max_restarts=20) as pipeline:
        armed.set()
        futures = []
        for number in range(300):
            futures.append(pipeline.submit(request(number)))
            futures[-1].add_done_callback(lambda _, number=number: seen.append(number))  # type: ignore[misc]
        answers = [None if future.exception(60) else float(future.result()[0][0]) for future in futures]
        restarts = pipeline.restarts
    assert (seen if replicas == 1 else sorted(seen)) == list(range(300)) and restarts > 8
    assert all(answer in (None, number + 2) for number, answer in enumerate(answers)) and answers.count(None) < 10

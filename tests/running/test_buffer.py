"""Buffers: requests whose inputs are filled in the ring, also beside other requests, deaths and the end."""

import threading
from typing import Any

import pytest
from pipelines import Gate, Once, add, double, local, request

from autosplit.errors import DeadlineError, RefusedError, UsageError
from autosplit.running.inprocess import InProcess
from autosplit.running.pipeline import Pipeline

pytestmark = pytest.mark.timeout(60)


def ask(engine: Any, number: float, **settings: Any) -> Any:
    with engine.buffer(**settings) as buffer:
        buffer.tensors[0].fill_(number)
        return buffer.submit()


@pytest.mark.parametrize("make", [Pipeline, InProcess])
@pytest.mark.parametrize("replicas", [1, 2])
def test_requests_are_filled_in_place(make: Any, replicas: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with make([local("a", double, "x", "y", replicas=replicas)], ["x"], ["y"]) as engine:
        engine.run(request(0))
        monkeypatch.setattr("autosplit.running.copying.copy_into", None)
        futures = []
        for number in range(20):
            futures += [ask(engine, number), engine.submit(request(number))]
        assert [float(future.result(10)[0][0]) for future in futures] == [2 * (k // 2) for k in range(40)]


def test_the_tensors_lie_in_the_ring_and_go_to_every_stage_that_reads_them() -> None:
    stages = [local("a", double, "x", "u"), local("b", add, "x u", "y")]
    with Pipeline(stages, ["x"], ["y", "x"]) as pipeline:
        slots = {slot.tensors[0].data_ptr() for rings in pipeline._deployment.rings for ring in rings for slot in ring.slots}
        with pipeline.buffer() as buffer:
            buffer.tensors[0].fill_(3)
            assert buffer.tensors[0].data_ptr() in slots
            future = buffer.submit(returns=lambda outputs: [float(value[0]) for value in outputs])
        assert future.result(10) == [9, 3]
        with pytest.raises(UsageError, match="submitted or given up already"):
            buffer.submit()


def test_other_requests_wait_for_a_buffer_until_it_is_submitted_or_given_up() -> None:
    with Pipeline([local("a", double, "x", "y")], ["x"], ["y"], room=2) as pipeline:
        for give_up in (False, True):
            with pipeline.buffer() as buffer:
                later = [pipeline.submit(request(number)) for number in (1, 2)]
                assert pipeline.num_waiting == 2 and not pipeline.prompt
                with pytest.raises(RefusedError):
                    pipeline.buffer(timeout_s=0)
                buffer.tensors[0].fill_(5)
                first = None if give_up else buffer.submit()
            assert [float(future.result(10)[0][0]) for future in later] == [2, 4]
            assert first is None or first.done(), "it came before them"


def test_a_buffer_has_its_turn_in_the_queue_and_may_come_too_late() -> None:
    gate = Gate()
    with Pipeline([local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1) as pipeline:
        pipeline.submit(request(0))
        assert gate.entered.acquire(timeout=10)
        waiting = pipeline.submit(request(1))
        with pytest.raises(DeadlineError):
            pipeline.buffer(deadline_s=0.01)
        with pytest.raises(RefusedError, match=r"1 requests are running \(limit 1\)"):
            pipeline.buffer(timeout_s=0.01)
        urgent = []
        thread = threading.Thread(target=lambda: urgent.append(ask(pipeline, 7, priority=-1)))
        thread.start()
        while pipeline.num_held == 0:
            pass
        gate.opened.set()
        thread.join(10)
        assert waiting.result(10)[0][0] == 2 and urgent[0].result(10)[0][0] == 8
    assert gate.seen == [0, 7, 1]


def test_a_worker_may_die_while_a_buffer_is_filled() -> None:
    gate, dies = Gate(), Once(3, 1)
    stages = [local("a", lambda x: dies(gate(x)), "x", "y")]
    with Pipeline(stages, ["x"], ["y"], max_restarts=3) as pipeline:
        first = pipeline.submit(request(2))
        assert gate.entered.acquire(timeout=10)
        with pipeline.buffer() as buffer:
            buffer.tensors[0].fill_(5)
            gate.opened.set()
            answer = first.result(20)
            assert pipeline.restarts == 1, "the worker died, and the request ran again"
            second = buffer.submit()
        last = pipeline.submit(request(6))
        assert [float(one[0][0]) for one in (answer, second.result(20), last.result(20))] == [4, 7, 8]


def test_a_pipeline_that_is_closed_refuses_a_buffer_that_was_filled() -> None:
    pipeline = Pipeline([local("a", double, "x", "y")], ["x"], ["y"])
    with pipeline.buffer() as buffer:
        pipeline.close()
        buffer.tensors[0].fill_(1)
        with pytest.raises(RefusedError, match="closed"):
            buffer.submit()
    with pytest.raises(RefusedError, match="closed"):
        pipeline.buffer()


def test_answers_are_read_in_the_ring_until_they_are_released(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipeline([local("a", double, "x", "y")], ["x"], ["y"], max_in_flight=2) as pipeline:
        slots = {slot.tensors[0].data_ptr() for rings in pipeline._deployment.rings for ring in rings for slot in ring.slots}
        num_slots = len(pipeline._deployment.rings[-1][0].slots)
        kept = [pipeline.submit(request(number), in_place=True) for number in range(num_slots)]
        answers = [future.result(10)[0] for future in kept]
        assert {answer.data_ptr() for answer in answers} <= slots
        waits = pipeline.submit(request(50))
        with pytest.raises(TimeoutError):
            waits.result(0.05)
        assert [float(answer[0]) for answer in answers] == [2 * number for number in range(num_slots)]
        for future in (kept[0], kept[0], *kept[2:]):
            future.release()
        assert waits.result(10)[0][0] == 100 and answers[1][0] == 2
        kept[1].release()
        assert all(pipeline.run(request(number))[0][0] == 2 * number for number in range(2 * num_slots))
        kept = [pipeline.submit(request(number), in_place=True) for number in range(num_slots)]
    assert all(future.result()[0][0] in range(0, 2 * num_slots, 2) for future in kept), "the end takes all slots back"


def test_a_lent_answer_stays_while_a_worker_dies_and_one_that_nobody_reads_is_given_back() -> None:
    gate, dies = Gate(), Once(4, 1)
    stages = [local("a", lambda x: dies(gate(x)), "x", "y", queue_depth=4)]
    with Pipeline(stages, ["x"], ["y"], max_in_flight=4, max_restarts=9) as pipeline:
        gate.opened.set()
        lent = pipeline.submit(request(1), in_place=True)
        assert lent.result(10)[0][0] == 3
        dying = [pipeline.submit(request(number), in_place=True) for number in (2, 3)]
        assert [future.result(20)[0][0].item() for future in dying] == [4, 5] and pipeline.restarts == 1
        assert lent.result()[0][0] == 3
        for future in (lent, *dying):
            future.release()
        gate.opened.clear()
        first, dropped = pipeline.submit(request(7)), pipeline.submit(request(8), in_place=True)
        assert dropped.cancel()
        gate.opened.set()
        assert first.result(10)[0][0] == 9
        assert all(pipeline.run(request(number))[0][0] == number + 2 for number in range(10, 30))
        assert pipeline.restarts == 1

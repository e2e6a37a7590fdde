"""What every transport of an engine must do; a test class for each transport inherits these stories."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from pipelines import Gate, fail_on_7, increment, request, wait_until

from autosplit.errors import DeadlineError, RefusedError, StageError, UsageError
from autosplit.running.engine import Engine

ROOM = 3
LIMIT_S = 20.0

WIDTHS = (1, 2, 64)
"""Sizes of the variants beside ``WIDTH``; the last one is larger, as a variant may be in one of several values."""

MIXED = [1, 64, 4, 2, 2, 64, 1, 4, 4, 64, 2, 1]
"""The sizes of requests that run beside each other."""


def number_of(future: Any) -> float:
    """The first element of an answer."""
    return float(future.result(LIMIT_S)[0][0])


def num_descriptors() -> int:
    """Open descriptors of this process."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class TransportContract:
    """The stories. Each subclass says how an engine over its transport is opened."""

    def open(self, function: Callable[..., Any], replicas: int = 1, widths: Sequence[int] = ()) -> Engine:
        """An engine with ``replicas`` copies of one stage, whose queue has ``ROOM`` places and which is on null devices.

        ``widths``: sizes of its vectors beside ``WIDTH``, each of them a variant.
        """
        raise NotImplementedError

    @contextmanager
    def full(self, gate: Gate, widths: Sequence[int] = ()) -> Iterator[tuple[Engine, list[Any], int]]:
        """An engine that can send no more: the engine, the futures of its running requests, the number of the next request."""
        with self.open(gate, widths=widths) as engine:
            running = [engine.submit(request(number)) for number in range(engine.max_in_flight)]
            assert gate.entered.acquire(timeout=LIMIT_S)
            wait_until(lambda: not engine.occupancy.num_waiting)
            try:
                yield engine, running, engine.max_in_flight
            finally:
                gate.opened.set()

    def test_every_way_to_ask_gives_the_answers_in_the_order_of_submission(self) -> None:
        with self.open(increment, 2) as engine:
            requests, expected = [request(number) for number in range(20)], [number + 1.0 for number in range(20)]
            assert [number_of(future) for future in [engine.submit(inputs) for inputs in requests]] == expected
            assert [float(answer[0][0]) for answer in engine.run_many(requests)] == expected
            assert [float(answer[0][0]) for answer in engine.stream(iter(requests))] == expected
            here = engine.occupancy
            assert here.num_answered == 60 and here.num_running == here.num_waiting == here.num_held == 0
            stats = engine.stats(clear=True)
            assert stats.num_requests == stats.latency.count == 60 and engine.stats().num_requests == 0

    def test_an_answer_waits_for_no_other_request(self) -> None:
        gate = Gate()
        with self.open(lambda x: gate(x) if x[0] == 0 else x + 1, 2) as engine:
            held, other = engine.submit(request(0)), engine.submit(request(1))
            assert number_of(other) == 2 and not held.done()
            gate.opened.set()
            assert number_of(held) == 1

    def test_a_full_queue_refuses_with_numbers_or_times_out_or_blocks(self) -> None:
        gate = Gate()
        with self.full(gate) as (engine, futures, most):
            futures += [engine.submit(request(most + number)) for number in range(ROOM)]
            refusal = rf"{most} requests are running \(limit {most}\) and {ROOM} are waiting \(limit {ROOM}\)"
            assert not engine.returns_immediately
            for timeout_s in (0, 0.05):
                begun_s = time.monotonic()
                with pytest.raises(RefusedError, match=refusal):
                    engine.submit(request(99), timeout_s=timeout_s)
                assert time.monotonic() - begun_s >= timeout_s
            threading.Timer(0.05, gate.opened.set).start()
            futures.append(engine.submit(request(most + ROOM)))
            assert [number_of(future) for future in futures] == [number + 1 for number in range(most + ROOM + 1)]

    def test_lower_priorities_leave_the_queue_first_then_arrival_counts(self) -> None:
        gate = Gate()
        with self.full(gate) as (engine, futures, most):
            futures += [engine.submit(request(most + number), priority=priority) for number, priority in enumerate((5, 0, 5))]
            gate.opened.set()
            assert [number_of(future) for future in futures] == [number + 1 for number in range(most + 3)]
            urgent, first, second = futures[most + 1], futures[most], futures[most + 2]
            assert urgent.number < first.number < second.number

    def test_inputs_of_waiting_requests_may_be_overwritten(self) -> None:
        gate = Gate()
        with self.full(gate) as (engine, _, most):
            [value] = request(most)
            future = engine.submit([value])
            value.fill_(99)
            gate.opened.set()
            assert number_of(future) == most + 1

    def test_a_waiting_request_past_its_deadline_fails_alone(self) -> None:
        gate = Gate()
        with self.full(gate) as (engine, futures, most):
            late, patient = engine.submit(request(50), deadline_s=0.02), engine.submit(request(51), deadline_s=600)
            time.sleep(0.05)
            gate.opened.set()
            with pytest.raises(DeadlineError, match="while it waited in the admission queue"):
                late.result(LIMIT_S)
            assert number_of(patient) == 52 and [number_of(future) for future in futures] == [n + 1 for n in range(most)]
            assert 50 not in gate.seen

    def test_a_cancelled_request_leaves_the_queue(self) -> None:
        gate = Gate()
        with self.full(gate) as (engine, futures, most):
            waiting = engine.submit(request(50))
            assert waiting.cancel() and engine.occupancy.num_waiting == 0
            gate.opened.set()
            with pytest.raises(CancelledError):
                waiting.result(LIMIT_S)
            assert [number_of(future) for future in futures] == [number + 1 for number in range(most)] and 50 not in gate.seen

    def test_many_requests_of_one_caller_take_no_places_from_others(self) -> None:
        gate = Gate()
        with self.full(gate) as (engine, _, most):
            caller = threading.Thread(target=lambda: engine.run_many([request(number) for number in range(9)]))
            caller.start()
            wait_until(lambda: engine.occupancy.num_held == 9)
            future = engine.submit(request(9), priority=-1, timeout_s=0)
            here = engine.occupancy
            assert (here.num_running, here.num_waiting, here.num_held) == (most, 1, 9)
            gate.opened.set()
            caller.join(LIMIT_S)
            assert number_of(future) == 10 and engine.occupancy.num_held == 0

    def test_requests_of_several_sizes_keep_their_shapes_and_their_order(self) -> None:
        with self.open(increment, 2, WIDTHS) as engine:
            requests = [request(number, width) for number, width in enumerate(MIXED)]
            for answers in ([engine.submit(inputs) for inputs in requests], engine.run_many(requests), engine.stream(requests)):
                found = [one if isinstance(one, tuple) else one.result(LIMIT_S) for one in answers]
                assert [tuple(value.shape) for (value,) in found] == [(width,) for width in MIXED]
                assert [set(value.tolist()) for (value,) in found] == [{number + 1.0} for number in range(len(MIXED))]
            for width in (0, 3, max(WIDTHS) + 1):
                with pytest.raises(UsageError, match=r"exactly the shapes of one of 4 variants: 'x' \[4\]; 'x' \[1\]; 'x' \[2\]"):
                    engine.submit(request(0, width))
            with pytest.raises(UsageError, match=r"'x' is int64\[2\], and float32\[2\] is expected"):
                engine.submit([torch.zeros(2, dtype=torch.int64)])

    def test_waiting_requests_of_several_sizes_are_copied_and_refused_like_others(self) -> None:
        gate = Gate()
        with self.full(gate, WIDTHS) as (engine, futures, most):
            waiting = [request(most + number, width) for number, width in enumerate(WIDTHS)]
            futures += [engine.submit(inputs) for inputs in waiting]
            for [value] in waiting:
                value.fill_(99)
            with pytest.raises(RefusedError, match=f"{ROOM} are waiting"):
                engine.submit(request(99, WIDTHS[0]), timeout_s=0)
            gate.opened.set()
            assert [number_of(future) for future in futures] == [number + 1 for number in range(most + ROOM)]
            assert [len(future.result()[0]) for future in futures[-ROOM:]] == list(WIDTHS)

    def test_a_stage_that_raises_fails_its_own_request_whatever_the_sizes_of_others(self) -> None:
        with self.open(fail_on_7, 2, WIDTHS) as engine:
            futures = [engine.submit(request(number, width)) for number, width in enumerate(MIXED)]
            with pytest.raises(StageError, match="seven is not for me"):
                futures[7].result(LIMIT_S)
            found = [(len(future.result(LIMIT_S)[0]), number_of(future)) for future in futures if future is not futures[7]]
            assert found == [(width, number + 1) for number, width in enumerate(MIXED) if number != 7]

    def test_a_callback_cannot_wait_for_its_own_engine(self) -> None:
        gate, refusals, asked = Gate(), list[UsageError](), threading.Event()
        with self.full(gate) as (engine, futures, _):

            def ask(_: Any) -> None:
                for task in (lambda: engine.run(request(1)), engine.close):
                    with pytest.raises(UsageError, match="a callback of an answer cannot wait") as caught:
                        task()
                    refusals.append(caught.value)
                asked.set()

            futures[0].add_done_callback(ask)
            gate.opened.set()
            assert asked.wait(LIMIT_S)  # another copy may answer its request, and the engine be closed, before this one asks
            assert number_of(futures[-1]) == len(futures) and engine.run(request(3))[0][0] == 4
            assert len(refusals) == 2

    @pytest.mark.parametrize("drain", [True, False])
    def test_close_drains_or_fails_what_it_holds(self, drain: bool) -> None:
        gate = Gate()
        with self.full(gate) as (engine, futures, number):
            futures += [engine.submit(request(number + place)) for place in range(ROOM)]
            opener = threading.Thread(target=lambda: (wait_until(lambda: not engine._admission.is_open), gate.opened.set()))
            opener.start()
            engine.close(drain=drain)
            engine.close()
            opener.join(LIMIT_S)
        assert all(future.done() for future in futures)
        if drain:
            assert [number_of(future) for future in futures] == [number + 1 for number in range(len(futures))]
        else:
            with pytest.raises(RefusedError, match="closed before the request was done"):
                futures[-1].result(0)
        with pytest.raises(RefusedError, match="the pipeline is closed"):
            engine.submit(request(0))

    def test_nothing_is_left_after_the_end(self) -> None:
        with self.open(increment) as engine:  # libraries may start threads of their own at first
            engine.run(request(0))
        threads, num_fds = set(threading.enumerate()), num_descriptors()
        with self.open(increment, 2, WIDTHS) as engine:
            engine.run_many([request(number, width) for number, width in enumerate(MIXED)])
        wait_until(lambda: set(threading.enumerate()) <= threads and num_descriptors() <= num_fds)

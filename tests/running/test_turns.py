"""In whatever order requests, cancellations, deaths and the end come, every future resolves and ``close`` returns."""

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError
from random import Random
from typing import Any

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import local, request, wait_until

from autosplit.errors import AutosplitError, RefusedError, UsageError
from autosplit.running.nullworker import SimulatedDeath
from autosplit.running.request import AnswerFuture
from autosplit.serving.hostmanager import HostManager
from autosplit.values.plan import Process

pytestmark = pytest.mark.timeout(120)

DEADLY = -1
LIMIT_S = 20.0
"""Seconds within which all ends on a busy machine."""


class Interleaving:
    """A network whose callers do one thing after another: a method is a step."""

    def __init__(self, process: Process, **options: Any) -> None:
        self.host = HostManager()
        stage = local("a", self.compute, "x", "y", replicas=2)
        self.engine = self.host.add_network("net", [stage], ["x"], ["y"], process=process, queue_capacity=3, **options)
        self.futures: dict[AnswerFuture, int] = {}
        self.threads: list[threading.Thread] = []
        self.permits = threading.Semaphore(0)
        self.closing = False
        self.must_drain = True
        """Whether every request must be answered."""

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        """The stage: double, once it is permitted."""
        if x[0] == DEADLY:
            raise SimulatedDeath
        self.permits.acquire(timeout=LIMIT_S)
        return 2 * x

    def submit(self, number: int | None = None) -> None:
        """Submit a request, which may be refused."""
        number = len(self.futures) if number is None else number
        with contextlib.suppress(RefusedError):
            self.futures[self.engine.submit(request(number), timeout_s=0)] = number

    def submit_a_deadly_one(self) -> None:
        """Submit a request that ends its worker."""
        self.submit(DEADLY)

    def cancel(self) -> None:
        """Cancel the newest request."""
        if self.futures:
            list(self.futures)[-1].cancel()

    def answer(self) -> None:
        """Permit one answer."""
        self.permits.release()

    def close(self, drain: bool = True) -> None:
        """Let a thread close the network, and go on once it is closed."""
        self.end(functools.partial(self.engine.close, drain=drain), drain)

    def fail(self) -> None:
        """Let a thread close the network at once."""
        self.close(drain=False)

    def remove(self) -> None:
        """Let a thread remove the network from its host."""
        self.end(functools.partial(self.host.remove_network, "net"), True)

    def end(self, ending: Callable[[], None], drain: bool) -> None:
        """Run ``ending`` in a thread, and go on once requests are refused."""
        if not self.closing:
            self.closing, self.must_drain = True, drain
            thread = self.start(ending)
            wait_until(lambda: self.refuses() or not thread.is_alive())

    def refuses(self) -> bool:
        """Whether the network is closed; a request that shows that it is open counts as all others."""
        try:
            future = self.engine.submit(request(70), timeout_s=0)
        except RefusedError as refusal:
            return "closed" in str(refusal)
        self.futures[future] = 70
        return False

    def start(self, target: Callable[[], None]) -> threading.Thread:
        """A thread, which must have ended in the end."""
        self.threads.append(threading.Thread(target=target, daemon=True))
        self.threads[-1].start()
        return self.threads[-1]

    def check(self) -> None:
        """Close the network, and look at what became of its requests."""
        self.close()
        self.permits.release(1000)
        for thread in self.threads:
            thread.join(LIMIT_S)
            assert not thread.is_alive(), "a thread waits for ever"
        for future, number in self.futures.items():
            assert future.done()
            try:
                assert future.result(0)[0][0] == 2 * number
            except (AutosplitError, CancelledError):
                assert number == DEADLY or future.cancelled() or not self.must_drain
        with contextlib.suppress(UsageError):  # it was removed
            self.host.close()


STEPS = [
    Interleaving.submit,
    Interleaving.submit,
    Interleaving.submit_a_deadly_one,
    Interleaving.cancel,
    Interleaving.answer,
    Interleaving.close,
    Interleaving.fail,
    Interleaving.remove,
]


@settings(max_examples=examples(40))
@given(
    steps=st.lists(st.sampled_from(STEPS), max_size=12),
    options=st.sampled_from([{}, {"max_in_flight": 1}]),
)
def test_every_future_resolves_and_close_returns_in_any_order_of_steps(
    steps: list[Callable[[Interleaving], None]], options: dict[str, Any]
) -> None:
    network = Interleaving("workers", max_restarts=100, **options)
    for step in steps:
        step(network)
    network.check()


@settings(max_examples=examples(30))
@given(steps=st.lists(st.sampled_from(STEPS), max_size=12))
def test_it_holds_in_the_callers_process_too(steps: list[Callable[[Interleaving], None]]) -> None:
    network = Interleaving("caller")
    for step in steps:
        step(network)
    network.check()


@pytest.mark.parametrize("process", ["workers", "caller"])
@pytest.mark.parametrize("seed", range(3))
def test_threads_may_do_all_of_it_at_once(process: Process, seed: int) -> None:
    network = Interleaving(process, **({"max_restarts": 100} if process == "workers" else {}))
    steps = [step for step in STEPS[:-3] if process == "workers" or step is not Interleaving.submit_a_deadly_one]

    def run(seed: int) -> None:
        random = Random(seed)
        for _ in range(40):
            with contextlib.suppress(IndexError, RuntimeError):  # another thread added a request
                random.choice(steps)(network)

    network.permits.release(1000)
    callers = [threading.Thread(target=run, args=(4 * seed + number,), daemon=True) for number in range(4)]
    for caller in callers:
        caller.start()
    random = Random(seed)
    time.sleep(random.uniform(0.0, 0.05))
    random.choice(STEPS[-3:])(network)
    for caller in callers:
        caller.join(LIMIT_S)
        assert not caller.is_alive()
    network.check()

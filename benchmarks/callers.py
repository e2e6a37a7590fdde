"""Callers of one network, in several threads: they submit and cancel at random."""

import contextlib
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from autosplit.errors import RefusedError, WorkerError
from autosplit.running.engine import Engine
from autosplit.running.request import AnswerFuture

NUM_THREADS = 6


class Callers:
    """Threads that use a network until it is closed.

    Args:
        engine: takes requests of four floats.
        seed: of all that the threads do.
        tells: called with a sentence for each exception that no caller should see.

    Attributes:
        asked: the number in each request that was taken in, with its future.
    """

    def __init__(self, engine: Engine, seed: int, tells: Callable[[str], None]) -> None:
        self.asked: list[tuple[int, AnswerFuture]] = []
        self._engine, self._tells = engine, tells
        self._closed = threading.Event()
        self._threads = [
            threading.Thread(target=self._call, args=(random.Random(NUM_THREADS * seed + number),), name="caller", daemon=True)
            for number in range(NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def join(self, limit_s: float) -> bool:
        """Wait for the end of all threads, which end with the network; False if one of them still waits after ``limit_s``."""
        self._closed.set()
        until_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _call(self, chance: random.Random) -> None:
        while not self._closed.is_set():
            try:
                self._act(chance)
            except (RefusedError, WorkerError):  # no room in time, closed, or the pipeline has given up
                time.sleep(1e-3)
            except Exception as failure:
                self._tells(f"a caller saw {failure!r}")
                return

    def _act(self, chance: random.Random) -> None:
        number, timeout_s = chance.randrange(1000), chance.choice([None, 0.0, 0.01])
        match chance.choice(["submit", "submit", "submit", "cancel"]):
            case "submit":
                self.asked.append((number, self._engine.submit([as_request(number)], timeout_s=timeout_s)))
            case "cancel":
                with contextlib.suppress(IndexError):
                    self.asked[-1][1].cancel()
        if chance.random() < 0.1:
            with contextlib.suppress(Exception):  # it is judged in the end
                self.asked[chance.randrange(len(self.asked))][1].result(0.05)


def as_request(number: int, what: float = 0.0) -> torch.Tensor:
    """A request: its number, and what the stage is to do beside adding 1."""
    return torch.tensor([float(number), what, 0.0, 0.0])


def verdict(number: int, future: "AnswerFuture", num_stages: int) -> tuple[str, str] | None:
    """The count and the story of a request that did not end as it may; None for all others."""
    if not future.done():
        return "unresolved", f"request {number} has no answer after the network was closed"
    failure: Any = None if future.cancelled() else future.exception(0)
    if future.cancelled() or isinstance(failure, (RefusedError, WorkerError)):
        return None
    if failure is not None:
        return "lost", f"request {number}: {failure!r}"
    value = float(future.result()[0][0])
    return None if value == number + num_stages else ("wrong", f"request {number} has the answer {value:g}")

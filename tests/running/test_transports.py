"""The contract of a transport, for workers joined by rings, and for copies and streams in the caller's process."""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract import LIMIT_S, ROOM, TransportContract, number_of
from pipelines import at_widths, fail_on_7, local, request

from autosplit.errors import StageError
from autosplit.running import callertransport
from autosplit.running.engine import Engine
from autosplit.running.modules import LocalFunction, positional
from autosplit.running.pipeline import InProcess, Pipeline

pytestmark = pytest.mark.timeout(60)


class TestRings(TransportContract):
    """Workers joined by rings."""

    def open(self, function: Callable[..., Any], replicas: int = 1, widths: Sequence[int] = ()) -> Engine:
        """Two requests in flight for each worker."""
        stage = at_widths(local("a", function, "x", "y", replicas), *widths)
        return Pipeline([stage], ["x"], ["y"], max_in_flight=2 * replicas, queue_capacity=ROOM)


class TestCaller(TransportContract):
    """Copies in the caller's process, each with a thread; for a single copy see ``test_inprocess``."""

    def open(self, function: Callable[..., Any], replicas: int = 1, widths: Sequence[int] = ()) -> Engine:
        """One request in flight for each copy."""
        stage = at_widths(local("a", function, "x", "y", max(2, replicas)), *widths)
        return InProcess([stage], ["x"], ["y"], queue_capacity=ROOM)


class Place:
    """A context with a thread for each request. Like OpenVINO it calls nothing back for a request that fails."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.run, self.threads = positional(function), list[threading.Thread]()
        self.failure: Exception | None = None

    def start(self, inputs: Sequence[torch.Tensor], done: Callable[[BaseException | None], None]) -> None:
        if inputs[0][0] == REFUSED:
            raise ValueError("this one is not for me")
        self.failure = None
        self.threads = [thread for thread in self.threads if thread.is_alive()]
        self.threads.append(threading.Thread(target=self._compute, args=(inputs, done), daemon=True))
        self.threads[-1].start()

    def _compute(self, inputs: Sequence[torch.Tensor], done: Callable[[BaseException | None], None]) -> None:
        try:
            self.made = self.run(inputs)
        except Exception as failure:
            self.failure = failure
        else:
            done(None)

    def wait(self, most_s: float = math.inf) -> bool:
        for thread in self.threads:
            thread.join(LIMIT_S if most_s == math.inf else most_s)
        if self.failure is not None:
            raise self.failure
        return not any(thread.is_alive() for thread in self.threads)

    def outputs(self) -> Sequence[torch.Tensor]:
        return self.made


class Places(LocalFunction):
    """A function as streams."""

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> Any:
        return SimpleNamespace(contexts=[Place(self.function) for _ in range(streams)])


REFUSED = 77


class TestCallerStreams(TransportContract):
    """One copy in the caller's process, whose runtime computes several requests in its own threads."""

    @pytest.fixture(autouse=True)
    def watched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(callertransport, "WATCH_S", 0.02)

    def open(self, function: Callable[..., Any], replicas: int = 1, widths: Sequence[int] = ()) -> Engine:
        """One request in flight for each stream."""
        stage = replace(local("a", function, "x", "y"), module=Places(function), streams=max(2, replicas))
        stage = at_widths(stage, *widths)
        return InProcess([stage], ["x"], ["y"], queue_capacity=ROOM)

    def test_requests_that_cannot_start_or_fail_in_silence_fail_alone_and_leave_their_places(self) -> None:
        with self.open(fail_on_7) as engine:
            for number, text in [(7, "seven is not for me"), (REFUSED, "this one is not for me")] * 2:
                others = [engine.submit(request(other)) for other in range(3)]
                with pytest.raises(StageError, match=rf"stage 'a' .* failed on request \d+: ValueError: {text}"):
                    engine.submit(request(number)).result(LIMIT_S)
                assert [number_of(future) for future in others] == [1, 2, 3]
            [stage] = engine.stats().stages
            assert (stage.num_requests, stage.num_failed) == (12, 4) and engine.occupancy.num_running == 0
            assert {worker.state for worker in engine.health()} == {"waiting"}

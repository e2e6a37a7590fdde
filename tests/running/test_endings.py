"""However a pipeline ends, every future resolves; and the thread that answers never waits for a ring."""

import contextlib
import signal
import threading
import time
from concurrent.futures import CancelledError, wait
from dataclasses import replace
from pathlib import Path

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pipelines import Gate, Once, increment, local, request, spawned, wait_until

from autosplit.errors import AutosplitError, PlanError, UsageError
from autosplit.running import hostrings
from autosplit.running.modules import LocalFunction
from autosplit.running.nullworker import SimulatedDeath
from autosplit.running.pipeline import Pipeline
from autosplit.running.provisioner import Deployment
from autosplit.running.ring import RingEnd
from autosplit.serving.hostmanager import HostManager
from autosplit.values.machine import parse_device

pytestmark = pytest.mark.timeout(60)

release = RingEnd.release


def dies_once_while_it_frees(number: int) -> "type[RingEnd.release]":
    """A ``RingEnd.release`` during which a worker dies instead of freeing the slot of one request, once."""
    left = [number]

    def release_or_die(self: RingEnd, sequence: int) -> None:
        if not self._sends and threading.current_thread().name.startswith("a/") and sequence in left:
            left.remove(sequence)
            time.sleep(0.05)  # others are answered meanwhile, and room is made for requests that want this slot
            raise SimulatedDeath
        release(self, sequence)

    return release_or_die  # type: ignore[return-value]


def test_a_worker_that_dies_between_its_answer_and_its_slot_stalls_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Request 1 is overtaken by all others in flight, so its answer makes room for four more, and one of them wants its slot.

    The thread that would have seen the death then waited a minute for the slot, and one future never resolved.
    """
    monkeypatch.setattr(RingEnd, "release", dies_once_while_it_frees(1))
    gate = Gate()
    stages = [local("a", lambda x: gate(x) if x[0] == 0 else x + 1, "x", "y")]
    with Pipeline(stages, ["x"], ["y"], max_in_flight=4, queue_capacity=40) as pipeline:
        futures = [pipeline.submit(request(k), priority=int(k == 1)) for k in range(4)]
        futures += [pipeline.submit(request(k)) for k in range(4, 40)]
        gate.opened.set()
        assert [float(future.result(10)[0][0]) for future in futures] == [k + 1 for k in range(40)]
        assert pipeline.restarts == 1


def die(*_: object, **__: object) -> None:
    raise SimulatedDeath


@settings(max_examples=examples(40), deadline=None)
@given(
    ending=st.sampled_from(["close", "fail", "crash", "exit in a callback", "deadly request", "give up"]),
    priorities=st.lists(st.integers(-1, 1), min_size=12, max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
    late=st.sets(st.integers(0, 11)),
)
def test_every_future_resolves_whatever_ends_the_pipeline(
    ending: str, priorities: list[int], cancelled: set[int], late: set[int]
) -> None:
    gate, deadly = Gate(), Once(5, 10 if ending in ("deadly request", "give up") else 0)
    stages = [local("a", gate, "x", "y", 2), local("b", lambda y: deadly(y - 1), "y", "z")]
    pipeline = Pipeline(stages, ["x"], ["z"], max_in_flight=4, queue_capacity=12, max_restarts=0)
    futures = [pipeline.submit(request(k), priority=priorities[k], deadline_s=1e-4 if k in late else None) for k in range(12)]
    if ending == "exit in a callback":
        for future in futures[:3]:
            with contextlib.suppress(SystemExit):  # where it is done already
                future.add_done_callback(lambda done: exec("raise SystemExit"))
    with pytest.MonkeyPatch.context() as patch:
        if ending == "crash":
            patch.setattr(hostrings.ResultRing, "take", lambda self: exec("raise MemoryError"))
        if ending == "give up":
            patch.setattr(LocalFunction, "load", die)
        for k in cancelled:
            with contextlib.suppress(SystemExit):  # a cancelled future calls its callbacks in this thread
                futures[k].cancel()
        gate.opened.set()
        if ending == "give up":
            wait(futures, 30)
            patch.undo()
            if pipeline.failure is not None:
                pipeline.reopen()
            assert pipeline.run(request(1))[0][0] == 2
        pipeline.close(drain=ending != "fail")
    for k, future in enumerate(futures):
        assert future.done()
        try:
            assert float(future.result(0)[0][0]) == k + 1
        except (AutosplitError, CancelledError) as failure:
            excused = cancelled | late | ({5} if ending == "deadly request" else set())
            assert ending in ("fail", "crash", "give up") or k in excused, failure


def test_an_interrupt_while_inputs_are_written_holds_up_no_other_request(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipeline([local("a", increment, "x", "y")], ["x"], ["y"]) as pipeline:
        assert pipeline.run(request(0))[0][0] == 1
        with monkeypatch.context() as patch:
            patch.setattr("autosplit.running.ring.Slot.write", lambda self, tensors, variant: exec("raise KeyboardInterrupt"))
            with pytest.raises(KeyboardInterrupt):
                pipeline.submit(request(1))
        assert pipeline.submit(request(2)).result(10)[0][0] == 3


def test_a_callback_that_exits_in_a_callers_thread_keeps_no_answer_from_others() -> None:
    gate = Gate()
    pipeline = Pipeline([local("a", gate, "x", "y")], ["x"], ["y"], max_in_flight=1)
    futures = [pipeline.submit(request(number)) for number in range(2)]
    futures[0].add_done_callback(lambda done: exec("raise SystemExit"))
    threading.Timer(0.05, gate.opened.set).start()
    with contextlib.suppress(SystemExit):  # it is called in this thread unless request 0 is answered first
        pipeline.close(drain=False)
    assert all(future.done() for future in futures)


def test_ctrl_c_while_the_end_is_waited_for_kills_a_worker_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker had 5 s to end in good order, also after Ctrl-C, which took 12 s once under load."""
    pipeline = Pipeline([spawned("a", "hang_on_7", "x", "y")], ["x"], ["y"])
    future, given_s, close = pipeline.submit(request(7)), [], Deployment.close
    monkeypatch.setattr(Deployment, "close", lambda *given: given_s.append(given[1]) or close(*given))

    def interrupt() -> None:
        wait_until(lambda: not pipeline._admission.is_open)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        pipeline.close()
    assert given_s == [0.5]
    assert "closed before" in str(future.exception(0)) and not any(Path(f"/proc/{pid}").exists() for pid in pipeline.pids)


def test_a_refused_removal_changes_nothing() -> None:
    refused: list[BaseException] = []

    def remove(host: HostManager, close: bool) -> None:
        try:
            host.close() if close else host.remove_network("net")
        except UsageError as failure:
            refused.append(failure)

    with HostManager() as host:
        pipeline = host.add_network("net", [local("a", increment, "x", "y")], ["x"], ["y"])
        for close in (False, True):
            answered = threading.Event()
            future = pipeline.submit(request(0))
            future.add_done_callback(lambda done, close=close, answered=answered: (remove(host, close), answered.set()))
            assert answered.wait(10)
            if not host.networks():  # the future was done before the callback was added, so this thread called, which is allowed
                break
        if len(refused) == 2:
            assert host.networks() == {"net": "ready"} and host.run("net", request(4))[0][0] == 5
            host.remove_network("net")
        assert host.networks() == {}


def test_a_refused_network_leaves_nothing_behind() -> None:
    elsewhere = replace(local("a", increment, "x", "y"), devices=(parse_device("null:1"),))
    with HostManager() as host:
        with pytest.raises(PlanError):
            host.add_network("net", [local("a", increment, "x", "y")], ["x"], ["nothing"])
        assert host.devices == {} and host.networks() == {}
        host.add_network("net", [local("a", increment, "x", "y")], ["x"], ["y"])
        for name, outputs in (("net", ["y"]), ("other", ["nothing"])):
            with pytest.raises((UsageError, PlanError)):
                host.add_network(name, [elsewhere], ["x"], outputs)
        assert list(host.devices) == ["null:0"] and list(host.networks()) == ["net"]

"""Threads that compute a tape together give what one thread gives, whoever is late, fails, forks or is interrupted."""

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from autosplit.backends import instructions, rowloops, rowteams
from autosplit.backends.instructions import Instruction, together
from autosplit.backends.rowops import prepare_look_up, prepare_norm_rows, prepare_on_rows, prepare_product


@pytest.fixture(autouse=True)
def _divided(monkeypatch):
    monkeypatch.setattr(instructions, "SHARE", 1)


class Layer:
    """A tape of every kind of instruction, and what torch computes."""

    def __init__(self, rows: int, size: int, features: int) -> None:
        self.ids, self.table = torch.randint(5, (rows,)), torch.randn(5, size)
        self.weight, self.bias = torch.randn(features, size), torch.randn(features)
        self.calls = list[Instruction]()
        x = self._add(prepare_look_up(self.table, self.ids))
        product = self._add(prepare_product(self._add(prepare_norm_rows(x, None, None, 1e-3)), self.weight, self.bias))
        places = self._add(prepare_on_rows("float", self._add(prepare_on_rows("add_ints", self.ids, None, 2.0))))
        both = self._add(prepare_on_rows("cat", self._add(prepare_on_rows("silu", product)), x))
        scaled = self._add(prepare_on_rows("mul", both, places[:, None]))
        self.found = self._add(prepare_on_rows("mean", self._add(prepare_on_rows("add", scaled, both))))

    def _add(self, prepared: tuple[torch.Tensor, Instruction]) -> torch.Tensor:
        self.calls.append(prepared[1])
        return prepared[0]

    def by_threads(self, threads: int) -> Callable[[], object]:
        [call] = together(self.calls, threads)
        return call

    def expected(self) -> torch.Tensor:
        x = self.table[self.ids]
        product = functional.linear(functional.layer_norm(x, x.shape[-1:], eps=1e-3), self.weight, self.bias)
        both = torch.cat([functional.silu(product), x], -1)
        return (both * (self.ids + 2.0)[:, None] + both).mean(-1, keepdim=True)


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 40), size=st.integers(1, 70), features=st.integers(1, 200))
def test_any_number_of_threads_gives_what_torch_gives(rows, size, features):
    layer = Layer(rows, size, features)
    for threads in (1, 2, 3, 5):
        call = layer.by_threads(threads)
        layer.found.zero_()
        call()
        made = layer.found.clone()
        torch.testing.assert_close(made, layer.expected(), rtol=1e-4, atol=1e-4)
        call()
        assert made.equal(layer.found)  # whichever thread computed a part


def test_an_id_outside_the_table_raises_and_the_next_call_is_right():
    layer = Layer(9, 33, 100)
    call, wanted = layer.by_threads(2), layer.expected()
    for place in (0, 8):
        right, layer.ids[place] = int(layer.ids[place]), 5
        with pytest.raises(IndexError, match="are not all rows of a table of 5"):
            call()
        layer.ids[place] = right
        call()
        torch.testing.assert_close(layer.found, wanted, rtol=1e-4, atol=1e-4)


def test_a_team_computes_what_its_caller_leaves():
    layer, (team, channel) = Layer(9, 33, 100), rowteams.team_of(1)
    tape = np.array([(*one.words, 2) for one in layer.calls], np.int64)
    opened = ctypes.c_int64.from_address(team)
    first = opened.value >> rowloops.PART_BITS
    rowloops.proceed(tape.ctypes.data, len(tape), team, first, 0)
    for number, word in enumerate((tape.ctypes.data, len(tape), first)):
        ctypes.c_int64.from_address(team + rowloops.TAPE + 8 * number).value = word
    os.eventfd_write(channel, 1)
    end_s = time.monotonic() + 10
    while opened.value >> rowloops.PART_BITS < first + len(tape) and time.monotonic() < end_s:
        time.sleep(0.001)
    torch.testing.assert_close(layer.found, layer.expected(), rtol=1e-4, atol=1e-4)


def test_nobody_waits_for_threads_that_do_not_run(monkeypatch):
    monkeypatch.setattr(rowteams, "_own", threading.local())
    monkeypatch.setattr(rowteams._Team, "grow", lambda *_: None)
    layer = Layer(9, 33, 100)
    call = layer.by_threads(3)
    for _ in range(100):
        call()
    torch.testing.assert_close(layer.found, layer.expected(), rtol=1e-4, atol=1e-4)


def test_callers_have_teams_of_their_own_which_end_with_them():
    layers, num_before = [Layer(9, 33, 100), Layer(5, 64, 150)], threading.active_count()

    def repeat(layer: Layer) -> None:
        call = layer.by_threads(2)
        for _ in range(300):
            call()

    callers = [threading.Thread(target=repeat, args=(layer,)) for layer in layers]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    for layer in layers:
        torch.testing.assert_close(layer.found, layer.expected(), rtol=1e-4, atol=1e-4)
    end_s = time.monotonic() + 10
    while threading.active_count() > num_before and time.monotonic() < end_s:
        time.sleep(0.01)
    assert threading.active_count() <= num_before


def test_a_forked_process_has_a_team_of_its_own():
    layer = Layer(9, 33, 100)
    call, wanted = layer.by_threads(2), layer.expected()
    call()
    child = os.fork()
    if not child:
        try:
            layer.found.fill_(0)
            call()
            os._exit(0 if (layer.found - wanted).abs().max() < 1e-3 else 1)
        finally:
            os._exit(2)
    call()
    assert os.waitpid(child, 0)[1] == 0


def test_an_interrupted_caller_leaves_no_part_behind(monkeypatch):
    """The signal comes at any moment of a loop of calls, as Ctrl-C does."""
    layer, calls = Layer(9, 33, 100), list[int]()
    call = layer.by_threads(3)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for number in range(20):
            with pytest.raises(KeyboardInterrupt):
                signal.setitimer(signal.ITIMER_REAL, 1e-3 + number * 1e-4)
                while True:
                    call()
            layer.ids.copy_(torch.randint(5, layer.ids.shape))
            call()
            calls.append(number)
            torch.testing.assert_close(layer.found, layer.expected(), rtol=1e-4, atol=1e-4)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(calls) == 20

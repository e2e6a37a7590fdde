"""The ring hands tensors over bit for bit, in order, and never writes a slot that is being read."""

import os
import random
import resource
import select
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.devices.processes import spawn_worker
from autosplit.running.ring import DATA, EMPTY, ERROR, FLAG, PAGE, SEQUENCE, SKIPPED, Interrupted, Ring, RingEnd
from autosplit.tracing.tensorspec import TensorSpec, spec_of

pytestmark = pytest.mark.timeout(60)

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.fixture
def pair() -> Iterator[tuple[Ring, RingEnd, RingEnd]]:
    """A ring of 2 slots for one vector, its sender and its receiver."""
    ring = Ring.create([[spec_of("x", torch.zeros(4))]], num_slots=2)
    yield ring, RingEnd(ring, sends=True), RingEnd(ring, sends=False)
    ring.close()


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of any dtype and layout: permuted, sliced, expanded, offset, empty, scalar."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    dtype = draw(st.sampled_from(DTYPES))
    tensor = torch.testing.make_tensor(shape, dtype=dtype, device="cpu")
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    for change in draw(st.lists(st.sampled_from(["slice", "expand", "offset"]), max_size=2)):
        if change == "slice" and tensor.ndim and tensor.shape[0] > 1:
            tensor = tensor[:: draw(st.integers(1, 2))]
        elif change == "expand":
            tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
        elif change == "offset" and tensor.ndim and tensor.shape[-1] > 1:
            tensor = tensor[..., 1:]
    return tensor


def variants(num_tensors: int) -> st.SearchStrategy[list[list[torch.Tensor]]]:
    """The tensors of a request for each of up to three variants."""
    return st.lists(st.lists(tensors(), min_size=num_tensors, max_size=num_tensors), min_size=1, max_size=3)


@settings(max_examples=examples(150), deadline=None)
@given(st.integers(0, 3).flatmap(variants), st.integers(1, 3))
def test_tensors_arrive_bit_for_bit_with_their_layout(sizes: list[list[torch.Tensor]], num_slots: int) -> None:
    layouts = [[spec_of(f"v{number}", value) for number, value in enumerate(values)] for values in sizes]
    ring = Ring.create(layouts, num_slots)
    try:
        sender, receiver = RingEnd(ring, sends=True), RingEnd(ring, sends=False)
        for sequence in range(len(sizes) * (2 * num_slots + 1)):
            variant = sequence % len(sizes)
            values, specs = sizes[variant], layouts[variant]
            sender.acquire(sequence, 0).write(values, variant)
            sender.release(sequence)
            slot = receiver.acquire(sequence, 0)
            assert (slot.header[SEQUENCE], slot.header[FLAG]) == (sequence, DATA)
            assert [spec_of(spec.name, value) for spec, value in zip(specs, slot.tensors, strict=True)] == specs
            assert all(torch.equal(value, sent) for value, sent in zip(slot.tensors, values, strict=True))
            receiver.release(sequence)
    finally:
        ring.close()


@settings(max_examples=examples(200), deadline=None)
@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.booleans(), max_size=60))
def test_tokens_keep_the_ends_apart(num_slots: int, every: int, steps: list[bool]) -> None:
    """The ring beside a plain queue: both are full and empty at the same moments and yield the same numbers in order."""
    ring = Ring.create([[spec_of("x", torch.zeros(1))]], num_slots, every)
    try:
        sender, receiver = RingEnd(ring, sends=True), RingEnd(ring, sends=False)
        sent = taken = 0
        for sends in steps:
            number = sent if sends else taken
            possible = sent - taken < num_slots if sends else taken < sent
            if not possible:
                with pytest.raises(TimeoutError):
                    (sender if sends else receiver).acquire(number * every, 0)
            elif sends:
                sender.acquire(number * every, 0).write([torch.tensor([float(number)])])
                sender.release(number * every)
                sent += 1
            else:
                slot = receiver.acquire(number * every, 0)
                assert slot.header[SEQUENCE] == number * every and slot.tensors[0].item() == number
                receiver.release(number * every)
                taken += 1
    finally:
        ring.close()


def test_a_slot_is_a_view_until_it_is_released(pair: tuple[Ring, RingEnd, RingEnd]) -> None:
    _, sender, receiver = pair
    sender.acquire(0).write([torch.ones(4)])
    sender.release(0)
    view = receiver.acquire(0).tensors[0]
    sender.acquire(1).write([torch.zeros(4)])
    sender.release(1)
    with pytest.raises(TimeoutError):
        sender.acquire(2, 0.01)
    assert torch.equal(view, torch.ones(4))
    receiver.release(0)
    sender.acquire(2, 1).write([torch.full((4,), 2.0)])
    assert torch.equal(view, torch.full((4,), 2.0))


NUM_MESSAGES = 3000


def answer(control: Connection) -> None:
    """In a worker: send back what comes, one more, after a while of any length."""
    there, back = control.recv()
    receiver, sender, drawn = RingEnd(Ring(there), sends=False), RingEnd(Ring(back), sends=True), random.Random(1)
    for number in range(NUM_MESSAGES):
        value = receiver.acquire(number).tensors[0] + 1
        dawdle(drawn)
        receiver.release(number)
        sender.acquire(number).write([value])
        sender.release(number)


def dawdle(drawn: random.Random) -> None:
    """Often no time at all, else about as long as falling asleep takes."""
    until = time.perf_counter() + drawn.choice((0, 0, drawn.random() * 60e-6))
    while time.perf_counter() < until:
        pass


def test_no_end_sleeps_through_what_the_other_one_does() -> None:
    """Two processes that fall asleep all the time, over rings so short that either may have to wait for the other."""
    rings = [Ring.create([[spec_of("x", torch.zeros(4))]], num_slots) for num_slots in (1, 2)]
    worker = spawn_worker("tests.running.test_ring:answer", fds=[fd for ring in rings for fd in ring.handle.fds])
    worker.connection.send([ring.handle for ring in rings])
    sender, receiver, drawn = RingEnd(rings[0], sends=True), RingEnd(rings[1], sends=False), random.Random(2)
    sent = 0
    for number in range(NUM_MESSAGES):
        while sent < NUM_MESSAGES and sent - number < 2 and (sent == number or drawn.random() < 0.7):
            sender.acquire(sent, 30).write([torch.full((4,), float(sent))])
            sender.release(sent)
            sent += 1
        slot = receiver.acquire(number, 30)
        assert slot.header[SEQUENCE] == number and slot.tensors[0][3] == number + 1
        dawdle(drawn)
        receiver.release(number)
    worker.close()
    for ring in rings:
        ring.close()


def test_slots_start_on_pages() -> None:
    specs = [spec_of("x", torch.zeros(3)), spec_of("y", torch.zeros(5000))]
    ring = Ring.create([specs], num_slots=3)
    assert all(slot.tensors[0].data_ptr() % PAGE == 0 and slot.tensors[1].data_ptr() % 64 == 0 for slot in ring.slots)
    ring.close()


def test_errors_and_skips_travel_in_place_of_tensors(pair: tuple[Ring, RingEnd, RingEnd]) -> None:
    _, sender, receiver = pair
    for sequence, (flag, text) in enumerate([(ERROR, "stage 'a' failed: größer".encode()), (SKIPPED, b"")]):
        sender.acquire(sequence).write_text(flag, text)
        sender.release(sequence)
        slot = receiver.acquire(sequence)
        assert slot.header[FLAG] == flag and slot.read_text() == text
        receiver.release(sequence)


def test_a_long_text_loses_its_middle(pair: tuple[Ring, RingEnd, RingEnd]) -> None:
    _, sender, _ = pair
    slot = sender.acquire(0)
    slot.write_text(ERROR, b"first" + b"-" * 10_000_000 + b"last")
    assert slot.read_text().startswith(b"first") and slot.read_text().endswith(b"last") and b"[...]" in slot.read_text()


def test_a_wait_ends_when_the_other_end_acts(pair: tuple[Ring, RingEnd, RingEnd]) -> None:
    ring, sender, _ = pair
    for spin_s in (0.0, 0.002):
        receiver = RingEnd(ring, sends=False, spin_s=spin_s)
        timer = threading.Timer(0.02, lambda: (sender.acquire(0).write([torch.ones(4)]), sender.release(0)))
        timer.start()
        assert receiver.acquire(0, 10).header[SEQUENCE] == 0
        receiver.release(0)
        timer.join()


def test_an_end_may_ask_to_be_woken_for_a_later_request(pair: tuple[Ring, RingEnd, RingEnd]) -> None:
    _, sender, receiver = pair

    def rings(sequence: int) -> bool:
        """Whether handing over this request rings for the receiver."""
        sender.acquire(sequence, 0).write([torch.ones(4)])
        sender.release(sequence)
        return bool(select.select([receiver.fd], [], [], 0)[0])

    receiver.fall_asleep(1)
    assert [rings(0), rings(1)] == [False, True]
    receiver.wake_up(called=True)
    for sequence in range(2):
        receiver.acquire(sequence, 0)
        receiver.release(sequence)
    receiver.fall_asleep(3)
    assert [rings(2), rings(3)] == [False, True]


def test_a_sender_is_content_with_one_slot_after_a_while() -> None:
    """It waits for half of a full ring at first, which a slow receiver does not give in time."""
    ring = Ring.create([[spec_of("x", torch.zeros(4))]], num_slots=4)
    sender, receiver = RingEnd(ring, sends=True), RingEnd(ring, sends=False)
    for sequence in range(4):
        sender.acquire(sequence, 0).write([torch.ones(4)])
        sender.release(sequence)
    timer = threading.Timer(0.02, lambda: (receiver.acquire(0), receiver.release(0)))
    timer.start()
    assert sender.acquire(4, 10).header[SEQUENCE] == EMPTY
    timer.join()
    ring.close()


def test_an_interrupt_ends_a_wait_and_takes_no_token(pair: tuple[Ring, RingEnd, RingEnd]) -> None:
    ring, sender, _ = pair
    interrupt_fd = os.eventfd(1)
    receiver = RingEnd(ring, sends=False, interrupt_fd=interrupt_fd, spin_s=50e-6)
    with pytest.raises(Interrupted):
        receiver.acquire(0, 10)
    os.eventfd_read(interrupt_fd)
    sender.acquire(0).write([torch.ones(4)])
    sender.release(0)
    assert receiver.acquire(0, 10).header[SEQUENCE] == 0
    os.close(interrupt_fd)


def test_refilled_tokens_bring_the_same_slots_again(pair: tuple[Ring, RingEnd, RingEnd]) -> None:
    """A replay: the slots of requests 1 and 2 are handed out once more, without a copy."""
    ring, sender, receiver = pair
    for sequence in range(3):
        sender.acquire(sequence, 0).write([torch.full((4,), float(sequence))])
        sender.release(sequence)
        receiver.acquire(sequence, 0)
        receiver.release(sequence)
    ring.refill(range(1, 3))
    for sequence in (1, 2):
        assert receiver.acquire(sequence, 0).tensors[0][0] == sequence
        receiver.release(sequence)
    with pytest.raises(TimeoutError):
        receiver.acquire(3, 0)
    for sequence in (3, 4):
        sender.acquire(sequence, 0)


def test_nothing_is_left_of_a_ring_for_which_descriptors_or_memory_are_short() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for limit, sizes in (resource.RLIMIT_NOFILE, range(3, 60)), (resource.RLIMIT_FSIZE, (100, 10_000)):
        soft, hard = resource.getrlimit(limit)
        failures = 0
        for size in sizes:
            resource.setrlimit(limit, (size, hard))
            try:
                Ring.create([[TensorSpec("x", (2,), (1,), "float32")]], 2).close()
            except (OSError, RuntimeError):
                failures += 1
            finally:
                resource.setrlimit(limit, (soft, hard))
        assert failures
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def named_memory() -> set[str]:
    """What this process has mapped of shared memory with a name; other processes come and go there."""
    return {line.split()[-1] for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines() if "/dev/shm/" in line}


def test_nothing_is_left_of_a_closed_ring() -> None:
    names = named_memory()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    ring = Ring.create([[TensorSpec("x", (1000,), (1,), "float32")]], num_slots=4)
    assert named_memory() == names
    assert os.fstat(ring.handle.memory_fd).st_mode & 0o777 == 0o600
    ring.close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208

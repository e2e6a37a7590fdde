"""The simulated accelerator refuses what a real one refuses, and its clock shows what overlaps."""

from collections.abc import Iterator

import pytest
import torch
from simulated import Simulated, cuda
from simulatedmemory import BUS_BYTES_PER_S, CONTEXT_BYTES, OP_S, TOTAL_BYTES, taken

from autosplit.backends.placing import place_runnable
from autosplit.devices import discovering
from autosplit.errors import DeviceError
from autosplit.tracing.tensorspec import TensorSpec

NUM_FLOATS = 1 << 18
COPY_S = 4 * NUM_FLOATS / BUS_BYTES_PER_S
SPEC = (TensorSpec("x", (NUM_FLOATS,), (1,), "float32"),)


@pytest.fixture
def device() -> Simulated:
    return Simulated()


@pytest.fixture
def cap(device) -> Iterator[None]:
    """A device with room for one vector."""
    device.memory.most_bytes = TOTAL_BYTES - device.memory.free_bytes + 4 * NUM_FLOATS
    yield
    device.memory.most_bytes = TOTAL_BYTES


def test_the_host_cannot_read_memory_of_the_device(device) -> None:
    there = torch.ones(4).to(device.device)
    for read in (lambda: there.cpu(), lambda: there.sum(), lambda: torch.zeros(4).copy_(there), lambda: there.tolist()):
        with pytest.raises(RuntimeError, match=r"the host reads memory of simulated:0 outside a queue|is not supported"):
            read()


def test_an_op_in_a_queue_cannot_read_a_tensor_that_was_not_copied(device) -> None:
    there, other = torch.ones(4).to(device.device), torch.ones(4).to(Simulated(1).device)
    for stranger in (torch.ones(4), other):
        device.enqueue(device.queue(), lambda stranger=stranger: there.add_(stranger))
        with pytest.raises(RuntimeError, match="expected all tensors on the same device"):
            device.synchronise()
    device.enqueue(device.queue(), lambda: there.add_(torch.tensor(1.0)))  # torch takes a number from anywhere
    device.synchronise()


def test_memory_beyond_the_cap_is_refused_as_torch_does_and_comes_back(device, cap) -> None:
    held = device.empty(4 * NUM_FLOATS)
    with pytest.raises(torch.OutOfMemoryError, match=r"simulated:0 out of memory. Tried to allocate 1 bytes, 0 bytes are free"):
        device.empty(1)
    del held
    assert device.empty(4 * NUM_FLOATS).nbytes == 4 * NUM_FLOATS


def test_memory_that_another_program_takes_is_not_free(device) -> None:
    before = device.facts().free_bytes
    with taken(0, 1000):
        assert device.facts().free_bytes == before - 1000
    assert device.facts().free_bytes == before


def test_the_context_is_what_a_second_process_takes() -> None:
    with cuda():
        facts = discovering.facts_of(("cuda:1",))["cuda:1"]
        assert facts.context_bytes == CONTEXT_BYTES
        machine = discovering.machine_for("cpu,cuda:1", memory="cuda:1=100MB")
        assert (machine["cuda:1"].context_bytes, machine["cuda:1"].memory_bytes) == (CONTEXT_BYTES, 100_000_000)
        told = r"the cap of 'cuda:1' is 9\.5 MiB, and drivers and libraries of each worker take 32\.0 MiB there"
        with pytest.raises(DeviceError, match=told):
            discovering.machine_for("cpu,cuda:1", memory="cuda:1=10MB")


@pytest.mark.parametrize("num_ops", [200, 5])
def test_copies_of_neighbours_are_beside_compute_and_take_turns_on_the_bus(device, num_ops) -> None:
    """Requests arrive, compute and leave. One after the other they take the sum of all; here the longest of the three sets the
    pace, compute or a copy. With two requests in progress the third of short compute would wait until the first has left."""
    num_requests = 8

    def work(inputs):
        x = inputs[0]
        for _ in range(num_ops):
            x = x + 1
        return [x]

    stage = place_runnable(device, lambda *_: (work, True), SPEC, SPEC)
    device.restart()
    last = [stage.begin([torch.zeros(NUM_FLOATS)]) for _ in range(num_requests)][-1]
    last.outputs()
    taken_s = max(queue.time_s for queue in device.queues)
    compute_s = (num_ops + 1) * OP_S  # and the copy of the result into its place
    pace_s = max(compute_s, COPY_S)
    assert taken_s == pytest.approx(COPY_S + compute_s + COPY_S + (num_requests - 1) * pace_s, rel=0.05)
    assert taken_s < 0.95 * num_requests * (compute_s + 2 * COPY_S)

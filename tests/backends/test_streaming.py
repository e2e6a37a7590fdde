"""A streamed stage computes what a resident one does, bit for bit, in the memory and in the time that were predicted."""

import pytest
import torch
from simulated import Simulated
from simulatedmemory import BUS_BYTES_PER_S, OP_S, TOTAL_BYTES

from autosplit.backends.placing import place_runnable
from autosplit.backends.streaming import streamed_runnable
from autosplit.costs.streaming import pass_s
from autosplit.errors import BackendError
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import split
from autosplit.values.residency import least_bytes, parts_of

DEPTH, WIDTH = 6, 300


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model(f"autosplit.examples.mlp:mlp?depth={DEPTH}&width={WIDTH}"))


@pytest.fixture
def device() -> Simulated:
    return Simulated()


def placed(traced, device, resident_bytes):
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    return place_runnable(
        device,
        lambda one, queue: (streamed_runnable(program, resident_bytes, one, queue), False),
        program.inputs,
        program.outputs,
    )


def sizes(traced) -> tuple[list[int], int]:
    return traced.graph.own_bytes(op.name for op in traced.graph.ops)


@pytest.mark.parametrize("kept", [0.0, 0.3, 0.7, 1.0])
def test_it_computes_what_the_model_does_within_its_bytes(traced, device, kept) -> None:
    least, total = least_bytes(*sizes(traced)), traced.graph.weight_bytes
    resident_bytes = round(least + kept * (total - least))
    before = device.facts().free_bytes
    stage = placed(traced, device, resident_bytes)
    taken = before - device.facts().free_bytes
    assert taken <= resident_bytes + 64 * len(traced.graph.ops) + 2 * 3 * 4 * WIDTH  # two contexts with inputs and outputs
    for number in range(5):
        x = torch.full((1, WIDTH), 1.0 + number)
        assert torch.equal(stage([x])[0], traced.program(x)[0])


@pytest.mark.parametrize("kept", [0.0, 0.4])
def test_the_time_of_requests_in_a_row_is_the_predicted_one(traced, device, kept) -> None:
    own, shared = sizes(traced)
    resident_bytes = round(least_bytes(own, shared) + kept * traced.graph.weight_bytes)
    stage = placed(traced, device, resident_bytes)

    def run(count: int) -> float:
        before_s = stage.computing.time_s
        [stage.begin([torch.ones(1, WIDTH)]) for _ in range(count)][-1].outputs()
        return stage.computing.time_s - before_s

    run(3)
    parts = parts_of(own, shared, resident_bytes)
    assert parts is not None and parts.streamed
    op_s = [OP_S] * len(own)
    op_s[-1] += OP_S  # the answer is copied into its place
    predicted_s = pass_s(op_s, [size / BUS_BYTES_PER_S for size in own], parts)
    assert predicted_s > sum(op_s) * 1.05
    assert run(20) / 20 == pytest.approx(predicted_s, rel=0.02)


def test_a_request_that_fails_midway_leaves_the_next_one_its_weights(traced, device) -> None:
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    run = streamed_runnable(program, least_bytes(*sizes(traced)), device, queue := device.queue())
    x, answers = torch.ones(1, WIDTH).to(device.device), []
    made = device.empty(4 * WIDTH).view(torch.float32).view(1, WIDTH)

    def compute(given):
        with torch.inference_mode():
            made.copy_(run([given])[0])

    for given in (x, x[:, :-1], x):
        device.enqueue(queue, lambda given=given: compute(given))
        try:
            device.synchronise()
            device.enqueue(queue, lambda: answers.append(made.cpu()))
            device.synchronise()
        except RuntimeError as failure:
            answers.append(str(failure))
    right = traced.program(torch.ones(1, WIDTH))[0]
    assert torch.equal(answers[0], right) and torch.equal(answers[2], right)
    assert "shapes cannot be multiplied" in answers[1]


def test_room_for_less_than_two_buffers_is_refused_with_the_largest_op(traced, device) -> None:
    with pytest.raises(BackendError, match=r"100 B on the device have no room for two buffers; its largest op has 352.7 KiB"):
        placed(traced, device, 100)


class HandsOnAView(torch.nn.Module):
    """Its first op returns a view of a weight, which is read after all other ops."""

    def __init__(self, late: bool) -> None:
        super().__init__()
        self.late = late
        self.table = torch.nn.Parameter(torch.rand(WIDTH, WIDTH))
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turned = self.table.t()
        x = x if self.late else x @ turned
        for layer in self.layers:
            x = layer(x)
        return x @ turned if self.late else x


@pytest.mark.parametrize("late", [False, True])
def test_a_view_of_streamed_weights_is_read_in_time_or_refused(device, late) -> None:
    traced = trace(load_model(HandsOnAView(late).eval(), inputs=(torch.rand(1, WIDTH),)))
    resident_bytes = least_bytes(*sizes(traced))
    if late:
        with pytest.raises(BackendError, match=r"hands on a view of its weights, which 'matmul' reads after"):
            placed(traced, device, resident_bytes)
    else:
        x = torch.rand(1, WIDTH)
        stage = placed(traced, device, resident_bytes)
        for _ in range(3):
            assert torch.equal(stage([x])[0], traced.program(x)[0])


def test_a_model_larger_than_the_device_runs_there(traced, device) -> None:
    least = least_bytes(*sizes(traced))
    device.memory.most_bytes = TOTAL_BYTES - device.memory.free_bytes + least + 20_000
    try:
        assert device.facts().free_bytes < traced.graph.weight_bytes
        x = torch.rand(1, WIDTH)
        assert torch.equal(placed(traced, device, least)([x])[0], traced.program(x)[0])
    finally:
        device.memory.most_bytes = TOTAL_BYTES

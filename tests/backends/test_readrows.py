"""The head of a step multiplies the rows that are read, in torch and in the files of runtimes."""

import pytest
import torch
from torch import nn

from autosplit.backends.base import get_backend
from autosplit.backends.checking import model_reference
from autosplit.backends.readrows import READ_ROWS, num_read
from autosplit.backends.simplifying import simplified
from autosplit.generating.sampling import SAMPLE
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, unsplit

ROWS, VOCABULARY, SIZE, LENGTH = 10, 12, 6, 9


class Head(nn.Module):
    """The end of a step: logits of its first tokens, more than read weights as stored, and the choice among them."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, VOCABULARY, has_bias)
        self.register_buffer("history", torch.zeros(ROWS + 1, LENGTH, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor, ids: torch.Tensor, slots: torch.Tensor, sampling: torch.Tensor) -> torch.Tensor:
        logits = self.linear(x.sin().index_select(0, torch.arange(ROWS)))
        return SAMPLE(logits, self.history, ids, slots, ids, sampling)


def step(slots: list[int]) -> list[torch.Tensor]:
    numbers = torch.tensor(slots)
    return [torch.randn(len(slots), SIZE), torch.zeros_like(numbers), numbers, torch.zeros(len(slots), 5, dtype=torch.float64)]


STEPS = ([5] * 12, [1, 2, 2, *[1] * 9], [1, 2, 3, 4, 5, *[3] * 7], [*range(ROWS, 0, -1), 1, 1], [1, 2, *[0] * 10], [0] * 12)


@pytest.mark.parametrize("name", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("has_bias", [False, True])
def test_next_tokens_are_those_of_all_rows(name, has_bias, tmp_path):
    torch.manual_seed(0)
    traced = trace(load_model(Head(has_bias).eval(), inputs=tuple(step(STEPS[0]))))
    program = unsplit(traced)
    assert [node.target for node in simplified(program).module.graph.nodes].count(READ_ROWS) == 1
    save_stage(program, tmp_path / "stage")
    get_backend(name).prepare(program, tmp_path / "stage")
    run, eager = (get_backend(one).load(tmp_path / "stage", 1) for one in (name, "eager"))
    for slots in STEPS:
        inputs = step(slots)
        assert torch.equal(run(inputs)[0], eager(inputs)[0])
        assert model_reference(traced, inputs).error([run(inputs)]).relative == 0  # with any token in a row that is not read


def test_a_row_that_is_not_read_is_not_multiplied():
    x, weight, slots = torch.randn(6, SIZE), torch.randn(VOCABULARY, SIZE), torch.tensor([3, 1, 3, 1, 1, 1, 1])
    x[2:] = float("nan")
    found = READ_ROWS(x, weight, slots)
    torch.testing.assert_close(found[:2], x[:2] @ weight.T)
    assert torch.equal(found[2:], found[[1] * 4])


@pytest.mark.parametrize(("slots", "count"), [([7], 1), ([1, 2, 3], 3), ([1, 0, 2], 1), ([0, 1, 2], 3), ([1, 2, 1, 3], 2)])
def test_rows_are_read_up_to_a_slot_that_comes_again(slots, count):
    assert num_read(slots) == count


def test_a_step_without_prompts_multiplies_all_rows():
    program = unsplit(trace(load_model(Head(False).eval(), inputs=tuple(step(list(range(1, ROWS + 1)))))))
    assert all(node.target is not READ_ROWS for node in simplified(program).module.graph.nodes)

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from autosplit.backends.checking import model_reference
from autosplit.errors import UsageError
from autosplit.generating.sampling import MAX_SEED, SAMPLE, Sampling
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model

VOCABULARY, LENGTH = 40, 12


def sampled(logits, samplings, *, slots=None, positions=None, ids=None, history=None):
    """The next tokens, for tokens of slots 1, 2, ... at position 5 of an empty history if nothing else is said."""
    num = len(samplings)
    history = torch.zeros(num + 1, LENGTH, dtype=torch.int64) if history is None else history
    slots = torch.arange(1, num + 1) if slots is None else torch.tensor(slots)
    positions = torch.full([num], 5) if positions is None else torch.tensor(positions)
    ids = torch.zeros(num, dtype=torch.int64) if ids is None else torch.tensor(ids)
    rows = torch.tensor([one.row for one in samplings], dtype=torch.float64)
    return SAMPLE(logits, history, ids, slots, positions, rows).tolist()


def logits_of(seed, num=1):
    return 3 * torch.randn(num, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def test_temperature_zero_takes_the_largest_logit():
    logits = logits_of(0, 4)
    assert sampled(logits, [Sampling()] * 4) == logits.argmax(1).tolist()


def test_the_smallest_temperature_draws_the_likeliest_token():
    logits = logits_of(0, 4)
    assert sampled(logits, [Sampling(temperature=5e-324)] * 4) == logits.argmax(1).tolist()


@given(st.integers(0, 99), st.integers(0, MAX_SEED - 1), st.lists(st.integers(0, LENGTH - 1), min_size=4, max_size=4))
@settings(max_examples=25, deadline=None)
def test_draws_are_those_of_a_sequence_alone_whatever_runs_beside_it(seed, draw_seed, positions):
    logits = logits_of(seed, 4)
    samplings = [Sampling(temperature=1.3, top_p=0.9, seed=draw_seed).of(number) for number in range(4)]
    together = sampled(logits, samplings, positions=positions)
    alone = [sampled(logits[row : row + 1], samplings[row : row + 1], positions=positions[row : row + 1])[0] for row in range(4)]
    assert together == alone


@pytest.mark.parametrize("setting", [{}, {"top_k": 5}, {"top_p": 0.7}, {"top_k": 9, "top_p": 0.8}, {"repetition_penalty": 1.7}])
def test_draws_have_the_chances_of_transformers(setting):
    logits, past = logits_of(3), [[4, 4, 7, 9, 11, 2]]
    sampling = Sampling(temperature=0.8, **setting)
    processors = LogitsProcessorList(
        [RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty), TemperatureLogitsWarper(0.8)]
    )
    if sampling.top_k:
        processors.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        processors.append(TopPLogitsWarper(sampling.top_p))
    wanted = processors(torch.tensor(past), logits.clone()).softmax(1)[0]
    num, history = 1000, torch.zeros(1001, LENGTH, dtype=torch.int64)
    history[1:, :5], history[1:, 6:] = torch.tensor(past[0][:5]), 30  # what is after the position is of an earlier owner
    samplings = [Sampling(temperature=0.8, seed=seed, **setting) for seed in range(num)]
    drawn = sampled(logits.expand(num, -1), samplings, positions=[5] * num, ids=[2] * num, history=history)
    found = torch.bincount(torch.tensor(drawn), minlength=VOCABULARY) / num
    assert not found[wanted == 0].any()
    assert (found - wanted).abs().max() < 4 * (0.25 / num) ** 0.5


def test_penalty_reaches_greedy_tokens_too():
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 3], logits[0, 8] = 2.0, 1.9
    assert sampled(logits, [Sampling(repetition_penalty=1.5)], ids=[3]) == [8]


def test_row_that_is_not_finite_fails_alone():
    logits = logits_of(1, 4)
    logits[0, 3], logits[1, 4], logits[2] = float("nan"), float("inf"), float("-inf")
    logits[3, 1] = float("-inf")
    samplings = [Sampling(temperature=1.0), Sampling(), Sampling(temperature=1.0), Sampling()]
    assert sampled(logits, samplings) == [-1, -1, -1, int(logits[3].argmax())]


def test_rows_beyond_the_history_are_not_written():
    history = torch.zeros(3, LENGTH, dtype=torch.int64)
    sampled(logits_of(1, 2), [Sampling()] * 2, positions=[LENGTH, 2], ids=[7, 9], history=history)
    assert history.sum() == history[2, 2] == 9


def test_only_the_first_rows_of_a_step_get_a_token():
    history = torch.zeros(2, LENGTH, dtype=torch.int64)
    chunk = sampled(logits_of(1), [Sampling()] * 3, slots=[1] * 3, positions=[0, 1, 2], ids=[5, 6, 7], history=history)
    assert len(chunk) == 1
    assert history[1, :3].tolist() == [5, 6, 7]


def test_rows_that_give_no_next_token_get_none():
    """Behind the first token of each sequence stand others of its prompt, or padding: their logits may be anything."""
    logits, samplings = logits_of(2, 4), [Sampling(temperature=0.5, seed=7)] * 4
    logits[:, 0], logits[3, 5] = -9.0, float("nan")
    for slots, num_read in (([2, 1, 2, 1], 2), ([1, 1, 1, 1], 1), ([3, 0, 0, 0], 1), ([0, 0, 0, 0], 1)):
        found = sampled(logits, samplings, slots=slots)
        assert all(found[:num_read]) and not any(found[num_read:])


def test_draw_is_never_a_token_without_a_chance():
    logits = torch.full((1, VOCABULARY), float("-inf"))
    logits[0, 11] = 0.0
    assert {sampled(logits, [Sampling(temperature=5.0, seed=seed)])[0] for seed in range(50)} == {11}


def test_all_faults_of_a_sampling_are_named():
    with pytest.raises(UsageError, match=r"7 faults") as caught:
        Sampling(0, -1, -1.0, 1.5, -1, MAX_SEED, 0.0)
    assert "max_new_tokens must be at least 1" in str(caught.value)


def test_operator_has_a_rule_for_shapes():
    with torch.device("meta"):
        num, history = torch.empty(5, dtype=torch.int64), torch.empty(3, LENGTH, dtype=torch.int64)
        tokens = SAMPLE(torch.empty(2, VOCABULARY), history, num, num, num, torch.empty(5, 5, dtype=torch.float64))
    assert (tokens.shape, tokens.dtype) == ((2,), torch.int64)


class Head(torch.nn.Module):
    """Two tokens are about as likely, and a third one is not."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor([[1.0, 0], [1.0078125, 0], [0.5, 0]]))
        self.register_buffer("history", torch.zeros(3, LENGTH, dtype=torch.int64), persistent=False)

    def forward(self, x, ids, slots, positions, sampling):
        return SAMPLE(x @ self.weight.T, self.history, ids, slots, positions, sampling), x + 1


@pytest.mark.parametrize(("dtype", "precision"), [(torch.bfloat16, "f32"), (torch.float32, "bf16")])
def test_a_token_of_bf16_may_be_another_one_of_about_the_same_score(dtype, precision):
    """A generator in bf16 was refused on OpenVINO, where one of two tokens was another one: 'off by 0.5'."""
    numbers = torch.arange(1, 3), torch.zeros(2, dtype=torch.int64)
    rows = torch.tensor([Sampling().row] * 2, dtype=torch.float64)
    inputs = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=dtype), torch.zeros(2, dtype=torch.int64), *numbers, rows
    traced = trace(load_model(Head().to(dtype).eval(), inputs=inputs))
    reference = model_reference(traced, inputs)
    limit = reference.tolerance(precision)

    def error(*tokens):
        return reference.error([[torch.tensor(tokens), inputs[0] + 1]]).relative

    assert error(1, 1) == 0 < error(1, 0) <= limit < error(2, 1) < error(-1, 1) == error(1, 3)
    assert error(1, 1) < limit < reference.error([[torch.tensor([1, 1]), inputs[0]]]).relative

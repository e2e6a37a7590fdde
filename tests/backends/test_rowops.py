"""Operators on rows equal torch's, at every edge of the blocks in which they are computed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from autosplit.backends.instructions import layout, strides, together
from autosplit.backends.rowops import LOOK_UP, NORM_ROWS, ON_ROWS, PRODUCT, prepare_on_rows
from autosplit.backends.rowpanels import COLUMNS, DEPTH
from autosplit.backends.rowproducts import MANY
from autosplit.backends.rowtiles import WIDTH

sizes = st.integers(1, 9)
ONE = {
    "neg": torch.neg,
    "relu": torch.relu,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "cube": lambda x: x**3,
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "tanh": torch.tanh,
    "gelu": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu_erf": lambda x: x * torch.special.ndtr(x),  # torch's own gives NaN for infinity, and less exact answers
    "mean": lambda x: x.mean(-1, keepdim=True),
    "cos": torch.cos,
    "sin": torch.sin,
}
TWO = {"add": torch.add, "sub": torch.sub, "mul": torch.mul, "div": torch.div}


@settings(max_examples=50, deadline=None)
@given(rows=sizes, features=sizes, size=st.integers(1, 40), has_bias=st.booleans(), threads=st.sampled_from([1, 2]))
def test_products_equal_linear(rows, features, size, has_bias, threads):
    x, weight, bias = torch.randn(1, rows, size), torch.randn(features, size), torch.randn(features) if has_bias else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(PRODUCT(x, weight, bias), functional.linear(x, weight, bias))
    finally:
        torch.set_num_threads(before)


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(MANY, MANY + 9),
    features=st.integers(COLUMNS, 2 * COLUMNS + 2),
    size=st.sampled_from([1, 5, WIDTH, 70, DEPTH, DEPTH + 1, 2 * DEPTH + 7]),
    has_bias=st.booleans(),
)
def test_products_of_many_rows_equal_linear(rows, features, size, has_bias):
    x, weight, bias = torch.randn(rows, size), torch.randn(features, size), torch.randn(features) if has_bias else None
    torch.testing.assert_close(PRODUCT(x, weight, bias), functional.linear(x, weight, bias), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("has_weight", [True, False])
def test_norms_equal_layer_norm(has_weight):
    x = torch.randn(3, 2, 37) * 5 + 100
    weight, bias = torch.randn(2, 37) if has_weight else (None, None)
    expected = functional.layer_norm(x, (37,), weight, bias, 1e-3)
    torch.testing.assert_close(NORM_ROWS(x, weight, bias, 1e-3), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(NORM_ROWS(torch.ones(2, 3), None, None, 1e-5), torch.zeros(2, 3))


def test_lookups_equal_embedding_and_name_ids_outside_the_table():
    table = torch.randn(5, 7)
    torch.testing.assert_close(LOOK_UP(table, torch.tensor([[4, 0, 4]])), table[torch.tensor([[4, 0, 4]])])
    for wrong in (-1, 5):
        with pytest.raises(IndexError, match=f"ids .0, {wrong}. are not all rows of a table of 5"):
            LOOK_UP(table, torch.tensor([0, wrong]))


@pytest.mark.parametrize("function", ONE)
def test_functions_of_one_value_equal_torch(function):
    values = [-float("inf"), -200.0, -88.5, -1e-3, -0.0, 0.0, 1e-30, 0.3, 5.0, 89.0, 1e30, float("inf"), float("nan")]
    x = torch.tensor([values, values[::-1]])
    made = ON_ROWS(function, x[:, :-1] if function == "mean" else x)
    torch.testing.assert_close(made, ONE[function](x[:, :-1] if function == "mean" else x), equal_nan=True)
    part = torch.randn(3, 2, 40)[:, :, 5:38]
    torch.testing.assert_close(ON_ROWS(function, part), ONE[function](part), equal_nan=True)


@pytest.mark.parametrize("function", TWO)
@pytest.mark.parametrize("shape", [(3, 2, 7), (7,), (3, 2, 1), (1, 1, 1)])
def test_functions_of_two_values_equal_torch(function, shape):
    x, y = torch.randn(3, 2, 7), torch.randn(shape)
    torch.testing.assert_close(ON_ROWS(function, x, y), TWO[function](x, y))
    torch.testing.assert_close(ON_ROWS(function, x, None, 0.3), TWO[function](x, 0.3))


def test_cosines_and_sines_of_all_positions_up_to_128k_are_exact_to_a_rounding():
    """A rotation at a frequency of 1 has the position as its angle; one step of float32 at 1 is 1.2e-7."""
    angles = torch.cat([torch.arange(1 << 17), torch.rand(1 << 17) * (1 << 17)])
    for function, exact in (("cos", torch.cos), ("sin", torch.sin)):
        assert float((ON_ROWS(function, angles) - exact(angles.double())).abs().max()) < 0.6 * 1.2e-7


def test_integers_become_floats_and_are_added():
    ids = torch.arange(12).view(3, 4)[:, :2] << 40
    assert ON_ROWS("float", ids).equal(ids.float())
    assert ON_ROWS("add_ints", ids, None, 2.0).equal(ids + 2)
    assert ON_ROWS("add_ints", ids, ids[:, :1]).equal(ids + ids[:, :1])


def test_rows_are_put_side_by_side_and_multiplied_with_columns():
    x, y = torch.randn(3, 2, 7), torch.randn(3, 2, 9)[:, :, 4:]
    assert ON_ROWS("cat", x, y).equal(torch.cat([x, y], -1))
    assert ON_ROWS("cat", x[..., :1], x[..., 3:4]).equal(x[..., [0, 3]])
    assert ON_ROWS("mul", x[0, 0], y[..., :1]).equal(x[0, 0] * y[..., :1])


def test_values_whose_columns_are_one_are_not_read_by_rows():
    x, y = torch.randn(3, 1), torch.randn(7)
    assert layout("mul", x, y, (3, 7)) is layout("cat", y.expand(3, 7), x.expand(3, 7), (3, 14)) is None
    assert layout("mul", y, x, (3, 7)) == (3, 7, 1, 0, 1, 7)


def test_values_whose_rows_are_not_equally_far_apart_have_no_strides():
    value = torch.empty(2, 4, 3)
    assert strides(value, value.shape) == (3, 1)
    assert strides(value[:, :2], (2, 2, 3)) is None
    assert strides(value.transpose(1, 2), (2, 3, 4)) is None
    assert strides(torch.empty(3), (2, 2, 3)) == (0, 1)


def test_instructions_in_a_row_are_one_call():
    x, done = torch.ones(2, 3), list[float]()
    first, second = (prepare_on_rows("add", x, None, number) for number in (1.0, 2.0))
    calls = together([first[1], second[1], lambda: done.append(float(first[0].sum())), first[1]], 1)
    assert len(calls) == 3
    for call in calls:
        call()
    assert done == [12.0]
    assert second[0].tolist() == [[3.0] * 3] * 2

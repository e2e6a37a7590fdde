import math

import pytest
import torch

from autosplit.errors import BackendError
from autosplit.tracing.differing import NumericalError, compare, difference

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("found", "expected", "errors"),
    [
        ([1.0, 2.0], [1.0, 4.0], (2.0, 0.5)),
        ([NAN, INF, 1.0], [NAN, INF, 2.0], (1.0, 0.5)),
        ([INF], [-INF], (INF, INF)),
        ([NAN, 1.0], [0.0, 1.0], (INF, INF)),
        ([1e-9], [0.0], (1e-9, INF)),
        ([1 - 2j], [1 + 2j], (4.0, 4 / 5**0.5)),
        ([complex(1, INF)], [complex(1, -INF)], (INF, INF)),
        ([complex(INF, 1), 4], [complex(INF, 1), 5], (1.0, 0.2)),
        ([1, 2, 3, 4], [1, 2, 3, 5], (0.25, 0.25)),
        ([True, False], [True, True], (0.5, 0.5)),
        ([], [], (0.0, 0.0)),
    ],
)
def test_errors_of_every_kind_of_number(found, expected, errors):
    assert difference(torch.tensor(found), torch.tensor(expected)) == pytest.approx(errors)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64])
def test_differences_are_taken_in_double_precision(dtype):
    assert difference(torch.tensor([-2.0, 60000.0]).to(dtype), torch.tensor([2.0, 60000.0]).to(dtype))[0] == 4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_numbers_of_8_bits_are_compared_too(dtype):
    assert difference(torch.tensor([1.0, 2.0]).to(dtype), torch.tensor([1.0, 4.0]).to(dtype)) == (2.0, 0.5)


def test_compare_counts_integers_that_differ():
    error = compare(["a", "b"], [torch.ones(2), torch.tensor([1, 2, 3, 4])], [torch.ones(2), torch.tensor([1, 2, 3, 5])])
    assert error == NumericalError(0.25, 0.25, "b")


def test_compare_refuses_another_shape_or_dtype():
    with pytest.raises(BackendError, match=r"output 'y' came back as torch.float32 \(2,\), not torch.float32 \(3,\)"):
        compare(["y"], [torch.ones(2)], [torch.ones(3)])
    with pytest.raises(BackendError, match="0 outputs came back, and the stage has 1"):
        compare(["y"], [], [torch.ones(3)])

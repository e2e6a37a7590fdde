"""Products of a few rows equal torch's, at every edge of the blocks in which they are computed."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.backends.fewrows import FEW_ROWS

sizes = st.integers(1, 9)


@settings(max_examples=50, deadline=None)
@given(rows=sizes, features=sizes, size=st.integers(1, 40), has_bias=st.booleans(), threads=st.sampled_from([1, 2]))
def test_products_equal_linear(rows, features, size, has_bias, threads):
    x, weight, bias = torch.randn(1, rows, size), torch.randn(features, size), torch.randn(features) if has_bias else None
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.testing.assert_close(FEW_ROWS(x, weight, bias), torch.nn.functional.linear(x, weight, bias))
    finally:
        torch.set_num_threads(before)

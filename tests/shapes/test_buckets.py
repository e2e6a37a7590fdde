from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.errors import UsageError
from autosplit.shapes.buckets import MOST_VARIANTS, Times, best_along, choose_buckets, fit_times
from autosplit.values.shapes import Traffic, even_traffic

LINEAR = Times((0.0, 1.0, 0.0), {(1,): 1.0})


@st.composite
def questions(draw):
    sizes = draw(st.sets(st.integers(1, 40), min_size=1, max_size=8))
    counts = {(size,): draw(st.integers(1, 9)) for size in sizes}
    coefficients = draw(st.tuples(*[st.floats(0, 9)] * 3).filter(any))
    return Times(coefficients, {}), Traffic(("seq",), counts), draw(st.integers(1, 4))


@given(questions())
def test_buckets_are_those_of_a_search_through_all_sets(question):
    times, traffic, num_buckets = question
    sizes = sorted(size for (size,) in traffic.counts)

    def expected_s(buckets):
        return sum(share * times.seconds((min(b for b in buckets if b >= s),)) for (s,), share in traffic.shares.items())

    sets = [(*rest, sizes[-1]) for count in range(num_buckets) for rest in combinations(sizes[:-1], count)]
    found = best_along(times, traffic, {"seq": (sizes[-1],)}, "seq", num_buckets)
    assert len(found) <= num_buckets
    assert expected_s(found) == pytest.approx(min(map(expected_s, sets)))


@given(st.tuples(*[st.floats(0.01, 9)] * 3), st.sets(st.integers(1, 500), min_size=4, max_size=9))
def test_fit_finds_the_times_that_it_is_given(coefficients, sizes):
    truth = Times(coefficients, {})
    times = fit_times({(size,): truth.seconds((size,)) for size in sizes})
    assert times.error < 1e-4
    assert times.seconds((77,)) == pytest.approx(truth.seconds((77,)), rel=0.05)


def test_waste_and_what_one_more_bucket_would_bring():
    traffic = Traffic(("seq",), {(10,): 90, (100,): 10})
    found = choose_buckets(LINEAR, traffic, {"seq": range(1, 513)})
    assert found.grid == {"seq": (10, 100, 512)}
    assert found.waste == pytest.approx(0)
    assert "no more sizes" in found.sentence
    short = choose_buckets(LINEAR, traffic, {"seq": range(1, 513)}, most=2)
    assert short.grid == {"seq": (10, 512)}
    assert short.waste == pytest.approx(1 - 19 / 60.2)
    assert short.next_gain == pytest.approx(1 - 19 / 60.2)
    assert "at most 2 variants" in short.sentence


def test_more_buckets_are_made_only_where_they_save_time():
    constant = choose_buckets(Times((1.0, 0.0, 0.0), {}), even_traffic({"seq": range(1, 65)}), {"seq": range(1, 65)})
    assert constant.grid == {"seq": (64,)}
    linear = choose_buckets(LINEAR, even_traffic({"seq": range(1, 65)}), {"seq": range(1, 65)})
    assert 2 < len(linear.grid["seq"]) < 16
    assert linear.next_gain < 0.03


def test_two_dimensions_make_a_grid():
    allowed = {"batch": range(1, 9), "seq": range(1, 65)}
    found = choose_buckets(Times((0.0, 1.0, 0.0, 0.0), {}), even_traffic(allowed), allowed)
    assert min(map(len, found.grid.values())) > 1
    assert len(found.variants) <= MOST_VARIANTS
    assert found.variants[0] == {"batch": 8, "seq": 64}
    assert found.home((3, 5)) in [tuple(one.values()) for one in found.variants]
    assert found.expected_s < found.longest_s


def test_each_size_has_a_bucket_where_these_cost_nothing():
    allowed = {"batch": range(1, 5), "seq": range(1, 65)}
    times, traffic = Times((0.0, 1.0, 0.0, 0.0), {}), even_traffic(allowed)
    found = choose_buckets(times, traffic, allowed, most=256, each_size=True)
    assert found.grid == {dim: tuple(sizes) for dim, sizes in allowed.items()}
    assert (found.waste, found.next_gain, found.limit) == (pytest.approx(0), 0.0, "there are no more sizes")
    fewer = choose_buckets(times, traffic, allowed, most=255, each_size=True)
    assert fewer.grid == {"batch": (1, 2, 3, 4), "seq": tuple(range(2, 65, 2))}
    exact = choose_buckets(times, traffic, allowed, exact={"seq": "it may not be padded"}, most=64, each_size=True)
    assert exact.grid == {"batch": (4,), "seq": tuple(range(1, 65))}


def test_dimension_that_may_not_be_padded_has_a_bucket_for_each_size():
    allowed = {"batch": range(1, 5), "seq": (8, 16)}
    found = choose_buckets(
        Times((0.0, 1.0, 0.0, 0.0), {}), even_traffic(allowed), allowed, exact={"seq": "padding changes the answers"}
    )
    assert found.grid["seq"] == (8, 16)
    with pytest.raises(UsageError, match=r"padding changes the answers.* 64 for seq 1\.\.64.*--seq-len 32,64,128"):
        choose_buckets(
            LINEAR, even_traffic({"seq": range(1, 65)}), {"seq": range(1, 65)}, exact={"seq": "padding changes the answers"}
        )

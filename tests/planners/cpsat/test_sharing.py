"""The choice of a way for each tenant, against every choice; and its bound."""

from itertools import product
from math import inf

import numpy as np
import pytest
from fuzzing import examples

from autosplit.planners.cpsat.sharing import Way, choose, factor_of, relaxed_factor, sums

CAPS = {"ram": 10}


def drawn(seed: int, num_tenants: int = 3, num_ways: int = 4) -> list[list[Way]]:
    """Tenants with random ways on three resources; some have a limit on latency, some want a resource alone."""
    rng = np.random.default_rng(seed)

    def way() -> Way:
        names = [name for name in "abc" if rng.random() < 0.6] or ["a"]
        shares = {name: float(rng.uniform(0.05, 1.5)) for name in names}
        busy = 1.0 if rng.random() < 0.6 else float(rng.uniform(0.2, 0.9))
        alone = frozenset(names[:1]) if rng.random() < 0.15 else frozenset[str]()
        return Way(shares, float(rng.uniform(1, 9)), {"ram": int(rng.integers(0, 8))}, busy, alone)

    return [[way() for _ in range(num_ways)] for _ in range(num_tenants)]


def allowed(chosen: tuple[Way, ...]) -> bool:
    """Whether the caps hold, and no resource that a way wants alone has another tenant."""
    users = [set(way.shares) for way in chosen]
    others = [set().union(*(used for k, used in enumerate(users) if k != number)) for number in range(len(users))]
    held = sum(way.held_bytes["ram"] for way in chosen)
    return held <= CAPS["ram"] and not any(way.alone & rest for way, rest in zip(chosen, others, strict=True))


@pytest.mark.parametrize("seed", range(examples(12)))
def test_no_choice_has_a_larger_factor_and_the_cheapest_tied_one_is_taken(seed: int) -> None:
    tenants = drawn(seed)
    possible = [row for row in product(*tenants) if allowed(row)]
    found = choose(tenants, CAPS, 10.0)
    if found is None:
        assert not possible
        return
    row = tuple(ways[number] for ways, number in zip(tenants, found.ways, strict=True))
    best = max(map(factor_of, possible))
    assert allowed(row) and best * (1 - 2e-3) <= factor_of(row) <= best
    assert found.bound == pytest.approx(best, rel=1e-4)
    tied = [other for other in possible if factor_of(other) >= best * (1 - 0.5e-3)]
    assert sum(way.cost for way in row) <= min(sum(way.cost for way in other) for other in tied) * (1 + 1e-4)


def test_a_limit_on_latency_leaves_a_resource_idle() -> None:
    """A quarter of the resource at the rates: four times them fill it, twice them keep it half idle."""
    free, limited = Way({"a": 0.25}), Way({"a": 0.125}, most_busy=0.5)
    assert factor_of([free]) == 4.0 and factor_of([Way({"a": 0.125}), limited]) == 2.0
    assert sums([free, limited]) == {"a": 0.375} and factor_of([Way({})]) == inf


def test_shares_of_very_different_size_are_chosen_exactly() -> None:
    tenants = [[Way({"a": 1e-7}), Way({"b": 0.9e-7})], [Way({"a": 5e3}), Way({"b": 4e3})]]
    assert choose(tenants, {}, 10.0) is not None
    found = choose([tenants[0], [Way({"a": 2e-7}), Way({"b": 2e-7})]], {}, 10.0)
    assert found is not None and found.ways in ((0, 1), (1, 0)) and found.bound == pytest.approx(5e6, rel=1e-5)


def test_divided_ops_bound_every_choice() -> None:
    """Two ops of 0.6 and 0.2 on either of two devices, one of which refuses the second: 0.4 each at best."""
    devices = {"x": np.array([0.6, 0.2]), "y": np.array([0.6, inf])}
    assert relaxed_factor([devices], {"x": ["a"], "y": ["b"]}) == pytest.approx(1 / 0.4)
    assert relaxed_factor([devices, devices], {"x": ["a"], "y": ["b"]}) == pytest.approx(1 / 0.8)
    both = {"xy": np.array([0.3, 0.3])}
    assert relaxed_factor([both], {"xy": ["a", "b"]}) == pytest.approx(1 / 0.6)
    assert relaxed_factor([{"x": np.zeros(2)}], {"x": ["a"]}) == inf

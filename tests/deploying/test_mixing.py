"""Several models in one mix of requests: none runs ahead, and the slowest device sets the pace."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.deploying.mixing import LEADS, run_mix, run_paced, timed

RATES = {"a": 200.0, "b": 50.0}


@contextmanager
def one_device(failing: str = "") -> Iterator[tuple[dict[str, Any], list[str]]]:
    """Two models, one of which has two workers, on a device that answers one request after the other; and what it did."""
    done = list[str]()

    def compute(name: str) -> None:
        if name == failing:
            raise ValueError(name)
        done.append(name)

    with ThreadPoolExecutor(1) as device:

        def entry(name: str, workers: int) -> Any:
            def call() -> "Future[None]":
                return device.submit(compute, name)

            plan = SimpleNamespace(workers=[None] * workers, loads_s={"cpu:0": 1.0})
            return SimpleNamespace(plan=plan, in_flight=3, calls=[call])

        yield {"a": entry("a", 1), "b": entry("b", 2)}, done


def test_models_keep_the_ratio_of_their_rates() -> None:
    """b has four requests in a lead of 0.08 s, in which a has sixteen."""
    with one_device() as (entries, done):
        mix = run_mix(SimpleNamespace(loaded=entries), RATES, 0.0)  # type: ignore[arg-type]
    assert mix.factor > 0 and mix.begun_s < mix.ended_s and len(done) == LEADS * (16 + 4)
    for number in range(len(done)):
        ahead_s = abs(done[:number].count("a") / 200 - done[:number].count("b") / 50)
        assert ahead_s <= 0.08 + 4 / 50


@given(st.floats(0.2, 5.0), st.lists(st.tuples(st.integers(1, 50), st.floats(0.0, 1.0)), min_size=1, max_size=4))
def test_a_mix_is_timed_while_no_model_has_ended(factor: float, models: list[tuple[int, float]]) -> None:
    """All models advance at one pace, some up to a lead of 1 s at their rates ahead; the last ones run on alone, faster."""
    rates = {str(number): float(rate) for number, (rate, _) in enumerate(models)}
    most = max(ahead for _, ahead in models)
    answers = {}
    for name, (rate, ahead) in zip(rates, models, strict=True):
        at = [(number / rate - ahead) / factor for number in range(1, 12 * rate + 1)]
        together = (12 - most) / factor  # then a model has all its answers
        answers[name] = [one if one <= together else together + (one - together) / 9 for one in at]
    mix = timed(answers, rates, {name: int(rate) for name, rate in rates.items()}, dict.fromkeys(rates, 1.0))
    seconds_of_a_request = 1 / min(rates.values())
    assert mix.factor == pytest.approx(factor, rel=seconds_of_a_request / 5 + 1e-6)


def test_a_failed_request_ends_the_mix_of_all() -> None:
    with one_device(failing="b") as (entries, _), pytest.raises(ValueError, match="b"):
        run_mix(SimpleNamespace(loaded=entries), RATES, 0.0)  # type: ignore[arg-type]


def test_requests_that_come_at_random_are_timed_from_their_arrival() -> None:
    with one_device() as (entries, done):
        found = run_paced(SimpleNamespace(loaded=entries), RATES, 0.1, 0)  # type: ignore[arg-type]
    assert {name: one.count for name, one in found.items()} == {"a": 20, "b": 5} and len(done) == 25
    assert all(0 < one.p50_s <= one.max_s for one in found.values())

"""The final of a search: who takes part, who wins, and what it costs."""

from types import SimpleNamespace
from typing import Any

import pytest

from autosplit.errors import WorkerError
from autosplit.reports.outcomes import Ratio
from autosplit.searching.candidates import Trial
from autosplit.searching.final import MOST_FINALISTS, NUM_ROUNDS, finalists, run_final

FIRST = "first"


def trial(name: str, times_first: float | None, low: float = 0.0, high: float = 0.0) -> Trial:
    """A candidate that measured so many times as good as the first one, within an interval."""
    plan: Any = SimpleNamespace(hash=name, microbatch=1)
    interval = Ratio(times_first, low, high, 3) if times_first and low else None
    return Trial({}, plan, times_first, times_first, interval=interval)


class Entry:
    """A loaded plan whose rounds are given."""

    def __init__(self, trial: Trial, rounds: list[float]) -> None:
        self.plan, self.pace_per_s, self.all_rounds = trial.plan, 10.0, rounds
        self.rounds_per_s = [99.0]  # of the short rounds before
        self.rounds_alone_s: list[float] = []

    def restart(self) -> None:
        self.rounds_per_s, self.rounds_alone_s = [], []

    def rounds(self, objective: str) -> list[float]:
        return self.rounds_per_s if objective == "throughput" else self.rounds_alone_s

    def outcome(self) -> Any:
        mine, per_s = self, list(self.rounds_per_s)

        def against(other: Any, objective: str) -> Ratio:
            pairs = zip(mine.rounds(objective), other.entry.rounds(objective), strict=False)
            return Ratio.of([a / b for a, b in pairs])

        return SimpleNamespace(entry=self, throughput_per_s=per_s[-1], against=against)


class FakeBench:
    """A bench on which a plan's rounds are known beforehand."""

    def __init__(self, first: Trial, rounds: dict[str, list[float]]) -> None:
        self.all_rounds = rounds
        self.loaded = {FIRST: Entry(first, rounds[first.plan.hash])}
        self.ran: list[tuple[str, ...]] = []
        self.unloaded: list[str] = []

    def load(self, name: str, plan: Any, traced: Any) -> None:
        if name not in self.all_rounds:
            raise WorkerError(f"worker '{name}' was killed")
        self.loaded[name] = Entry(trial(name, 1.0), self.all_rounds[name])

    def unload(self, name: str) -> None:
        del self.loaded[name]
        self.unloaded.append(name)

    def run_round(self, names: Any, number: int, num_items: int) -> None:
        assert num_items == 10
        self.ran.append(tuple(names))
        for name in names:
            self.loaded[name].rounds_per_s.append(self.loaded[name].all_rounds[number])

    def run_alone(self, names: Any, number: int, seconds: float) -> None:
        self.ran.append(tuple(names))
        for name in names:
            self.loaded[name].rounds_alone_s.append(self.loaded[name].all_rounds[number])


def run(first: Trial, trials: list[Trial], rounds: dict[str, list[float]], objective: str = "throughput", most: int = 99) -> Any:
    """The bench after a final that may make ``most`` rounds, and the figures of the finalists."""
    bench: Any = FakeBench(first, rounds)
    ended = run_final(bench, objective, FIRST, trials, lambda microbatch: (None, None), lambda: len(bench.ran) >= most)  # type: ignore[arg-type]
    return bench, {one.plan.hash: one.times_first for one in ended}


def test_only_candidates_that_measured_level_with_the_best_one_take_part_and_the_first_one() -> None:
    first, best, level, behind = (
        trial("a", 1.0),
        trial("b", 1.2, 1.1, 1.3),
        trial("c", 1.15, 1.05, 1.25),
        trial("d", 1.0, 0.9, 1.05),
    )
    failed, wrong = trial("e", None), trial("f", 0.0)
    assert finalists([first, best, level, behind, wrong], best) == [best, level, first]
    assert finalists([first, best, behind, failed, wrong], best) == []
    many = [trial(f"l{n}", 1.1 + n / 100, 1.0, 1.3) for n in range(5)]
    assert finalists([first, *many, best], best) == [best, many[4], many[3], first] and MOST_FINALISTS == 3


def test_the_final_turns_what_short_rounds_got_wrong_and_ends_as_soon_as_one_is_ahead() -> None:
    first, other = trial("a", 1.0), trial("b", 0.97, 0.9, 1.05)
    bench, times = run(first, [first, other], {"a": [10.0] * 9, "b": [12.8, 13.0, 12.9] + [0.1] * 6})
    assert times == {"a": 1.0, "b": pytest.approx(1.29)} and len(bench.ran) == NUM_ROUNDS
    assert bench.unloaded == ["b"] and list(bench.loaded) == [FIRST]


def test_level_candidates_stop_after_the_least_rounds_and_a_hopeless_one_after_the_first() -> None:
    first, level, slow = trial("a", 1.0), trial("b", 1.0, 0.9, 1.1), trial("c", 1.0, 0.9, 1.1)
    rounds = {"a": [10.0] * 9, "b": [10.1, 9.9, 10.0] + [10.0] * 6, "c": [5.0] * 9}
    bench, times = run(first, [first, level, slow], rounds)
    assert bench.ran == [(FIRST, "b", "c"), *[(FIRST, "b")] * (NUM_ROUNDS - 1)]
    assert times == {"a": 1.0, "b": 1.0, "c": 0.5}


def test_the_time_ends_a_final_but_never_before_a_round() -> None:
    first, other = trial("a", 1.0), trial("b", 1.0, 0.9, 1.1)
    bench, times = run(first, [first, other], {"a": [10.0, 12.0] * 5, "b": [12.0, 10.0] * 5}, most=2)
    assert len(bench.ran) == 2 and times["b"] == pytest.approx((1.2 + 10 / 12) / 2)
    bench, times = run(first, [first, other], {"a": [10.0], "b": [12.0]}, most=0)
    assert bench.ran == [] and times == {}  # no time to load the other one


def test_a_finalist_that_cannot_be_loaded_again_keeps_its_short_rounds() -> None:
    first, dead, other = trial("a", 1.0), trial("dead", 1.1, 0.9, 1.2), trial("b", 1.0, 0.9, 1.1)
    assert run(first, [dead, first], {"a": [10.0] * 9})[1] == {}
    _, times = run(first, [dead, other, first], {"a": [10.0] * 9, "b": [12.0] * 9})
    assert times == {"a": 1.0, "b": pytest.approx(1.2)}


def test_a_final_for_latency_compares_requests_alone_and_fills_the_table() -> None:
    first, other = trial("a", 1.0), trial("b", 1.0, 0.9, 1.1)
    bench, times = run(first, [first, other], {"a": [10.0] * 9, "b": [20.0] * 9}, "latency")
    assert times["b"] == pytest.approx(2.0)
    assert len(bench.ran) == NUM_ROUNDS + 1

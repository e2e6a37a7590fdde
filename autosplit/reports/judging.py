"""decide(): whether to use a plan or one of its baselines, and whether the rounds are sure about it. No torch."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from autosplit.reports.outcomes import PLAN, Outcome, Ratio
from autosplit.values.plan import Plan

FAR_BEHIND = (0.6, 0.8)
"""A baseline that never reached this share of the fastest plan stops after the first round, or after a later or hurried one."""

RIVAL = 1.03
"""A plan that was at least this many times as fast as the fastest plan in some round may be the better one."""

BUSY = 0.1
"""A ratio whose interval is wider than this was measured on a machine that was busy with something else."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Which way to use, why, and whether the measurements show that no other way is better."""

    chosen: str
    sentence: str
    sure: bool


Unfit = Callable[[Plan, float], Sequence[str]]
"""The demands that a baseline does not meet, given the seconds of a request alone. With any, it must not become the plan."""


def decide(outcomes: Mapping[str, Outcome], objective: str, forced: bool, unfit: Unfit = lambda other, s: ()) -> Verdict:
    """Which of the plan and its baselines to use.

    A baseline takes the place of the plan if it measured better beyond the noise, if it is simpler and level with the plan, or
    if the plan gives wrong numbers. A ``forced`` plan is kept, and an ``unfit`` baseline is never chosen.
    """
    plan = outcomes[PLAN]
    right = {name: outcome for name, outcome in outcomes.items() if name != PLAN and outcome.outputs_equal}
    if not right:
        return Verdict(PLAN, "No baseline ran beside the plan, so there is nothing to compare it with.", sure=False)
    faults = {name: next(iter(unfit(outcome.plan, outcome.latency.p50_s)), "") for name, outcome in right.items()}
    fit = {} if forced else {name: outcome for name, outcome in right.items() if not faults[name]}
    if fit and not plan.outputs_equal:
        best = _best(fit, plan, objective)
        return Verdict(best, f"The plan gives wrong numbers, so '{best}' is the chosen way.", sure=True)
    if not plan.outputs_equal:
        because = "it was given" if forced else "no baseline is what was asked for"
        return Verdict(PLAN, f"The plan gives wrong numbers, and stays the chosen way because {because}.", sure=True)
    what = "as low a latency" if objective == "latency" else "as fast"
    ahead = {name: outcome for name, outcome in fit.items() if outcome is not plan and outcome.against(plan, objective).ahead}
    if ahead:
        best = _best(ahead, plan, objective)
        ratio = ahead[best].against(plan, objective)
        sentence = f"'{best}' measures {ratio.median:.2f} times {what} as the plan ({ratio}), so it is the chosen way."
        return Verdict(best, sentence, sure=True)
    fastest = _best(right, plan, objective)
    ratio = right[fastest].against(plan, objective)
    if ratio.ahead and right[fastest] is not plan:
        because = "it was given" if forced else f"that baseline is not what was asked for: {faults[fastest]}"
        sentence = f"'{fastest}' measures {ratio.median:.2f} times {what} as the plan ({ratio}); "
        sentence += f"the plan stays the chosen way because {because}."
        return Verdict(PLAN, sentence, sure=True)
    rival = _best(fit or right, plan, objective)
    ratio = plan.against((fit or right)[rival], objective)
    if ratio.ahead:
        sentence = f"The plan measures {ratio.median:.2f} times {what} as the best baseline, '{rival}' ({ratio})."
        return Verdict(PLAN, sentence, sure=True)
    simpler = {name: o for name, o in fit.items() if is_simpler(o.plan, plan.plan) and _is_level(plan.against(o, objective))}
    if simpler:
        best = _best(simpler, plan, objective)
        sentence = _simpler(best, simpler[best].plan, plan.plan, plan.against(simpler[best], objective), what)
        return Verdict(best, sentence, sure=False)
    if right.get(rival) is plan:
        return Verdict(PLAN, f"The plan is the baseline '{rival}', and no other one measures better.", sure=True)
    return Verdict(PLAN, _cannot_tell(rival, ratio, what), sure=False)


def _is_level(ratio: Ratio) -> bool:
    """Whether rounds show that a plan is not faster than a baseline. On a busy machine only the median says so."""
    return ratio.num_rounds > 1 and not ratio.ahead and (not _is_busy(ratio) or ratio.median < RIVAL)


def _is_busy(ratio: Ratio) -> bool:
    return ratio.high / ratio.low > 1 + BUSY


def is_simpler(one: Plan, other: Plan) -> bool:
    """Whether a plan has fewer stages or backends than another one, and not more of either."""
    (stages, backends), (more_stages, more_backends) = _parts(one), _parts(other)
    return stages <= more_stages and backends <= more_backends and (stages, backends) != (more_stages, more_backends)


def _parts(plan: Plan) -> tuple[int, int]:
    """The numbers of stages and of backends."""
    return len(plan.stages), len(plan.backends)


def _simpler(name: str, simple: Plan, plan: Plan, ratio: Ratio, what: str) -> str:
    """Why a simpler baseline takes the place of a plan that is level with it."""
    parts = zip(("stage", "backend"), _parts(simple), _parts(plan), strict=True)
    fewer = " and ".join(f"{few} {noun}{'s' * (few != 1)} instead of {many}" for noun, few, many in parts if few < many)
    busy, level = f"The machine was busy: cannot tell the plan from '{name}'", f"The plan and '{name}' are level within the noise"
    found = f"{busy if _is_busy(ratio) else level} (the plan measured {ratio.median:.2f} times {what}, {ratio})"
    return f"{found}. '{name}' is the chosen way because it is simpler: {fewer}."


def _cannot_tell(rival: str, ratio: Ratio, what: str) -> str:
    """Why the plan is kept although the measurements do not tell it from a baseline."""
    measured = f"the plan measured {ratio.median:.2f} times {what}"
    if ratio.num_rounds == 1:
        return f"One round cannot tell the plan from '{rival}' ({measured}), so the plan stays the chosen way; run more rounds."
    if _is_busy(ratio):
        return (
            f"The machine was busy: cannot tell the plan from '{rival}' ({measured}, {ratio}), so the plan stays the chosen way."
        )
    level = f"The plan and the best baseline, '{rival}', are level within the noise ({measured}, {ratio})"
    return f"{level}, so the plan stays the chosen way."


def _best(some: Mapping[str, Outcome], plan: Outcome, objective: str) -> str:
    """The best of some baselines. Baselines that are ahead of the plan are compared in the rounds that both ran."""
    best = max(some, key=lambda name: some[name].against(plan, objective).median)
    ahead = [name for name in some if some[name].against(plan, objective).median > 1]
    return max([best, *ahead], key=lambda name: some[name].against(some[best], objective).median)


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """The order of a round: no plan is first in all rounds, and none always follows the same other plan.

    >>> [in_turn("abc", number) for number in range(3)]
    [['a', 'b', 'c'], ['a', 'c', 'b'], ['c', 'a', 'b']]
    """
    turn = number % len(names)
    order = [*names[turn:], *names[:turn]]
    # Turning alone swaps two plans; reversing them too would undo that.
    return order if number % 2 == 0 or len(order) == 2 else order[::-1]


def still_running(rates: Mapping[str, Sequence[float]], keep: Collection[str], hurried: bool = False) -> list[str]:
    """The plans that are worth another round: those not far behind. If ``keep`` is empty, the fastest plan and its rivals.

    Args:
        rates: throughput of each plan, in the same rounds.
        keep: plans that run on in any case.
        hurried: the time is over, so the next round is the last one.

    >>> still_running({"plan": [9.0, 9.0], "slow": [5.0, 7.0], "fast": [10.0, 10.0]}, ["plan"])
    ['plan', 'fast']
    >>> still_running({"plan": [9.0, 9.0], "rival": [9.0, 11.0], "fast": [10.0, 10.0]}, [])
    ['rival', 'fast']
    """
    first = next(iter(rates.values()))
    fastest = max(rates, key=lambda name: median(a / b for a, b in zip(rates[name], first, strict=True)))
    most = {name: max(a / b for a, b in zip(per_s, rates[fastest], strict=True)) for name, per_s in rates.items()}
    least = FAR_BEHIND[hurried or len(first) > 1] if keep else RIVAL
    return [name for name in rates if name == fastest or name in keep or most[name] >= least]


def leader(rates: Mapping[str, Sequence[float]]) -> str:
    """The plan that is ahead of each other one by more than the spread of their ratios, or has no rival; '' before three rounds.

    >>> leader({"plan": [9.0, 9.1, 9.0], "fast": [10.0, 10.1, 10.2]}), leader({"plan": [9.0, 9.1], "fast": [10.0, 10.1]})
    ('fast', '')
    >>> leader({"plan": [9.0, 9.1, 9.2], "level": [9.1, 9.0, 9.1]}), leader({"plan": [9.0, 9.4, 9.0], "rival": [9.5, 9.0, 8.9]})
    ('plan', '')
    """
    best = max(rates, key=lambda name: median(rates[name]))
    ratios = [Ratio.of([a / b for a, b in zip(rates[best], rates[name], strict=False)]) for name in rates if name != best]
    return best if ratios and all(one.clear or (one.num_rounds > 2 and one.low * RIVAL > 1) for one in ratios) else ""

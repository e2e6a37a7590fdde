"""Which plan a generator gets: plans of each number of stages, and whole models side by side, compared by their forecasts."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

from autosplit.deploying.footprints import Footprints
from autosplit.errors import InfeasibleError
from autosplit.generating.forecast import forecast, foretold
from autosplit.generating.phases import PhaseProfile, demands_of, num_groups_on
from autosplit.generating.steps import StepFamily
from autosplit.planning.baselines import REPLICAS, baselines_of, unmet_demands
from autosplit.planning.predicting import bounded
from autosplit.reports.outcomes import PLAN, TokenRates
from autosplit.shapes.profiles import shapes_of
from autosplit.tables import seconds_text
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.sequences import Sequences

LIMIT_WORDS = {"first_token_s": "to the first token", "per_token_s": "from a token to the next one"}
"""The limits of sequences in words."""


def best_plan(
    family: StepFamily,
    profile: PhaseProfile,
    footprints: Footprints,
    constraints: Constraints | None,
    first: Plan,
    ask: Callable[[Constraints], Plan],
) -> Plan:
    """The plan with the best forecast within the limits of the sequences, with that forecast as its prediction.

    A planner knows the seconds of stages. The time of a token follows from all of them, the groups of sequences and the host, so
    plans of each number of stages are asked for.

    Args:
        family: the steps, and the sequences with their limits.
        profile: the measurements of both phases.
        footprints: the memory of stages on the devices.
        constraints: the demands on the plan; its objective is tokens per second (``throughput``) or the time from one token of a
            sequence to its next one (``latency``).
        first: the planner's answer to ``demands_of(constraints)``: the chain of stages with the fewest seconds on a device.
        ask: the planner, for further such chains.
    Raises: InfeasibleError: no plan keeps the limits. Others as ``ask``.
    """
    wanted = constraints or Constraints()
    for_latency, sequences = wanted.objective == "latency", family.sequences
    machine, account = footprints.machine, footprints.account(family.variants[0], profile)
    plans = [first, *_others(demands_of(wanted), first, machine, ask)]
    usual = baselines_of(family.graph, plans[0], machine, profile, isolate=True).plans
    beside = [account.counted(one) for name, one in usual.items() if name.startswith(REPLICAS)]
    plans = [account.counted(one) for one in plans]
    backends = {stage.backend for plan in plans for stage in plan.stages}
    plans += [one for one in beside if not unmet_demands(one, 0.0, family.graph, machine, wanted, backends)]
    told = [(plan, forecast(plan, family, machine, profile)) for plan in plans]
    known = [(plan, rates) for plan, rates in told if rates is not None]
    fit = [(plan, rates) for plan, rates in known if not limit_faults(rates, sequences)]
    if known and not fit:
        least = {name: seconds_text(min(getattr(rates, name) for _, rates in known)) for name in sequences.limits}
        asked = [f"{seconds_text(limit)} {LIMIT_WORDS[name]} (at best {least[name]})" for name, limit in sequences.limits.items()]
        raise InfeasibleError(
            f"no plan is predicted to take at most {' and '.join(asked)} with {sequences.max_sequences} sequences side by side; "
            "allow more, or fewer sequences (max_sequences)"
        )
    chosen, rates = min(fit, key=lambda one: one[1].per_token_s if for_latency else -one[1].tokens_per_s) if fit else told[0]
    shapes = shapes_of(family, chosen, profile.shapes) if profile.shapes is not None else None
    plan = replace(chosen, shapes=shapes, sequences=sequences, objective=wanted.objective, chosen=PLAN)
    return foretold(plan, rates)


def limit_faults(rates: TokenRates, sequences: Sequences) -> list[str]:
    """A sentence for each limit of the sequences that is not kept."""
    return [
        f"it takes {seconds_text(getattr(rates, name))} {LIMIT_WORDS[name]}, and at most {seconds_text(limit)} is asked for"
        for name, limit in sequences.limits.items()
        if getattr(rates, name) > limit
    ]


def _others(wanted: Constraints, first: Plan, machine: Machine, ask: Callable[[Constraints], Plan]) -> Iterator[Plan]:
    """The planner's answers for each number of stages, with the bound on all of them. Raises: as ``ask``."""
    most = min(num_groups_on(machine), wanted.max_stages or num_groups_on(machine))
    for number in range(1, most + 1) if wanted.num_stages is None else ():
        with suppress(InfeasibleError):
            yield bounded(ask(replace(wanted, num_stages=number, max_stages=None)), first.prediction.bound_s)

"""Forecast: the scheduler runs a plan's steps on a clock of its own, for the seconds that the evaluator gives each stage.

Between the answer of a step and the next step of its sequences lies the time of the host (``hostcost``).

``planning.predicting.predict`` gives the seconds of a stage in each phase that was measured; at other numbers of tokens they lie
on a line between these.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from autosplit.errors import PlanError
from autosplit.generating.hostcost import NOTHING, HostCost
from autosplit.generating.phases import PhaseProfile
from autosplit.generating.sampling import Sampling
from autosplit.generating.scheduler import Scheduler
from autosplit.generating.sequences import Generation, Step, num_giving
from autosplit.generating.sources import Source
from autosplit.generating.steps import TOKENS, StepFamily
from autosplit.planning.predicting import charge, predict
from autosplit.reports.outcomes import TokenRates
from autosplit.shapes.batching import Bucket
from autosplit.tables import seconds_text
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.sequences import Sequences

StageSeconds = Mapping[int, Sequence[float]]
"""Tokens of a step to the seconds of each stage."""


def forecast(plan: Plan, family: StepFamily, machine: Machine, profile: PhaseProfile | None) -> TokenRates | None:
    """The rates and times of sequences that come at once, as many as the caches hold; None where a measurement is missing.

    Args:
        plan: the stages; those with replicas are that many pipelines side by side.
        family: the steps, and the sequences.
        machine: the devices.
        profile: the measurements of both phases.
    """
    pipelines, sequences = replicas_of(plan), family.sequences
    if profile is None or not is_measured(plan, profile):
        return None
    machine, busy = machine.only(devices_of(plan)), have_neighbours(plan, sequences)
    share = replace(sequences, max_sequences=sequences.largest_group(len(pipelines)))
    found = list[TokenRates]()
    for one in pipelines:
        stage_s = between(stage_seconds(one, family, machine, profile, busy=busy), family.allowed[TOKENS])
        pays = pays_for_host(one, family, machine, profile)
        devices = [stage.devices[0] for stage in one.stages]
        found.append(simulated(stage_s, devices, share, profile.host, pays=pays, source=family.source))
    return side_by_side_rates(found, sequences.max_sequences / share.max_sequences)


def side_by_side_rates(found: Sequence[TokenRates], num_shares: float) -> TokenRates:
    """The rates of pipelines that get an equal share of the sequences each: all end with the slowest one.

    >>> side_by_side_rates([TokenRates(6.0, 1.0, 0.1), TokenRates(4.0, 2.0, 0.3)], 2)
    TokenRates(tokens_per_s=8.0, first_token_s=1.5, per_token_s=0.2)
    """
    middle = TokenRates.middle(found)
    return replace(middle, tokens_per_s=num_shares * min(one.tokens_per_s for one in found))


def foretold(plan: Plan, told: TokenRates | None) -> Plan:
    """The plan with a forecast as its prediction: new tokens per second, and as its latency the time per token.

    The bottleneck and its bound stay those of a step.
    """
    if told is None:
        return plan
    rates = replace(plan.prediction, throughput_per_s=told.tokens_per_s, latency_s=told.per_token_s)
    return replace(plan, prediction=rates)


def host_text(plan: Plan, told: TokenRates, sequences: Sequences, host: HostCost) -> str:
    """The host's share of the time from one token of a sequence to its next one, in words."""
    single, *others = replicas_of(plan)
    group = sequences.largest_group((1 + len(others)) * len(devices_of(single)))
    host_s = host.turnaround.of(group)
    return (
        f"the host is predicted to take {seconds_text(host_s)} between steps of {group} sequence{'s' * (group != 1)}, "
        f"{host_s / told.per_token_s:.0%} of the time per token"
    )


def replicas_of(plan: Plan) -> list[Plan]:
    """The plans that run side by side: the first one has the first device of each stage, and so on.

    Raises: PlanError: stages have different numbers of devices.
    """
    [count, *others] = sorted({len(stage.devices) for stage in plan.stages})
    if others:
        raise PlanError(f"a sequence stays in one pipeline, so each stage of a generator has {count} devices or each {others[0]}")
    if count == 1:
        return [plan]
    return [
        replace(plan, stages=tuple(replace(stage, devices=(stage.devices[number],)) for stage in plan.stages))
        for number in range(count)
    ]


def devices_of(plan: Plan) -> list[str]:
    """The devices of a plan; each pipeline has at most as many steps under way as it has devices."""
    return list(dict.fromkeys(device for stage in plan.stages for device in stage.devices))


def have_neighbours(plan: Plan, sequences: Sequences) -> bool:
    """Whether devices of a plan compute at once: there are several, and a step for each."""
    return min(len(devices_of(plan)), sequences.max_sequences) > 1


def is_measured(plan: Plan, profile: PhaseProfile) -> bool:
    """Whether both phases were measured where the plan runs, and in its precision."""
    same = all(precision == profile.precision for precision in plan.precisions)
    return same and all(setting in profile.measured for _, setting in plan.workers)


def pays_for_host(plan: Plan, family: StepFamily, machine: Machine, profile: PhaseProfile) -> bool:
    """Whether the stage that hands over an answer pays the host's processor time: the devices leave the host no core."""
    return charge(family.graph, machine.around(devices_of(plan)), profile)[1] > 0


def stage_seconds(plan: Plan, family: StepFamily, machine: Machine, profile: PhaseProfile, *, busy: bool) -> StageSeconds:
    """The seconds of each stage of a plan in each phase.

    Args:
        plan: the stages.
        family: the steps.
        machine: the devices on which pipelines run side by side; where they take all cores, a stage pays for the host.
        profile: the measurements of both phases.
        busy: whether several of these devices compute at once.
    Raises: ProfileError: a measurement is missing (see ``is_measured``).
    """
    found = dict[int, Sequence[float]]()
    for tokens, phase in profile.phases.items():
        traced = family.at({TOKENS: tokens})
        told = predict(replace(plan, graph_hash=traced.graph.hash), traced.graph, machine, phase)
        found[tokens] = [
            stage.load_s * (1.0 if busy else phase.relief(setting))
            for stage, (_, setting) in zip(told.stages, plan.workers, strict=True)
        ]
    return found


def between(known: StageSeconds, sizes: Sequence[int]) -> StageSeconds:
    """The seconds of each stage at other numbers of tokens: on the line through the two nearest ones that are known.

    >>> between({2: [1.0], 6: [5.0]}, [1, 4, 6])
    {1: [0.5], 4: [3.0], 6: [5.0]}
    """
    at = sorted(known)
    rows = np.array([known[tokens] for tokens in at])
    found = {}
    for tokens in sizes:
        if tokens < at[0] and len(at) > 1:
            slope = (rows[1] - rows[0]) / (at[1] - at[0])
            seconds = np.maximum(rows[0] - slope * (at[0] - tokens), rows[0] * tokens / at[0])
        else:
            seconds = np.array([np.interp(tokens, at, column) for column in rows.T])
        found[tokens] = [float(one) for one in seconds]
    return found


def simulated(
    stage_s: StageSeconds,
    devices: Sequence[str],
    sequences: Sequences,
    host: HostCost = NOTHING,
    *,
    pays: bool = False,
    source: Source | None = None,
) -> TokenRates:
    """Rates and times of ``max_sequences`` sequences that come at once; as many steps are under way as there are devices.

    Args:
        stage_s: seconds of each stage for each variant.
        devices: the device of each stage, which runs one step at a time.
        sequences: the sequences.
        host: what a step costs at the host, which takes one answer at a time.
        pays: whether the seconds of the last stage hold the processor time of the host.
        source: what a prompt is for a model with an encoder.

    >>> simulated({1: [0.5, 0.5], 9: [1.0, 2.0]}, ["a", "b"], Sequences(prompt=8, new=3, max_sequences=1))
    TokenRates(tokens_per_s=0.6, first_token_s=3.0, per_token_s=1.0)
    """
    buckets = [Bucket(number, {TOKENS: size}, sum(stage_s[size])) for number, size in enumerate(stage_s)]
    scheduler = Scheduler(buckets, sequences.max_sequences, len(set(devices)), sequences.per_token_s, source)
    rows = None if source is None else np.empty((source.num_rows(sequences.prompt), 0))
    num_first = sequences.prompt if source is None else source.num_start
    now_s, times_s = 0.0, [list[float]() for _ in range(sequences.max_sequences)]

    def note(times: list[float], token: int) -> None:
        times.append(now_s)

    for times in times_s:
        sampling = Sampling(max_new_tokens=sequences.new)
        scheduler.add(Generation([0] * num_first, num_first, sampling, on_token=partial(note, times), source=rows))
    free_s, host_free_s, under_way = dict.fromkeys(devices, 0.0), 0.0, deque[tuple[float, Step]]()
    while True:
        while (step := scheduler.next_step()) is not None:
            done_s = now_s
            for device, seconds in zip(devices, stage_s[step.num_tokens], strict=True):
                done_s = free_s[device] = max(done_s, free_s[device]) + seconds
            under_way.append((done_s, step))
        if not under_way:
            break
        done_s, step = under_way.popleft()
        count = len(step.parts)
        begun_s = max(done_s - pays * host.processor.of(count), host_free_s)
        host_free_s = begun_s + host.processor.of(count)
        now_s = max(now_s, done_s, begun_s + host.turnaround.of(count))
        scheduler.finish(step, [0] * num_giving(step.parts))
    return TokenRates.of(times_s, now_s)

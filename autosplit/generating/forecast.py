"""Forecast: the scheduler runs a plan's steps in simulated time, by the seconds that the evaluator gives each stage.

Between the answer of a step and the next step of its sequences lies the time of the host (``hostcost``).

``planning.predicting.predict`` gives the seconds of a stage in each phase that was measured; at other numbers of tokens they lie
on a line between these.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from autosplit.errors import PlanError
from autosplit.generating.phases import PhaseProfile
from autosplit.generating.sampling import Sampling
from autosplit.generating.scheduler import Scheduler
from autosplit.generating.sequences import Generation, Step
from autosplit.generating.sources import Source
from autosplit.generating.steps import TOKENS, StepFamily
from autosplit.planning.predicting import predict
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
    machine, sizes = machine.only(devices_of(plan)), family.allowed[TOKENS]
    share = replace(sequences, max_sequences=sequences.largest_group(len(pipelines)))
    num_others = min(len(pipelines), sequences.max_sequences) - 1
    found = list[TokenRates]()
    for one in pipelines:
        busy_s, alone_s = (between(known, sizes) for known in stage_seconds(one, family, machine, profile))
        devices = [stage.devices[0] for stage in one.stages]
        num_beside = num_others * len(set(devices))
        found.append(
            simulated(
                busy_s,
                alone_s,
                devices,
                share,
                host_s=profile.host_s,
                start_s=profile.start_s,
                num_beside=num_beside,
                source=family.source,
            )
        )
    slowest_per_s = min(one.tokens_per_s for one in found)  # all get an equal share
    return replace(TokenRates.middle(found), tokens_per_s=slowest_per_s * sequences.max_sequences / share.max_sequences)


def foretold(plan: Plan, told: TokenRates | None) -> Plan:
    """The plan with a forecast as its prediction: new tokens per second, and as its latency the time per token.

    The bottleneck and its bound stay those of a step.
    """
    if told is None:
        return plan
    rates = replace(plan.prediction, throughput_per_s=told.tokens_per_s, latency_s=told.per_token_s)
    return replace(plan, prediction=rates)


def host_text(plan: Plan, told: TokenRates, sequences: Sequences, host_s: float) -> str:
    """The host's share of the time from one token of a sequence to its next one, in words."""
    single, *others = replicas_of(plan)
    group = sequences.largest_group((1 + len(others)) * len(devices_of(single)))
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


def is_measured(plan: Plan, profile: PhaseProfile) -> bool:
    """Whether both phases were measured where the plan runs, and in its precision."""
    same = all(precision == profile.precision for precision in plan.precisions)
    return same and all(setting in profile.measured for _, setting in plan.workers)


def stage_seconds(plan: Plan, family: StepFamily, machine: Machine, profile: PhaseProfile) -> tuple[StageSeconds, StageSeconds]:
    """The seconds of each stage of a plan in each phase, without the host: beside devices that compute, and beside idle ones.

    Args:
        plan: the stages.
        family: the steps.
        machine: the devices on which pipelines run side by side.
        profile: the measurements of both phases.
    Raises: ProfileError: a measurement is missing (see ``is_measured``).
    """
    busy_s, alone_s = dict[int, Sequence[float]](), dict[int, Sequence[float]]()
    for tokens, phase in profile.phases.items():
        traced = family.at({TOKENS: tokens})
        told = predict(replace(plan, graph_hash=traced.graph.hash), traced.graph, machine, phase)
        busy_s[tokens] = [stage.load_s for stage in told.stages]
        relief = [phase.relief(setting) for _, setting in plan.workers]
        alone_s[tokens] = [seconds * one for seconds, one in zip(busy_s[tokens], relief, strict=True)]
    return busy_s, alone_s


def between(known: StageSeconds, sizes: Sequence[int]) -> StageSeconds:
    """The seconds of each stage at other numbers of tokens: on the line through the two nearest ones that are known.

    A smaller step than all of them takes as long as the smallest, for it reads the same weights.

    >>> between({2: [1.0], 6: [5.0]}, [1, 4, 6])
    {1: [1.0], 4: [3.0], 6: [5.0]}
    """
    at = sorted(known)
    columns = list(zip(*(known[tokens] for tokens in at), strict=True))
    return {tokens: [float(np.interp(tokens, at, column)) for column in columns] for tokens in sizes}


def simulated(
    busy_s: StageSeconds,
    alone_s: StageSeconds,
    devices: Sequence[str],
    sequences: Sequences,
    *,
    host_s: float = 0.0,
    start_s: float = 0.0,
    num_beside: int = 0,
    source: Source | None = None,
) -> TokenRates:
    """Rates and times of ``max_sequences`` sequences that come at once; as many steps are under way as there are devices.

    So while the host has an answer, a device waits, whose core the host takes: no stage pays for it. A stage takes its seconds
    beside busy devices for the part of them that compute, and those beside idle ones for the rest.

    Args:
        busy_s: seconds of each stage for each variant, while all other devices compute.
        alone_s: the same while none does.
        devices: the device of each stage, which runs one step at a time.
        sequences: the sequences.
        host_s: the host's processor time between the answer of a step and its next one; it takes one answer at a time.
        start_s: the host's processor time before the first step.
        num_beside: devices of other pipelines, which compute all the time.
        source: the kind of prompts of a model with an encoder.

    >>> step_s = {1: [0.5, 0.5], 9: [1.0, 2.0]}
    >>> simulated(step_s, step_s, ["a", "b"], Sequences(prompt=8, new=3, max_sequences=1))
    TokenRates(tokens_per_s=0.6, first_token_s=3.0, per_token_s=1.0)
    """
    num_others = len(set(devices)) - 1 + num_beside
    buckets = [Bucket(number, {TOKENS: size}, sum(alone_s[size])) for number, size in enumerate(alone_s)]
    scheduler = Scheduler(buckets, sequences.max_sequences, len(set(devices)), sequences.per_token_s, source)
    rows = None if source is None else np.empty((source.num_rows(sequences.prompt), 0))
    num_first = sequences.prompt if source is None else source.num_start
    now_s, times_s = start_s, [list[float]() for _ in range(sequences.max_sequences)]

    def note(times: list[float], token: int) -> None:
        times.append(now_s)

    for times in times_s:
        sampling = Sampling(max_new_tokens=sequences.new)
        scheduler.add(Generation([0] * num_first, num_first, sampling, on_token=partial(note, times), source=rows))
    under_way, answers, told_s = list[_Work](), deque[tuple[float, Step]](), 0.0
    while True:
        while (step := scheduler.next_step()) is not None:
            under_way.append(_Work(step))
        computing = {devices[work.stage]: work for work in reversed(under_way)}  # on each device the step that began first
        busy = (num_beside + len(computing) - 1) / num_others if num_others else 0.0
        ends = [(now_s + work.left * work.seconds(busy_s, alone_s, busy), work) for work in computing.values()]
        if not ends and not answers:
            return TokenRates.of(times_s, now_s)
        before_s, now_s = now_s, min(end_s for end_s, _ in (*ends, *answers))
        for end_s, work in ends:
            if end_s > now_s:
                work.left *= (end_s - now_s) / (end_s - before_s)
            elif work.stage + 1 < len(devices):
                work.stage, work.left = work.stage + 1, 1.0
            else:
                under_way.remove(work)
                told_s = max(told_s, now_s) + host_s
                answers.append((told_s, work.step))
        while answers and answers[0][0] <= now_s:
            step = answers.popleft()[1]
            scheduler.finish(step, [0] * len(step.parts))


@dataclass(eq=False, slots=True)
class _Work:
    """A step under way, the stage that computes it or waits for its device, and the rest of that stage's work in seconds."""

    step: Step
    stage: int = 0
    left: float = 1.0

    def seconds(self, busy_s: StageSeconds, alone_s: StageSeconds, busy: float) -> float:
        """The seconds of the stage's whole work, where a share of the other devices is ``busy``."""
        both = busy_s[self.step.num_tokens][self.stage], alone_s[self.step.num_tokens][self.stage]
        return busy * both[0] + (1 - busy) * both[1]

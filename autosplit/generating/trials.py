"""Run a plan of a generator beside the usual ways, each with the same sequences, in interleaved rounds."""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.backends.apart import kept
from autosplit.deploying.comparing import with_risks
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.setup import Budget, Setup
from autosplit.errors import AutosplitError
from autosplit.generating.choosing import limit_faults
from autosplit.generating.firsttokens import first_step, token_error
from autosplit.generating.forecast import forecast, foretold, host_text
from autosplit.generating.generators import Generator
from autosplit.generating.opening import capacity_of, open_generator
from autosplit.generating.phases import PhaseProfile
from autosplit.generating.sources import STRIDE, Source
from autosplit.generating.steps import StepFamily
from autosplit.planning.baselines import (
    ALL_CORES,
    CALLER_THREADS,
    EVEN_SPLIT,
    IN_CALLER,
    ONE_DEVICE,
    REPLICAS,
    baseline_plan,
    baselines_of,
    unmet_demands,
    without_autosplit,
)
from autosplit.progress import Progress, progress_shown
from autosplit.reports.judging import decide, in_turn, still_running
from autosplit.reports.outcomes import PLAN, Outcome, TokenRates, mean_times_s
from autosplit.reports.results import LatencyStats, RunStats
from autosplit.reports.runreport import RunReport
from autosplit.running.engine import Engine
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, union
from autosplit.values.plan import Plan

GENERATE = "generate of transformers"
"""The baseline in which the model's own ``generate`` continues all sequences as one batch, with a dynamic cache."""

NO_PLAN = "it is no plan: call model.generate, on all cores"
"""Why ``GENERATE`` does not become the plan."""

USUAL = (ALL_CORES, ONE_DEVICE, REPLICAS, EVEN_SPLIT, IN_CALLER, CALLER_THREADS)
"""The baselines that can keep caches."""

NUM_CHECKED, MOST_CHECKED = 2, 4
"""Sequences that each way answers before the rounds, and most tokens of each; the first ones are compared."""

Prompts = Sequence[Sequence[int] | torch.Tensor]
Times = list[list[float]]
"""For each sequence the seconds at which it got each new token."""


@dataclass(eq=False)
class _Contender:
    """A way to continue sequences, and its rounds so far."""

    plan: Plan
    run: Callable[[Prompts], Times]
    stats: Callable[[], RunStats]
    tokens: list[list[int]]
    num_sequences: int
    predicted: TokenRates | None = None
    rounds: list[TokenRates] = field(default_factory=list)
    per_token_s: list[float] = field(default_factory=list)

    def begin(self, prompts: Prompts) -> None:
        """Run one round."""
        begun_s = time.perf_counter()
        times_s = self.run(prompts)
        self.rounds.append(TokenRates.of(times_s, time.perf_counter() - begun_s))
        self.per_token_s += mean_times_s(times_s)

    def outcome(self, fault: str) -> Outcome:
        """The measurements so far; its latency is the time from one token of a sequence to its next one."""
        latency = LatencyStats.of(self.per_token_s)
        return Outcome(
            self.plan,
            tuple(one.tokens_per_s for one in self.rounds),
            tuple(one.per_token_s for one in self.rounds),
            latency,
            latency,
            outputs_equal=not fault,
            max_abs_error=0.0,
            max_relative_error=0.0,
            stats=self.stats(),
            fault=fault,
            in_flight=self.num_sequences,
            token_rates=TokenRates.middle(self.rounds),
            predicted_token_rates=self.predicted,
        )


def compare_generators(
    family: StepFamily,
    plan: Plan,
    machine: Machine,
    constraints: Constraints | None,
    *,
    profile: PhaseProfile | None,
    baselines: bool,
    setup: Setup,
    budget: Budget,
) -> tuple[RunReport, Footprints]:
    """A plan of a generator beside one process with all cores, replicas, an even split, the caller's process, and ``generate``.

    In a round each way gets as many sequences at once as the caches hold, with usual prompts and answers.

    Args:
        family: the steps, and the sequences.
        plan: the plan.
        machine: the devices.
        constraints: demands that a baseline must meet to become the plan; None keeps the plan in any case.
        profile: predicts the plan and its baselines; None predicts nothing.
        baselines: whether the usual ways run too.
        setup: ``backends`` that a baseline must run on to become the plan, ``isolate`` and ``progress``.
        budget: rounds.
    Returns: the report, and the memory that the workers of each way held.
    Raises: AutosplitError: the plan cannot be run.
    """
    plans, left_out, same = {PLAN: plan}, dict[str, str](), list[str]()
    if baselines:
        found = baselines_of(family.graph, _in_steps(plan), machine, profile, isolate=setup.isolate)
        usual = {name: one for name, one in found.plans.items() if name.startswith(USUAL)}
        left_out = {name: reason for name, reason in found.left_out.items() if name.startswith(USUAL)}
        alike = {name: replace(one, shapes=plan.shapes, sequences=plan.sequences) for name, one in usual.items()}
        same = [name for name, one in alike.items() if one.hash == plan.hash]
        plans |= {name: one for name, one in alike.items() if name not in same}
    footprints, reference = Footprints(machine, setup.workspace, family.variants[1:]), without_autosplit(plans)
    account = footprints.account(family.variants[0], profile)
    contenders = dict[str, _Contender]()

    def unfit(other: Plan, latency_s: float) -> list[str]:
        if other.chosen == GENERATE:
            return [NO_PLAN]
        [rates, *_] = [TokenRates.middle(one.rounds) for one in contenders.values() if one.plan is other]
        faults = unmet_demands(other, latency_s, family.graph, machine, constraints or Constraints(), setup.backends)
        return faults + limit_faults(rates, family.sequences)

    with progress_shown(setup.progress) as progress, ExitStack() as opened:
        with kept():
            for number, (name, one) in enumerate(plans.items()):
                progress("run", 0.4 * number / len(plans), f"loading '{name}'")
                try:
                    generator = opened.enter_context(open_generator(family, one, machine))
                    one = generator.plan or one
                    told = forecast(one, family, machine, profile)
                    contenders[name] = _contender(generator, foretold(one, told), told, family)
                    footprints.note(family.variants[0], one, stats_of(generator).stages)
                    contenders[name].plan = account.counted(contenders[name].plan)
                except (AutosplitError, OSError) as failure:
                    if name == PLAN:
                        raise
                    left_out[name] = str(failure)
        if baselines and family.source is not None and not family.source.is_text:
            left_out[GENERATE] = "it detects silence and languages beside the model, and shows no token before the last one"
        elif baselines and family.module is not None and hasattr(family.module, "generate"):
            contenders[GENERATE] = _with_generate(family.module, family, machine)
        _run_rounds(contenders, family, budget, [PLAN, reference], progress)
        reference = reference if reference in contenders else PLAN
        faults = _faults(contenders, contenders[reference], family)
        outcomes = {name: one.outcome(faults[name]) for name, one in contenders.items()}
        outcomes |= dict.fromkeys(same, outcomes[PLAN])
        progress("run", 1.0, "done")
    left_out |= {name: fault for name, fault in faults.items() if fault}
    error = family.variants[0].module_error
    verdict = with_risks(decide(outcomes, plan.objective, constraints is None, unfit), outcomes)
    trace_error, told = None if error is None else error.relative, contenders[PLAN].predicted
    notes = () if told is None or profile is None else (host_text(plan, told, family.sequences, profile.host_s),)
    return RunReport(family.graph.name, 0, outcomes, verdict, left_out, notes, trace_error=trace_error), footprints


def _in_steps(plan: Plan) -> Plan:
    """The plan with a prediction in steps per second, as its baselines have one by their seconds of a step."""
    step_s = plan.prediction.bottleneck_s
    return replace(plan, prediction=replace(plan.prediction, throughput_per_s=1 / step_s)) if step_s > 0 else plan


def _run_rounds(
    contenders: Mapping[str, _Contender], family: StepFamily, budget: Budget, keep: Sequence[str], progress: Progress
) -> None:
    """Run interleaved rounds; a way that falls far behind stops."""
    running, for_latency = list(contenders), contenders[PLAN].plan.objective == "latency"
    for number in range(budget.num_rounds):
        progress("run", 0.4 + 0.6 * number / budget.num_rounds, f"round {number + 1} of {budget.num_rounds}")
        prompts = random_prompts(family, number + 1)
        for name in in_turn(running, number):
            contenders[name].begin(prompts)
        done = {name: contenders[name].rounds for name in running}
        rates = {
            name: [1 / one.per_token_s if for_latency else one.tokens_per_s for one in found] for name, found in done.items()
        }
        running = still_running(rates, keep)


def _contender(generator: Generator, plan: Plan, predicted: TokenRates | None, family: StepFamily) -> _Contender:
    """A generator that has answered some prompts, so that everything that it needs is loaded."""
    new = family.sequences.new
    prompts = random_prompts(family, 0)[:NUM_CHECKED]
    tokens = generator.generate(prompts, start=_start_of(generator.capacity.source), max_new_tokens=min(new, MOST_CHECKED))
    run, stats = partial(asked_at_once, generator, new), partial(stats_of, generator)
    return _Contender(plan, run, stats, tokens, family.sequences.max_sequences, predicted)


def asked_at_once(generator: Generator, new: int, prompts: Prompts) -> Times:
    """The times of the new tokens of prompts that come at once."""
    times_s: Times = [[] for _ in prompts]
    begun_s = time.perf_counter()

    def note(number: int, token: int) -> None:
        times_s[number].append(time.perf_counter() - begun_s)

    generator.generate(prompts, start=_start_of(generator.capacity.source), max_new_tokens=new, on_token=note)
    return times_s


def _start_of(source: Source | None) -> list[int] | None:
    """Tokens with which answers may begin where the model leaves them to the caller."""
    return None if source is None or source.start else [0] * source.num_start


def stats_of(generator: Generator) -> RunStats:
    """The workers of a generator."""
    found = [one.stats() for one in generator.pipelines if isinstance(one, Engine)]
    return replace(found[0], stages=tuple(stage for one in found for stage in one.stages))


def _with_generate(module: nn.Module, family: StepFamily, machine: Machine) -> _Contender:
    """``generate`` of transformers in this process, with a thread for each core of the machine."""
    sequences, cores = family.sequences, union(machine.layouts[0].devices)
    ops = tuple(op.name for op in family.graph.ops)
    plan = baseline_plan(family.graph, family.variants[0].source, GENERATE, "eager", [(ops, [cores])])

    def run(prompts: Prompts, new: int = sequences.new) -> Times:
        times_s, threads = list[float](), torch.get_num_threads()
        torch.set_num_threads(max(1, len(cores.cores)))
        try:
            begun_s = time.perf_counter()
            note = lambda: times_s.append(time.perf_counter() - begun_s)  # noqa: E731
            tokens[:] = _generated(module, prompts, new, note, family.source)
        finally:
            torch.set_num_threads(threads)
        return [times_s] * len(prompts)

    tokens = list[list[int]]()
    run(random_prompts(family, 0)[:NUM_CHECKED], min(sequences.new, MOST_CHECKED))
    first = list(tokens)
    nothing = RunStats(0, 0.0, LatencyStats.of([]), LatencyStats.of([]), (), 0)
    return _Contender(plan, run, lambda: nothing, first, sequences.max_sequences)


def _generated(module: Any, prompts: Prompts, new: int, note: Callable[[], None], source: Source | None) -> list[list[int]]:
    """The greedy tokens after prompts of one length; ``note`` is called at each new token of all of them."""

    class Streamer:
        """The streamer of ``generate``: called with the prompts, and then with each token."""

        is_prompt = True

        def put(self, value: torch.Tensor) -> None:
            if not self.is_prompt:
                note()
            self.is_prompt = False

        def end(self) -> None:
            """Nothing is left to be written."""

    ids = torch.tensor(prompts)
    # with min_new_tokens it would take another token where the likeliest one ends a text
    fixed: dict[str, Any] = {"eos_token_id": None, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    fixed["use_cache"] = True  # a spec turns caches off, for traces
    fixed |= {} if source is None else {"decoder_start_token_id": source.start[0]}
    with torch.inference_mode():
        found = module.generate(ids, attention_mask=torch.ones_like(ids), streamer=Streamer(), **fixed)
    tokens: list[list[int]] = found[:, -new:].tolist()
    return tokens


def random_prompts(family: StepFamily, seed: int) -> list[Sequence[int] | torch.Tensor]:
    """As many prompts as the caches hold, of random tokens; of a model that reads sounds, their features are random."""
    sequences, source, numbers = family.sequences, family.source, random.Random(seed)
    many = range(sequences.max_sequences)
    if source is not None and not source.is_text:
        draws = torch.Generator().manual_seed(seed)
        return [torch.randn(source.num_bins, STRIDE * source.max_rows, generator=draws) for _ in many]
    vocabulary = range(1, capacity_of(family).vocabulary)
    return [numbers.choices(vocabulary, k=sequences.prompt) for _ in many]


def _faults(contenders: Mapping[str, _Contender], reference: _Contender, family: StepFamily) -> dict[str, str]:
    """Why the tokens of each way are wrong, '' where they are right: first tokens are judged by their scores.

    Later tokens follow from the first ones, and may be others where two were about as likely.
    """
    start, found = _start_of(family.source), dict.fromkeys(contenders, "")
    for number, prompt in enumerate(random_prompts(family, 0)[: len(reference.tokens)]):
        others = {name: one for name, one in contenders.items() if one.tokens[number][0] != reference.tokens[number][0]}
        step = first_step(family, prompt, start) if others else None
        for name, one in others.items():
            assert step is not None
            error, limit = token_error(step, one.tokens[number][0], one.plan.precisions)
            if not error <= limit:
                found[name] = (
                    f"the first token after prompt {number + 1} of {len(one.tokens)} is another one than on torch eager, and its "
                    f"score is {error:.2g} of the largest one below that; {limit:.2g} is allowed"
                )
    return found

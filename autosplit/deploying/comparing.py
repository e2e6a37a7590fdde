"""Several plans in interleaved rounds, so that drift of the machine cancels, and which of them to use."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from autosplit.deploying.arena import Arena
from autosplit.deploying.workspace import Workspace
from autosplit.errors import AutosplitError
from autosplit.reports.runreport import PLAN, Outcome, RunReport, Unfit, judge, still_running
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan

MOST_BESIDE = 4
"""Baselines that run beside the plan and the way to keep in all rounds; where there are more, short runs say which."""

SCREEN_S = 0.2

ROUND_S = 2.0
"""Each way runs for about so long in a round where no number of requests is asked for."""

NUM_BESIDE = 3
"""Rounds for what the objective does not ask for: requests one at a time where it is throughput, full pipelines where latency."""

Progress = Callable[[float, str], None]
Observe = Callable[[HostManager], None]
Run = Callable[[Sequence[str], int], None]


class _Contest:
    """Which of some baselines stay in the arena beside the plan: the MOST_BESIDE best ones in short runs."""

    def __init__(self, arena: Arena, num_ways: int, objective: str, keep: str) -> None:
        self._arena = arena
        self._num_ways = num_ways
        self._objective = objective
        self._keep = keep
        self._times_plan: dict[str, float] = {}

    def admit(self, name: str) -> dict[str, str]:
        """Run a way that was loaded beside the plan; unload the worst if they are too many, and say why."""
        plan, entry = self._arena.loaded[PLAN], self._arena.loaded[name]
        if self._num_ways <= MOST_BESIDE:
            return {}
        if self._objective == "latency":
            self._arena.run_alone([PLAN, name], 0, SCREEN_S)
            self._times_plan[name] = entry.rounds("latency")[-1] / plan.rounds("latency")[-1]
        else:
            if not plan.slow:  # else the requests alone have taken long enough to tell
                num_items = round(min(1e6, SCREEN_S * plan.plan.microbatch / plan.latency.p50_s))
                self._arena.run_round([PLAN, name], 0, num_items)
            self._times_plan[name] = entry.pace_per_s / plan.pace_per_s
        rivals = [other for other in self._times_plan if other != self._keep]
        if len(rivals) <= MOST_BESIDE:
            return {}
        worst = min(rivals, key=self._times_plan.__getitem__)
        self._arena.unload(worst)
        times = self._times_plan.pop(worst)
        return {worst: f"in short runs {MOST_BESIDE} others were better; it was {times:.2f} times as good as the plan there"}


def run_report(
    traced: Traced,
    plan: Plan,
    simple: Mapping[str, Plan],
    machine: Machine,
    *,
    whole: Traced | None,
    forced: bool,
    unfit: Unfit,
    keep: str,
    left_out: Mapping[str, str],
    num_requests: int | None,
    num_rounds: int,
    workspace: Workspace,
    tell: Progress,
    observe: Observe | None,
) -> RunReport:
    """Run the plan and the baselines in the same rounds, and say which one to use.

    Args:
        traced: the model, traced for the plan's microbatch.
        plan: the plan; what it is for, throughput or latency, decides between the ways.
        simple: the baselines by name; the report names those that cannot be loaded or give wrong numbers, with the reason.
        machine: the devices.
        whole: the model traced for whole requests, where the plan cuts them and some baselines do not.
        forced: whether the plan is to be used in any case.
        unfit: why a baseline must not become the plan, or ''.
        keep: the baseline that runs in all rounds however slow it is, or in one where requests of the plan take long.
        left_out: ways that were ruled out before, with the reason, for the report.
        num_requests: requests of the plan, over all full rounds; slower ways get as long. By default about ``ROUND_S`` a round.
        num_rounds: rounds, full ones for throughput, else of requests one at a time; each runs every plan once that is not far
            behind, and the fastest ones may run some more. Of the other kind there are ``NUM_BESIDE``.
        workspace: as for ``Arena``.
        tell: called with the share done and what is being done.
        observe: called once with the host on which all of them run, to look at it meanwhile.
    Raises: PlanError, BackendError, WorkerError: the plan itself cannot be run; StageError: a request failed.
    """
    same_as: dict[str, str] = {}
    reasons = dict(left_out)
    with Arena(machine, workspace) as arena:
        if observe is not None:
            observe(arena.host)
        contest = _Contest(arena, len(simple), plan.objective, keep)
        ways: dict[str, Plan] = {}
        for name, candidate in {PLAN: plan, **simple}.items():
            twin = next((other for other, way in ways.items() if way.hash == candidate.hash), None)
            if twin is None:
                ways[name] = candidate
            else:
                same_as[name] = twin
        for number, (name, candidate) in enumerate(ways.items()):
            tell(0.4 * number / len(ways), f"loading '{name}'")
            try:
                arena.load(name, candidate, traced if candidate.microbatch == plan.microbatch else whole or traced)
            except (AutosplitError, OSError) as failure:  # descriptors may be short, or room for its files
                if name == PLAN:
                    raise
                reasons[name] = str(failure)
                continue
            if name != PLAN:
                reasons |= contest.admit(name)
        for entry in arena.loaded.values():
            entry.restart()
        kept = {PLAN} if arena.loaded[PLAN].slow else {PLAN, keep}
        barred = {name for name, e in arena.loaded.items() if name != PLAN and unfit(e.plan, e.latency.p50_s)}
        rounds = _Rounds(arena, plan.objective, kept, barred, not forced, lambda share, text: tell(0.4 + 0.6 * share, text))
        outcomes = rounds.run(num_rounds, num_requests and plan.source.batch * num_requests)
    outcomes |= {name: outcomes[twin] for name, twin in same_as.items() if twin in outcomes}
    reasons |= {name: reasons[twin] for name, twin in same_as.items() if twin in reasons}
    reasons |= {name: outcome.fault for name, outcome in outcomes.items() if outcome.fault}
    chosen, sentence = judge(outcomes, plan.objective, forced, unfit)
    if restarts := sum(outcome.stats.restarts for outcome in outcomes.values()):
        sentence += f" Workers that died and were started anew, their requests run again: {restarts}."
    tell(1.0, "done")
    return RunReport(traced.graph.name, plan.source.batch, outcomes, chosen, sentence, reasons)


@dataclass(frozen=True)
class _Rounds:
    """The rounds of a report: what the objective asks for decides who runs in all of them, the other figure is taken of all.

    Attributes:
        keep: ways that run in all rounds however slow they are.
        barred: ways that must not be chosen.
        decide: whether the fastest ones run on until the turns of those that stopped early are spent.
    """

    arena: Arena
    objective: str
    keep: Collection[str]
    barred: Collection[str]
    decide: bool
    tell: Progress

    def run(self, num_rounds: int, num_items: int | None) -> dict[str, Outcome]:
        """Full rounds first, of so many items of the plan in all; then rounds of requests alone.

        These come last, so that what workers are said to have done is from full rounds only.
        """
        arena, few = self.arena, min(NUM_BESIDE, num_rounds)
        if self.objective == "latency":
            take_full, num_full, full_s = self._beside, few, ROUND_S / 2
            take_alone, num_alone, alone_s = self.halve, num_rounds, ROUND_S / 2
        else:
            take_full, num_full, full_s = self.halve, num_rounds, ROUND_S
            take_alone, num_alone, alone_s = self._beside, few, SCREEN_S
        items = round(full_s * arena.loaded[PLAN].pace_per_s) if num_items is None else num_items // num_full
        take_full(lambda running, number: arena.run_round(running, number, items), num_full)
        outcomes = {name: entry.outcome() for name, entry in arena.loaded.items()}
        take_alone(lambda running, number: arena.run_alone(running, number, alone_s), num_alone)
        told = {name: entry.outcome() for name, entry in arena.loaded.items()}
        return {name: replace(one, latency=told[name].latency, alone_s=told[name].alone_s) for name, one in outcomes.items()}

    def _beside(self, run: Run, num_rounds: int) -> None:
        """All ways in so many rounds of the kind that the objective does not ask for."""
        share, kind = (0.0, "full") if self.objective == "latency" else (1.0, "one request at a time,")
        for number in range(num_rounds):
            self.tell(share, f"{kind} round {number + 1} of {num_rounds}")
            run(list(self.arena.loaded), number)

    def halve(self, run: Run, num_rounds: int) -> None:
        """All ways in so many rounds; the turns of those that stop early go to the fastest ones, to ``decide`` between them.

        So successive halving shares out its budget (Karnin, Koren and Somekh, 2013). A way with wrong numbers runs once. One that
        is ``barred`` from being chosen runs on where it is fast, but none stops for being slower than it.
        """
        loaded = self.arena.loaded
        right = {name for name, entry in loaded.items() if name in self.keep or not entry.fault}
        running, turns = list(loaded), num_rounds * len(loaded)
        for number in range(2 * num_rounds if self.decide else num_rounds):
            if number >= num_rounds and (len(running) == 1 or turns < len(running)):
                return
            self.tell(min(number / num_rounds, 1.0), f"round {number + 1} of {max(num_rounds, number + 1)}")
            run(running, number)
            turns -= len(running)
            beside = self.keep if number + 1 < num_rounds else ()
            here = {name: loaded[name].rounds(self.objective) for name in running if name in right}
            fit = still_running({name: per_s for name, per_s in here.items() if name not in self.barred}, beside)
            fast = still_running(here, beside) if beside else []
            running = [name for name in here if name in fit or (name in self.barred and name in fast)]

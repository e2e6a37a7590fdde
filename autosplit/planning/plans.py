"""Plans for a graph on a machine: the planner is asked about choices of core sets and backends, its answers become Plans.

If devices have cores in common, each layout of the machine is a question of its own; the bound holds for all layouts.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from math import inf
from operator import itemgetter

from autosplit.costs.cost import CLOSED
from autosplit.costs.judge import Judged, Solution, Status
from autosplit.costs.problem import Problem
from autosplit.errors import InfeasibleError
from autosplit.planners import clock
from autosplit.planners.pareto import pareto
from autosplit.planners.portfolio import quick_bound, solve
from autosplit.planning.backends import MAX_CHOICES, MAX_PROVING, Backends, backend_choices, backend_subsets, backends_of
from autosplit.planning.predicting import bounded, predicted
from autosplit.planning.question import Question
from autosplit.values.constraints import Constraints, Demands
from autosplit.values.machine import HOST
from autosplit.values.plan import UNKNOWN, Plan, Stage

LEAST_S = 0.1
"""Least seconds for one call of the solvers."""

NUM_STREAMED, CLOSE = 7, 0.02
"""Most questions about plans with streams, and the share of T at which the search for it ends."""

SMALL_SHARE = 0.2
"""Share of the time limit that is the work of each question for a small problem."""

MAX_LISTED = 2000
"""Most plans that ``every_plan`` lists."""

SolveProblem = Callable[[Problem, Demands, float, float], Sequence[Solution]]
"""Solve within some seconds, given the best bottleneck so far; the best solution comes first."""

Choice = frozenset[tuple[str, str]]
"""One backend for each device, as pairs of names."""


def plan_model(question: Question) -> Plan:
    """The best plan that is found, with a bound that holds for every mixture of backends. Caps count weights alone.

    A mixture gives each stage a backend; stages of several backends on one device follow each other. The plan is optimal if
    it meets the bound. If the number of stages is limited, each device has one backend. Where a model is larger than an
    accelerator, weights may be streamed to it (``_streamed``).

    Raises: InfeasibleError: no choice of backends meets the constraints. ProfileError: the profile lacks a measurement.
    """

    def ask(problem: Problem, demands: Demands, left_s: float, best_s: float) -> Sequence[Solution]:
        if best_s < inf and demands.objective == "throughput" and quick_bound(problem, demands)[0] >= best_s:
            return []
        return [solve(problem, demands, time_limit_s=left_s, seed=question.seed, log=question.log)]

    key = plan_key(question.constraints)
    if not _may_stream(question):
        return min(_plans(question, ask), key=key)
    found = list[Plan]()
    with suppress(InfeasibleError):  # weights may have to be streamed
        found += _plans(question, ask)
    bound_s, streamed = _streamed(question, ask, min((plan.prediction.bottleneck_s for plan in found), default=inf))
    return bounded(min([*found, *streamed], key=key), bound_s)


def _may_stream(question: Question) -> bool:
    """Whether the model is larger than an accelerator to which weights can be streamed.

    States stay where they are, and so do weights that several sizes share.
    """
    graph, machine = question.graph, question.machine.with_measured(question.profile.links)
    full = [
        device.name for device in machine.devices if device.memory_bytes is not None and device.memory_bytes < graph.weight_bytes
    ]
    keeps = question.profile.shapes is not None or any(op.operator.startswith("autosplit.") for op in graph.ops)
    return not keeps and any(machine.link(HOST, name).pinned_s_per_byte for name in full)


def _streamed(question: Question, ask: SolveProblem, best_s: float) -> tuple[float, list[Plan]]:
    """A bound on all plans, and plans with streamed stages.

    Solvers know caps, not streams. A plan of T seconds a request has at most the bytes beyond a cap that the link brings in T
    seconds, so a question has caps that are larger by these; its answers get the time of their streams afterwards. Bisection
    finds T between the bound of unlimited streams and ``best_s``, the best plan without streams or infinity. Every plan takes at
    least T seconds, or the bound of the question with T.

    Raises: InfeasibleError: there is no plan at all.
    """
    found, bound_s, streaming_s = list[Plan](), 0.0, inf
    most_replicas = min(question.constraints.max_replicas, len(question.machine.devices))
    low_s, high_s, every_fits = least_s(replace(question, streaming_s=inf)), best_s, True
    for _ in range(NUM_STREAMED):
        limit_s = question.time_limit_s / (1 if streaming_s == inf else NUM_STREAMED)
        part = replace(question, streaming_s=streaming_s * most_replicas, time_limit_s=limit_s)
        plan = None
        try:
            found += (plans := _plans(part, ask))
            plan = min(plans, key=lambda one: one.prediction.bottleneck_s)
        except InfeasibleError:
            if best_s == inf and not found:
                raise
        taken_s = inf if plan is None else plan.prediction.bottleneck_s
        if streaming_s == inf:
            every_fits, low_s = plan is not None, max(low_s, 0.0 if plan is None else plan.prediction.bound_s)
            bound_s = low_s
        elif plan is not None:
            bound_s = max(bound_s, min(streaming_s, plan.prediction.bound_s))
        if taken_s <= streaming_s * (1 + CLOSE) or (plan is None and not every_fits):
            high_s = min(high_s, streaming_s)
        else:
            low_s = max(low_s, streaming_s)
        high_s = min(high_s, taken_s)
        if not 0 < low_s * (1 + CLOSE) < high_s < inf:
            break
        streaming_s = (low_s * high_s) ** 0.5
    return bound_s, found


def plan_front(question: Question) -> list[Plan]:
    """Plans of the fronts of throughput, latency and weights on the fullest device, for all choices of backends.

    Errors are those of ``plan_model``.
    """

    def ask(problem: Problem, demands: Demands, left_s: float, best_s: float) -> Sequence[Solution]:
        return pareto(problem, demands, time_limit_s=left_s, seed=question.seed, log=question.log)

    return _plans(question, ask, every=True)


def every_plan(question: Question) -> Iterator[Plan]:
    """Every plan whose stages are runs of ops in graph order on devices of their own, best first; nothing if there are too many.

    At most ``MAX_LISTED`` plans are listed.
    """
    listed = list[tuple[float, Backends, Judged]]()
    for layout in question.machine.layouts:
        own = backends_of(replace(question, machine=layout))
        for blocks in islice(own.every_chain(), MAX_LISTED + 1):
            judged = own.judge(blocks)
            listed.append((judged.objective_s, own, judged))
        if len(listed) > MAX_LISTED:
            return
    for value_s, own, judged in sorted(listed, key=itemgetter(0)):
        if value_s < inf:
            with suppress(InfeasibleError):  # a demand is broken
                yield _plan(own, judged, "every chain of stages")


def least_s(question: Question) -> float:
    """A bound in seconds on all plans, without a search; errors as for ``plan_model``."""
    asked = (backends_of(replace(question, machine=layout)) for layout in question.machine.layouts)
    return min(quick_bound(*own.relaxed())[0] for own in asked)


def _plans(question: Question, ask: SolveProblem, every: bool = False) -> list[Plan]:
    """The plans on all layouts of a machine, with a bound that holds for all of them.

    Args:
        every: ask for every choice of backends, even if the best plan meets the bound.
    Raises: InfeasibleError: no layout has a plan that meets the constraints.
    """
    found, refusals = list[Plan](), list[InfeasibleError]()
    bound_s = single_s = best_s = inf
    share = 1 / len(question.machine.layouts) / (len(backend_subsets(question)) if question.shares_time else 1)
    for layout in question.machine.layouts:
        whole = _ask_subsets(replace(question, machine=layout), ask, share, best_s, every)
        bounds_s = whole.bounds_s()
        bound_s, single_s = min(bound_s, bounds_s[0]), min(single_s, bounds_s[1])
        found += whole.found
        if not whole.found and (whole.refusal is not None or best_s == inf):
            refusals.append(whole.refusal or InfeasibleError("no plan was found: no backend is left to run the model on"))
        best_s = min((plan.prediction.bottleneck_s for plan in found), default=inf)
    if not found:
        raise next((failure for failure in refusals if not failure.conflict), refusals[0])
    return [_proved(bounded(plan, bound_s), single_s) for plan in found]


def _ask_subsets(question: Question, ask: SolveProblem, share: float, known_s: float, every: bool) -> "_Answers":
    """The answers for all backends on one layout, with the plans of all subsets of them.

    Each subset is a question of its own, the smallest first, with choices and time of its own: one more backend never worsens an
    answer where equal time gives equal plans.

    Args:
        share: share of the time limit that is for each subset on this layout, if the problem is large.
        known_s: bottleneck of a plan on another layout. Subsets that can beat neither it nor another subset are not asked for.
    """
    single_s, found = dict[Choice, float](), list[Plan]()

    def answers(part: Question) -> _Answers:
        own, kept = backends_of(part), set(part.backends)
        choices = backend_choices(part, MAX_PROVING if own.alone else MAX_CHOICES)
        mixed = [choice for choice in choices if len(kept) == 1 or set(choice.values()) == kept]
        return _Answers(own, mixed, ask, share * part.time_limit_s, single_s)

    whole, compares = answers(question), not every and question.constraints.objective == "throughput"
    whole.relax()
    for part in (*map(answers, backend_subsets(question)[:-1]), whole):
        if whole.is_refuted or (whole.meets(found) and not every):
            break
        best_s = min((known_s, *(plan.prediction.bottleneck_s for plan in (*found, *whole.found)))) if compares else inf
        if best_s < inf and quick_bound(*part.backends.relaxed())[0] >= best_s:
            single_s.update({frozenset(choice.items()): best_s for choice in part.choices})
            continue
        if part is not whole:
            part.relax()
        part.choose(every)
        found += part.found if part is not whole else []
    whole.found += found
    return whole


@dataclass
class _Answers:
    """The plans for one set of backends on one layout so far.

    Attributes:
        limit_s: seconds for this set of a larger problem.
        single_s: a bound in seconds for each choice of one backend on each device that was asked for, in any set.
        relaxed_s: a bound on all plans of this set.
    """

    backends: Backends
    choices: Sequence[Mapping[str, str]]
    ask: SolveProblem
    limit_s: float
    single_s: dict[Choice, float]
    found: list[Plan] = field(default_factory=list)
    relaxed_s: float = 0.0
    refusal: InfeasibleError | None = None

    @property
    def best(self) -> Plan | None:
        """The best plan so far."""
        return min(self.found, key=plan_key(self.backends.question.constraints), default=None)

    @property
    def is_refuted(self) -> bool:
        """Whether it is proved that no plan of the set meets the constraints."""
        return self.relaxed_s == inf

    @property
    def several(self) -> bool:
        """Whether a device has several backends."""
        return any(len(group) > 1 for group in self.backends.groups)

    def relax(self) -> None:
        """Ask with each op at its cheapest backend, in half of the time. No other bound holds for all plans of the set."""
        if self.several:
            with self._deadline() as deadline:
                self.relaxed_s = self._add(*self.backends.relaxed(), deadline - clock.now())

    def choose(self, every: bool) -> None:
        """Ask with one backend on each device, for the choices of the best plans first, until a plan meets the bound.

        Choices that are not listed are tried only if a best plan suggests them.
        """
        waiting, tried = list(self.choices), list[Mapping[str, str]]()
        with self._deadline() as deadline:
            while waiting and not self.is_refuted and (every or not self.meets()) and not (self.found and clock.now() > deadline):
                suggested = self._suggested() if len(tried) < max(MAX_CHOICES, len(self.choices)) else None
                if suggested is not None and suggested not in tried:
                    waiting = [suggested, *(other for other in waiting if other != suggested)]
                choice = waiting.pop(0)
                tried.append(choice)
                left_s = (deadline - clock.now()) / (1 + len(waiting))
                self.single_s[frozenset(choice.items())] = self._add(*self.backends.with_one_each(choice), left_s)
        self.single_s.update({frozenset(choice.items()): self.relaxed_s for choice in waiting})

    def bounds_s(self) -> tuple[float, float]:
        """A bound on all plans, and a bound on plans with one backend on each device, in seconds; 0 where unknown."""
        complete = len(self.single_s) == self.backends.num_choices
        single_s = min(self.single_s.values(), default=inf)
        bound_s = max(self.relaxed_s, single_s) if complete and (self.backends.alone or not self.several) else self.relaxed_s
        if self.best is not None:  # a bound above a plan says nothing
            bound_s = bounded(self.best, bound_s).prediction.bound_s
        return bound_s, single_s if complete else 0.0

    def meets(self, others: Sequence[Plan] = ()) -> bool:
        """Whether the best plan, of this set or of others, meets the bound."""
        return any(bounded(plan, self.relaxed_s).prediction.gap <= CLOSED for plan in (*self.found, *others))

    def _deadline(self) -> AbstractContextManager[float]:
        num_places = self.backends.problem.num_ops * len(self.backends.groups)
        large_s, small_s = self.limit_s / (2 if self.several else 1), SMALL_SHARE * self.backends.question.time_limit_s
        return clock.time_limit(num_places, large_s if num_places > clock.SMALL_PLACES else small_s)

    def _suggested(self) -> Mapping[str, str] | None:
        """The backend that runs most ops of the best plan on each device, or anywhere if the plan leaves the device out."""
        if self.best is None:
            return None
        main = Counter(stage.way for stage in self.best.stages for _ in stage.ops)
        there = Counter((name, stage.way) for stage in self.best.stages for name in stage.devices for _ in stage.ops)
        listed = {device: {choice[device] for choice in self.choices} for device in self.backends.devices}
        return {name: max(known, key=lambda b: (there[name, b], main[b], b)) for name, known in listed.items()}

    def _add(self, problem: Problem, demands: Demands, left_s: float) -> float:
        """Ask the planner and keep its plans. Returns: a bound in seconds on all plans but the best one so far."""
        best_s = self.best.prediction.bottleneck_s if self.best else inf
        try:
            solutions = self.ask(problem, demands, max(LEAST_S, left_s), best_s)
        except InfeasibleError as failure:
            self.refusal = failure
            return inf if failure.conflict else quick_bound(problem, demands)[0]
        rows = [(solution, blocks) for solution in solutions for blocks in self.backends.rows(solution.blocks)]
        if solutions and not rows and demands.max_replicas > 1:  # replicas are on devices without a backend in common
            return min(solutions[0].bound_s, self._add(problem, replace(demands, max_replicas=1), left_s))
        for solution, blocks in rows:
            try:
                self.found.append(_plan(self.backends, self.backends.judge(blocks), solution.method, solution.status))
            except InfeasibleError as failure:
                self.refusal = failure
        return solutions[0].bound_s if solutions else best_s


def _plan(there: Backends, judged: Judged, method: str, status: Status = "feasible") -> Plan:
    """The plan of blocks on backends. Raises: InfeasibleError: it breaks a demand that the solver did not see."""
    question, stages = there.question, []
    for number, block in enumerate(judged.blocks):
        settings = [there.settings[device] for device in block.devices]
        ops, devices = (tuple(there.problem.ops[op] for op in block.ops), tuple(setting.device for setting in settings))
        threads = min(setting.threads for setting in settings)
        kept = None if block.resident_bytes == inf else int(block.resident_bytes)
        stage = Stage(f"stage{number}", ops, devices, settings[0].runtime, threads, resident_bytes=kept)
        stages.append(replace(stage, precision=settings[0].precision))
    if judged.faults:
        cut = f" in microbatches of {question.microbatch}" if judged.num_parts > 1 else ""
        raise InfeasibleError(
            f"no plan was found{cut} that meets all constraints: {judged.faults[0]}. Relax it, or change the backends."
        )
    plan = Plan(
        source=question.source,
        graph_hash=question.graph.hash,
        profile_hash=question.profile.hash,
        stages=tuple(stages),
        prediction=UNKNOWN,
        objective=question.constraints.objective,
        method=method,
        status="shared" if status == "shared" else "feasible",
        microbatch=question.microbatch or question.source.batch,
        queue_depth=question.queue_depth,
        precision=question.profile.precision,
    )
    return predicted(plan, judged, there.settings, 0.0)


def plan_key(constraints: Constraints) -> Callable[[Plan], float]:
    """The function that judges a plan: its predicted seconds for an item, or its predicted latency."""
    if constraints.objective == "latency":
        return lambda plan: plan.prediction.latency_s
    return lambda plan: plan.prediction.bottleneck_s / plan.microbatch


def _proved(plan: Plan, single_s: float) -> Plan:
    """The plan. Its method says if the proof covers only plans with one backend on each device."""
    if plan.status == "optimal" or bounded(plan, single_s).status != "optimal":
        return plan
    return replace(plan, method=f"{plan.method}, no better plan with one backend on each device")

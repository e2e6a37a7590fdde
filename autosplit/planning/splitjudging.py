"""Judge a split that another tool made: its throughput, the best split under the same rules, the loss, and the reasons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import inf
from typing import Any

from autosplit.costs.cost import evaluate
from autosplit.costs.judge import judge
from autosplit.errors import InfeasibleError
from autosplit.planners.portfolio import solve
from autosplit.planning.baselines import baseline_plan
from autosplit.planning.caps import answer_within_caps, plan_within_caps, with_fitting_slots
from autosplit.planning.givensplits import GivenSplit
from autosplit.planning.moduleunits import joined
from autosplit.planning.peers import FASTEST_ONLY, predicted_peers
from autosplit.planning.predicting import blocks_of, predict, predicted, problem_alone, problem_on, settings_of, threads_on
from autosplit.planning.question import Question
from autosplit.tables import bytes_text, number_text, seconds_text
from autosplit.values.constraints import Constraints, Demands
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, cap_faults
from autosplit.values.profile import Profile
from autosplit.values.samples import Setting

GIVEN = "the split"
SAME_RULES = "best under the same rules"
ANY_RULES = "best of any kind"

LEVEL = 0.01
"""Share of the throughput below which a difference is not mentioned."""

SHOWN = 3
"""Most units that a sentence names."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A split beside others, all predicted with one profile.

    Attributes:
        plans: name to plan; ``the split`` comes first.
        lost: share of the throughput that the split loses to the best one under its own rules.
        why: sentences on the bottleneck of the split, and on the differences of the best one.
        left_out: the rules of other tools that do not apply, each with the reason.
    """

    split: GivenSplit
    plans: Mapping[str, Plan]
    lost: float
    why: tuple[str, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)

    @property
    def bottleneck(self) -> str:
        """The device with the largest load."""
        return self.plans[GIVEN].bottleneck

    @property
    def sentence(self) -> str:
        """The verdict in one sentence."""
        given, best = (self.plans[name].prediction for name in (GIVEN, SAME_RULES))
        told = f"{number_text(given.throughput_per_s)} items/s predicted, '{self.bottleneck}' is the bottleneck"
        rate = f"{self.split.kind}: {told}"
        if self.lost < LEVEL:
            return f"{rate}; no split under the same rules is more than {LEVEL:.0%} better."
        return (
            f"{rate}; the best split under the same rules reaches {number_text(best.throughput_per_s)}: {self.lost:.1%} are lost."
        )

    def rows(self) -> list[dict[str, Any]]:
        """One row a plan: its predicted figures, and its throughput as a multiple of the split's."""
        given_per_s = self.plans[GIVEN].prediction.throughput_per_s
        return [
            {
                "plan": name,
                "devices": len(plan.devices),
                "stages": len(plan.stages),
                "items_per_s": plan.prediction.throughput_per_s,
                "of_split": plan.prediction.throughput_per_s / given_per_s,
                "latency_s": plan.prediction.latency_s,
                "bottleneck": plan.bottleneck,
            }
            for name, plan in self.plans.items()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "split": self.split.kind,
            "bottleneck": self.bottleneck,
            "predicted_per_s": self.plans[GIVEN].prediction.throughput_per_s,
            "best_per_s": self.plans[SAME_RULES].prediction.throughput_per_s,
            "lost": self.lost,
            "why": list(self.why),
            "plans": self.rows(),
            "left_out": dict(self.left_out),
            "notes": list(self.split.notes),
        }


def judge_split(split: GivenSplit, question: Question) -> Judgement:
    """Predict a split, its rivals, and the best split under the same rules, all within the memory caps.

    Args:
        split: the split of the model of the question.
        question: it has one backend, and no demands. Its time limit counts twice; caps that do not hold at once take longer.
    Raises: ProfileError: the profile lacks a measurement. PlanError: the split needs more memory than a device has.
        InfeasibleError: the model does not fit the devices' memory.
    """
    graph, machine, profile, account = question.graph, question.machine, question.profile, question.memory
    placed = [(ops, [machine[device]]) for ops, device in zip(split.stages, split.devices, strict=True)]
    capped = any(device.memory_bytes is not None for device in machine.devices)
    plan = baseline_plan(graph, question.source, GIVEN, question.backends[0], placed)
    plan = with_fitting_slots(account.measured(plan) if capped else plan, machine, account).verify(graph, machine)
    given = predict(plan, graph, machine, profile)
    best = best_under_rules(split, given, question)
    peers = predicted_peers(graph, given, machine, profile)
    others = {name: with_fitting_slots(peer, machine, account) for name, peer in peers.plans.items()}
    over = {name: "; ".join(cap_faults(peer.stages, machine.devices, graph).values()) for name, peer in others.items()}
    left_out = {**peers.left_out, **{name: fault for name, fault in over.items() if fault}}
    plans = {GIVEN: given, SAME_RULES: best, **{name: peer for name, peer in others.items() if not over[name]}}
    plans[ANY_RULES] = plan_within_caps(question)
    lost = max(0.0, 1 - given.prediction.throughput_per_s / best.prediction.throughput_per_s)
    return Judgement(split, plans, lost, tuple(_why(split, plans, graph, machine, profile, lost)), left_out)


def best_under_rules(split: GivenSplit, given: Plan, question: Question) -> Plan:
    """The best plan within the caps with the units and the order of a split, on any of the devices; else the split itself."""
    graph, [backend], names = question.graph, question.backends, [device.name for device in question.machine.devices]
    settings = [Setting(name, backend, threads_on(question.machine, name)) for name in names]
    groups = tuple(tuple(graph.index[op] for op in unit.ops) for unit in split.units)
    order = tuple((before[-1], after[0]) for before, after in pairwise(groups)) if split.in_order else ()

    def ask(machine: Machine) -> Plan:
        problem = problem_on(graph, machine, question.profile, Constraints(), settings)
        ruled = replace(problem, groups=tuple(group for group in groups if len(group) > 1), order=(*problem.order, *order))
        demands = Demands(contiguous=split.in_order)
        solution = solve(ruled.verify(), demands, time_limit_s=question.time_limit_s)
        device_of = {graph.ops[op].name: block.devices[0] for block in solution.blocks for op in block.ops}
        placed = [(ops, [machine[settings[device_of[ops[0]]].device]]) for ops in graph.runs(device_of, device_of)]
        plan = baseline_plan(graph, question.source, SAME_RULES, backend, placed)
        plan = replace(plan, method=solution.method, status="feasible")
        return predicted(plan, judge(problem, demands, blocks_of(plan, graph, settings)), settings, solution.bound_s)

    try:
        found = question.memory.counted(answer_within_caps(question, [ask]))
    except InfeasibleError:
        if given.prediction.bottleneck_s < inf:
            return given
        raise
    return given if given.prediction.bottleneck_s <= found.prediction.bottleneck_s else found


def _why(
    split: GivenSplit, plans: Mapping[str, Plan], graph: Graph, machine: Machine, profile: Profile, lost: float
) -> list[str]:
    """Sentences on the bottleneck of the split, on the differences of the best one, and on the cost of the rules."""
    given, best, free = plans[GIVEN], plans[SAME_RULES], plans[ANY_RULES]
    loads = evaluate(*problem_alone(given, graph, machine, profile))
    worst = int(loads.device_s.argmax())
    name, load_s = settings_of(given)[worst].device, float(loads.device_s[worst])
    idle = 1 - float(loads.device_s.sum()) / (len(machine.devices) * load_s)
    compute, moving = seconds_text(float(loads.compute_s[worst])), seconds_text(float(loads.transfer_s[worst]))
    found = [
        f"'{name}' is busy for {seconds_text(load_s)} of each request ({compute} in ops, {moving} in transfers); meanwhile the "
        f"devices are idle for {idle:.0%} of their time."
    ]
    held = {
        stage.devices[0]: tuple(op for s in given.stages if s.devices == stage.devices for op in s.ops) for stage in given.stages
    }
    total_bytes, compute_s = graph.weight_bytes or 1, float(loads.compute_s.sum())
    share, time_share = graph.stage_bytes(held[name]) / total_bytes, float(loads.compute_s[worst]) / compute_s
    if len(held) > 1:
        found.append(f"It has {share:.0%} of the weights and {time_share:.0%} of the time in ops.")
    if lost >= LEVEL:
        found += _moves(split, given, best)
        mine, theirs = (crossing_bytes(plan, graph) for plan in (given, best))
        if mine != theirs:
            found.append(
                f"The split moves {bytes_text(mine)} over its cuts for each request, and the best one {bytes_text(theirs)}."
            )
    cost = 1 - best.prediction.throughput_per_s / free.prediction.throughput_per_s
    if cost >= LEVEL:
        way = "replicas or stages with replicas" if any(len(stage.devices) > 1 for stage in free.stages) else "other cuts"
        found.append(
            f"The rules themselves cost {cost:.1%}: {way} reach {number_text(free.prediction.throughput_per_s)} items/s."
        )
    alone = plans.get(FASTEST_ONLY, given)
    if alone.prediction.throughput_per_s > given.prediction.throughput_per_s * (1 + LEVEL):
        found.append("One device alone, without a split, is faster.")
    return found


def _moves(split: GivenSplit, given: Plan, best: Plan) -> list[str]:
    """Sentences on the differences of the best split: its cuts, or the units that it puts on another device."""
    if split.in_order and len(best.stages) > 1:
        cuts = [", ".join(f"'{stage.ops[-1]}'" for stage in plan.stages[:-1]) or "nothing" for plan in (given, best)]
        parts = ", ".join(f"{len(stage.ops)} ops on '{stage.devices[0]}'" for stage in best.stages)
        return [f"The best split cuts after {cuts[1]} and not after {cuts[0]}: {parts}."]
    before, after = ({op: stage.devices[0] for stage in plan.stages for op in stage.ops} for plan in (given, best))
    places = {unit.modules[0] or unit.ops[0]: (before[unit.ops[0]], after[unit.ops[0]]) for unit in split.units}
    moves: dict[tuple[str, str], list[str]] = {}
    for name, (source, target) in joined(places).items():
        if source != target:
            moves.setdefault((source, target), []).append(name)
    sentences = []
    for (source, target), names in moves.items():
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        listed = ", ".join(f"'{name}'" for name in names[:SHOWN])
        sentences.append(f"The best split moves {listed}{more} from '{source}' to '{target}'.")
    return sentences


def crossing_bytes(plan: Plan, graph: Graph) -> int:
    """Bytes of a request that go from a device to another one, each value once for each device that receives it."""
    homes: dict[str, Sequence[str]] = {op: stage.devices for stage in plan.stages for op in stage.ops}
    moved = {
        (value, homes[op.name][0])
        for op in graph.ops
        for value in op.inputs
        if value in graph.producer and homes[graph.producer[value]] != homes[op.name]
    }
    return sum(graph.values[value].num_bytes for value, _ in moved)

"""Plans and fronts within memory caps: the planner counts weights, and its answers are checked with the whole memory account.

The peak of values is not a sum over ops, and slots of rings depend on the cut, so the dynamic programs do not carry them.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autosplit.errors import InfeasibleError
from autosplit.memory.account import Account
from autosplit.memory.stages import least_base_bytes, within
from autosplit.planners.pareto import front_of
from autosplit.planning.backends import backend_subsets
from autosplit.planning.plans import every_plan, plan_front, plan_key, plan_model
from autosplit.planning.predicting import bounded
from autosplit.planning.question import Question, with_base
from autosplit.tables import bytes_text
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, cap_faults, held_on

PlanOnMachine = Callable[[Machine], Plan]
"""A function from a machine, whose caps count weights alone, to the best plan on it. Raises: InfeasibleError."""

MAX_QUESTIONS = 12
"""Most questions to the planner with the same backends until an answer keeps the caps; also the most listed plans that run."""


def plan_within_caps(question: Question) -> Plan:
    """The planner's plan, with the whole memory of every device within its cap.

    A plan that breaks a cap gets fewer slots in its rings. If it still breaks one, every chain of stages is tried, best first,
    where there are few. Then the planner is asked again with smaller caps, of all devices or of one: the cap less the memory
    beside weights in an answer that broke it, then half-way back. Each subset of the backends is asked for, because it may need
    less memory. The first question counts weights alone, so its bound holds for every plan within the caps.

    Raises: InfeasibleError: no plan was found; ``conflict`` says whether that is proved. ProfileError: as ``plan_model``.
    """
    machine, least = question.machine, _least(question)
    if least and all(one.memory_bytes is not None and one.memory_bytes <= least[one.name] for one in machine.devices):
        roomiest = max(machine.devices, key=lambda device: device.memory_bytes or 0)
        raise InfeasibleError(
            f"no plan fits: a worker takes {bytes_text(least[roomiest.name])} on '{roomiest.name}' for itself, and its cap is "
            f"{bytes_text(roomiest.memory_bytes or 0)}. Raise a cap."
        )
    subsets = backend_subsets(question)

    def asking(part: Question) -> PlanOnMachine:
        return lambda machine: plan_model(replace(part, machine=machine))

    def listed(least: Mapping[str, int]) -> list[Plan]:
        return [plan for part in subsets for plan in _listed(part, least)]

    asks = [asking(part) for part in (question, *subsets[:-1])]
    return answer_within_caps(question, asks, listed)


def answer_within_caps(
    question: Question,
    asks: Sequence[PlanOnMachine],
    listed: Callable[[Mapping[str, int]], list[Plan]] = lambda least: [],
) -> Plan:
    """The first answer to a question or, if it breaks a cap, the best answer that keeps all caps.

    Args:
        question: the machine with its caps, the backends, and the memory of stages.
        asks: ways to answer it, each of which is asked with smaller caps until its answer keeps the caps. The bound is that of
            the first.
        listed: called if the first answer breaks a cap, with the bytes that a worker takes on each device beside its stage;
            returns plans that keep the caps and were found in another way.
    Raises: InfeasibleError: no such plan was found.
    """
    machine, account, least = question.machine, question.memory, _least(question)
    try:
        first = asks[0](within(machine, least))
    except InfeasibleError as failure:
        raise with_base(failure, max(least.values(), default=0)) from None
    if not least:
        return first
    first = with_fitting_slots(account.measured(first), machine, account)
    over = cap_faults(first.stages, machine.devices, account.graph)
    if not over:
        return first
    found = listed(least)
    for number, ask in enumerate(asks):
        plan, faults = _corrected(question, ask, least, None if number else first)
        found += [plan] if plan is not None else []
        over = faults or over
    if not found:
        raise InfeasibleError(f"no plan within the caps was found: {'; '.join(over.values())}. Raise a cap, or add a device.")
    return bounded(min(found, key=plan_key(question.constraints)), first.prediction.bound_s)


def front_within_caps(question: Question) -> list[tuple[Plan, int]]:
    """Plans within the caps that no other plan beats in throughput, latency and memory together, the best throughput first.

    Returns: plans, each with all bytes that its fullest device holds. Raises: as ``plan_within_caps``.
    """
    machine, account, least = question.machine, question.memory, _least(question)
    best = [plan_within_caps(question)] if least else []
    plans = list[Plan]()
    with suppress(*[InfeasibleError] if best else ()):  # its weights may have to be streamed, which a front does not ask for
        plans = plan_front(replace(question, machine=within(machine, least)))
    front = _undominated((with_fitting_slots(plan, machine, account) for plan in plans), machine, account.graph)
    if least:
        measured = (with_fitting_slots(account.measured(plan), machine, account) for plan, _ in front)
        front = _undominated([*best, *measured], machine, account.graph)
    return front


def front_rows(front: Sequence[tuple[Plan, int]]) -> list[dict[str, Any]]:
    """One row for each plan of a front, for a table."""
    return [
        {
            "number": number,
            "items_per_s": plan.prediction.throughput_per_s,
            "latency_s": plan.prediction.latency_s,
            "peak_bytes": peak_bytes,
            "stages": plan.cell,
        }
        for number, (plan, peak_bytes) in enumerate(front)
    ]


def _undominated(plans: Iterable[Plan], machine: Machine, graph: Graph) -> list[tuple[Plan, int]]:
    """The plans within the caps that no other one dominates, each with the bytes that its fullest device holds."""
    rows = []
    for plan in plans:
        if not cap_faults(plan.stages, machine.devices, graph):
            peak_bytes = max(sum(held_on(device, plan.stages, machine.devices, graph)) for device in machine.devices)
            values = plan.prediction.bottleneck_s, plan.prediction.latency_s, float(peak_bytes)
            rows.append((values, len(plan.stages), (plan, peak_bytes)))
    return front_of(rows)


def _least(question: Question) -> dict[str, int]:
    """Name of each device with a cap to the bytes that a worker takes there at least beside its stage."""
    capped, known = [device for device in question.machine.devices if device.memory_bytes is not None], question.memory.known
    return {device.name: least_base_bytes(known, question.backends, device) for device in capped}


def _listed(question: Question, least: Mapping[str, int]) -> list[Plan]:
    """The best plan within the caps among those that ``every_plan`` lists, or nothing."""
    machine, account, tried = question.machine, question.memory, 0
    for listed in every_plan(replace(question, machine=within(machine, least))):
        if cap_faults(with_fitting_slots(listed, machine, account).stages, machine.devices, account.graph):
            continue
        plan, tried = with_fitting_slots(account.measured(listed), machine, account), tried + 1
        if not cap_faults(plan.stages, machine.devices, account.graph):
            return [plan]
        if tried == MAX_QUESTIONS:
            break
    return []


def _corrected(
    question: Question, ask: PlanOnMachine, least: Mapping[str, int], known: Plan | None
) -> tuple[Plan | None, dict[str, str]]:
    """A plan within the caps, or None and the faults of the last answer.

    Args:
        least: device name to the bytes that each stage takes at least beside weights.
        known: the answer with caps that are smaller by these; None if it was not asked for.
    """
    machine, account = question.machine, question.memory
    waiting, asked, over = deque([(dict(least), dict(least))]), list[dict[str, int]](), dict[str, str]()
    while waiting and len(asked) < MAX_QUESTIONS:
        taken, before = waiting.popleft()
        if taken in asked:
            continue
        asked.append(taken)
        back = {name: (size + before[name]) // 2 for name, size in taken.items()}
        try:
            plan = known if known is not None and len(asked) == 1 else None
            plan = plan or with_fitting_slots(account.measured(ask(within(machine, taken))), machine, account)
        except InfeasibleError:
            waiting.append((back, before))
            continue
        over = cap_faults(plan.stages, machine.devices, account.graph)
        if not over:
            return plan, {}
        held = {name: held_on(machine[name], plan.stages, machine.devices, account.graph) for name in over}
        beside = {name: max(taken[name], beside_bytes) for name, (_, beside_bytes) in held.items()}
        waiting += [({**taken, **some}, taken) for some in (beside, *({name: size} for name, size in beside.items()))]
        waiting.append((back, before))
    return None, over


def with_fitting_slots(plan: Plan, machine: Machine, account: Account) -> Plan:
    """The plan with the memory of its stages. Its queue depth is halved until it keeps the caps; no footprint depends on that."""
    plan = account.counted(plan)
    while plan.queue_depth > 1 and cap_faults(plan.stages, machine.devices, account.graph):
        plan = account.counted(replace(plan, queue_depth=plan.queue_depth // 2))
    return plan

"""Plans within memory caps: the planner counts weights, and its answers are checked with the whole memory account.

The peak of values is not a sum over ops, and slots of rings depend on the cut, so the dynamic programs do not carry them.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence

from autosplit.errors import InfeasibleError
from autosplit.memory.stages import within
from autosplit.planning.predicting import bounded
from autosplit.tables import bytes_text
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan, Stage, held_on, over_cap

MAX_QUESTIONS = 12
"""Most questions to the planner, with the same backends, until an answer keeps the caps."""

Ask = Callable[[Machine, Sequence[str]], Plan]
"""Gives the planner's best plan on a machine with some of the backends."""


def plan_within_caps(
    ask: Ask,
    machine: Machine,
    backends: Sequence[str],
    graph: Graph,
    count: Callable[[Plan], Plan],
    base_bytes: int = 0,
) -> Plan:
    """The planner's plan, where the whole memory of every device is within its cap.

    Each question gives the planner smaller caps, for all devices or one: a cap less what the device holds beside weights in an
    answer that broke it. Where that does not help, a question half-way back follows. Where the first answer breaks a cap, each
    backend is asked alone too, because another one may need less memory. The bound is that of the first question, which counts
    nothing that some plan could do without, so it holds for every plan within the caps. A plan within tight caps may be missed.

    Args:
        ask: gives the planner's best plan.
        machine: the devices with their caps.
        backends: the backends that may run.
        graph: the model.
        count: gives a plan the memory of its stages.
        base_bytes: what each stage takes at least beside its weights.
    Raises: InfeasibleError: no plan was found; ``conflict`` says whether that is proved.
    """
    capped = {device.name: base_bytes for device in machine.devices if device.memory_bytes is not None}
    if not capped:
        return ask(machine, backends)
    most = max(device.memory_bytes for device in machine.devices if device.memory_bytes is not None)
    if len(capped) == len(machine.devices) and most <= base_bytes:
        raise InfeasibleError(
            f"no plan fits: a worker takes {bytes_text(base_bytes)} for itself, and the largest cap is {bytes_text(most)}. "
            "Raise a cap."
        )
    try:
        first = count(ask(within(machine, capped), backends))
    except InfeasibleError as failure:
        raise _with_base(failure, base_bytes) from None
    over = _over(first, machine, graph)
    if not over:
        return first
    found = list[Plan]()
    for some in [backends, *([name] for name in backends if len(backends) > 1)]:
        plan, faults = _corrected(ask, machine, some, graph, count, capped, first if some is backends else None)
        found += [plan] if plan is not None else []
        over = faults or over
    if not found:
        text = "; ".join(over.values())
        raise InfeasibleError(f"no plan within the caps was found: {text}. Raise a cap, or add a device.")
    best = min(found, key=_seconds)
    return bounded(best, first.prediction.bound_s)


def _corrected(
    ask: Ask,
    machine: Machine,
    backends: Sequence[str],
    graph: Graph,
    count: Callable[[Plan], Plan],
    least: Mapping[str, int],
    known: Plan | None,
) -> tuple[Plan | None, dict[str, str]]:
    """A plan within the caps, or None and the faults of the last answer.

    Args:
        least: device name to the bytes that each stage takes at least beside weights.
        known: the planner's answer with caps that are smaller by these; None if it was not asked with these backends.
    """
    waiting, asked, over = deque([(dict(least), dict(least))]), list[dict[str, int]](), dict[str, str]()
    while waiting and len(asked) < MAX_QUESTIONS:
        taken, before = waiting.popleft()
        if taken in asked:
            continue
        asked.append(taken)
        back = {name: (size + before[name]) // 2 for name, size in taken.items()}
        try:
            plan = known if known is not None and len(asked) == 1 else count(ask(within(machine, taken), backends))
        except InfeasibleError:
            waiting.append((back, before))
            continue
        over = _over(plan, machine, graph)
        if not over:
            return plan, {}
        beside = {name: max(taken[name], held_on(_stages_on(plan, name), graph)[1]) for name in over}
        waiting += [({**taken, **some}, taken) for some in (beside, *({name: size} for name, size in beside.items()))]
        waiting.append((back, before))
    return None, over


def _over(plan: Plan, machine: Machine, graph: Graph) -> dict[str, str]:
    """Device name to the fault, for each device that would hold more than its cap."""
    faults = {device.name: over_cap(device, _stages_on(plan, device.name), graph) for device in machine.devices}
    return {name: fault for name, fault in faults.items() if fault}


def _stages_on(plan: Plan, device: str) -> list[Stage]:
    return [stage for stage in plan.stages if device in stage.devices]


def _seconds(plan: Plan) -> float:
    predicted = plan.prediction
    return predicted.latency_s if plan.objective == "latency" else predicted.bottleneck_s / plan.microbatch


def _with_base(failure: InfeasibleError, base_bytes: int) -> InfeasibleError:
    if not base_bytes:
        return failure
    less = f" (caps are counted without the {bytes_text(base_bytes)} that a worker takes for itself)."
    return InfeasibleError(str(failure).removesuffix(".") + less)

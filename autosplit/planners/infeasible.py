"""What keeps a problem from having any plan, in words: what can be seen without a search, and small sets that conflict."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from autosplit.errors import InfeasibleError
from autosplit.planners.items import Items
from autosplit.planners.request import Request
from autosplit.problem import Problem
from autosplit.tables import bytes_text


def refuse_hopeless(problem: Problem, items: Items) -> None:
    """Raise InfeasibleError when an op, or ops that stay together, fit no device alone, or all ops do not fit all devices."""
    for ops in items.ops:
        allowed = np.flatnonzero(np.isfinite(problem.compute_s[list(ops)]).all(axis=0))
        if not len(allowed):
            raise InfeasibleError(f"no plan fits: {_no_device(problem, ops)}")
        need = item_bytes(problem, ops)
        roomy = allowed[problem.memory_bytes[allowed].argmax()]
        if need > problem.memory_bytes[roomy] * (1 + 1e-9):
            raise InfeasibleError(f"no plan fits: {_too_large(problem, ops, need, int(roomy), len(allowed))}")
    total = float(problem.op_bytes.sum()) + sum(weight.num_bytes for weight in problem.weights)
    room = float(problem.memory_bytes.sum())
    if total > room * (1 + 1e-9):
        caps = ", ".join(f"'{name}' {bytes_text(cap)}" for name, cap in zip(problem.devices, problem.memory_bytes, strict=True))
        raise InfeasibleError(
            f"no plan fits: the ops need {bytes_text(total)} of weights, and all devices together hold {bytes_text(room)} "
            f"({caps}). Raise a device's memory, or add a device."
        )


def item_bytes(problem: Problem, ops: Sequence[int]) -> float:
    """What ops that stay together need on one device, in bytes."""
    members = set(ops)
    shared = sum(weight.num_bytes for weight in problem.weights if members.intersection(weight.users))
    return float(problem.op_bytes[list(ops)].sum()) + shared


def _names(problem: Problem, ops: Sequence[int]) -> str:
    shown = ", ".join(f"'{problem.ops[op]}'" for op in ops[:3])
    if len(ops) == 1:
        return f"op {shown}"
    return f"ops {shown}" + (f" and {len(ops) - 3} more" if len(ops) > 3 else "") + ", which stay together,"


def _no_device(problem: Problem, ops: Sequence[int]) -> str:
    """Why no device takes all the ops: for each device one reason."""
    reasons = []
    for device, name in enumerate(problem.devices):
        op = next(op for op in ops if np.isinf(problem.compute_s[op, device]))
        reasons.append(problem.reasons.get((op, device), f"op '{problem.ops[op]}' cannot run on '{name}'"))
    ends = "; ".join(dict.fromkeys(reasons))
    verb = "has" if len(ops) == 1 else "have"
    return f"{_names(problem, ops)} {verb} no device: {ends}. Drop one of these, or add a device that takes it."


def _too_large(problem: Problem, ops: Sequence[int], need: float, roomy: int, num_allowed: int) -> str:
    verb = "needs" if len(ops) == 1 else "need"
    among = "the largest cap" if num_allowed == problem.num_devices else "the largest cap among devices that may run it"
    cap = bytes_text(problem.memory_bytes[roomy])
    largest = max(ops, key=lambda op: float(problem.op_bytes[op]))
    part = "" if len(ops) == 1 else f" (the largest part is op '{problem.ops[largest]}', {bytes_text(problem.op_bytes[largest])})"
    return (
        f"{_names(problem, ops)} {verb} {bytes_text(need)} of weights on one device{part}, and {among} is {cap} "
        f"('{problem.devices[roomy]}'). Raise that device's memory, or add a device that holds it."
    )


Feasible = Callable[[Problem, Request], bool]


def conflict(problem: Problem, request: Request, feasible: Feasible) -> list[str]:
    """A set of constraints that cannot hold together, of which none can be left out; a sentence each.

    Constraints are dropped one after the other, and stay dropped while no plan fits (the deletion filter of Chinneck and
    Dravnieks, 1991); first whole kinds, then the members of the kinds that remain.
    """
    kept = _constraints(problem, request)
    kinds = list(dict.fromkeys(kind for kind, _, _ in kept))
    for kind in kinds:
        fewer = [entry for entry in kept if entry[0] != kind]
        if len(fewer) < len(kept) and not feasible(*_with(problem, request, fewer)):
            kept = fewer
    for entry in list(kept):
        fewer = [other for other in kept if other is not entry]
        if not feasible(*_with(problem, request, fewer)):
            kept = fewer
    return [words for _, words, _ in kept]


Constraint = tuple[str, str, int | str]


def _constraints(problem: Problem, request: Request) -> list[Constraint]:
    """(kind, in words, key) of all that may be dropped."""
    found: list[Constraint] = []
    for name, words in (
        ("num_stages", f"exactly {request.num_stages} stages are asked for"),
        ("max_stages", f"at most {request.max_stages} stages are asked for"),
        ("min_stage_s", f"a stage takes at least {request.min_stage_s:.3g} s"),
        ("max_latency_s", f"a sample takes at most {request.max_latency_s:.3g} s"),
    ):
        if getattr(request, name) != getattr(Request(), name):
            found.append((name, words, name))
    if request.contiguous and problem.order:
        shape = f"a chain of {request.num_stages} blocks in all" if request.num_stages else "stages form a chain"
        found.append(("chain", shape if request.reuse else "stages form a chain, with one block on a device", 0))
    for group, ops in enumerate(problem.groups):
        found.append(("group", f"{_names(problem, ops)} stay together".replace(", which stay together,", ""), group))
    for device in np.flatnonzero(np.isfinite(problem.memory_bytes)):
        cap = bytes_text(problem.memory_bytes[device])
        found.append(("memory", f"'{problem.devices[device]}' holds at most {cap}", int(device)))
    for number, pool in enumerate(problem.pools):
        names = ", ".join(f"'{problem.devices[device]}'" for device in pool.devices)
        found.append(("pool", f"{names} hold at most {bytes_text(pool.num_bytes)} together", number))
    for op in np.flatnonzero(np.isinf(problem.compute_s).any(axis=1)):
        devices = np.flatnonzero(np.isinf(problem.compute_s[op]))
        reasons = [
            problem.reasons.get((int(op), int(d)), f"op '{problem.ops[op]}' cannot run on '{problem.devices[d]}'")
            for d in devices
        ]
        found.append(("place", "; ".join(dict.fromkeys(reasons)), int(op)))
    return found


def _with(problem: Problem, request: Request, kept: Sequence[Constraint]) -> tuple[Problem, Request]:
    """The problem and request with only these constraints; an op that is let onto a device takes no time there."""
    keys = {(kind, key) for kind, _, key in kept}
    compute = problem.compute_s.copy()
    for op in range(problem.num_ops):
        if ("place", op) not in keys:
            compute[op][np.isinf(compute[op])] = 0.0
    memory = [cap if ("memory", device) in keys else inf for device, cap in enumerate(problem.memory_bytes)]
    changed = replace(
        problem,
        compute_s=compute,
        memory_bytes=np.array(memory),
        groups=tuple(ops for number, ops in enumerate(problem.groups) if ("group", number) in keys),
        pools=tuple(pool for number, pool in enumerate(problem.pools) if ("pool", number) in keys),
    )
    default = Request()
    names = ("num_stages", "max_stages", "min_stage_s", "max_latency_s")
    options = {name: getattr(request if (name, name) in keys else default, name) for name in names}
    contiguous = request.contiguous and ("chain", 0) in keys
    return changed, replace(request, contiguous=contiguous, **options)

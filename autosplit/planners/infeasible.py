"""What keeps a problem from having any plan: the faults that can be seen without a search, in words."""

from collections.abc import Sequence

import numpy as np

from autosplit.errors import InfeasibleError
from autosplit.planners.items import Items
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

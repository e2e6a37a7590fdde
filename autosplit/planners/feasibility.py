"""Necessary conditions of a plan, checked without a search. No solver is loaded."""

from collections.abc import Sequence

import numpy as np

from autosplit.costs.cost import TOLERANCE, most_s
from autosplit.costs.problem import Problem
from autosplit.errors import InfeasibleError
from autosplit.tables import bytes_text, seconds_text
from autosplit.values.constraints import Demands


def require_places(problem: Problem, together: Sequence[Sequence[int]]) -> None:
    """Raise InfeasibleError if ops that stay together fit on no device."""
    for ops in together:
        allowed = np.flatnonzero(np.isfinite(problem.compute_s[list(ops)]).all(axis=0))
        if not len(allowed):
            raise InfeasibleError(f"no plan fits: {_no_device(problem, ops)}")
        need = item_bytes(problem, ops)
        roomy = allowed[problem.memory_bytes[allowed].argmax()]
        if need > problem.memory_bytes[roomy] * (1 + TOLERANCE):
            raise InfeasibleError(f"no plan fits: {_too_large(problem, ops, need, int(roomy), len(allowed))}")


def require_room(problem: Problem, together: Sequence[Sequence[int]], most_blocks: int | None) -> None:
    """Raise InfeasibleError if ops that stay together fit on no device, or all ops do not fit on all devices.

    If ``most_blocks`` limits the blocks, only that many devices count.
    """
    require_places(problem, together)
    total = problem.total_bytes
    room = float(problem.memory_bytes.sum())
    if total > room * (1 + TOLERANCE):
        caps = ", ".join(f"'{name}' {bytes_text(cap)}" for name, cap in zip(problem.devices, problem.memory_bytes, strict=True))
        raise InfeasibleError(
            f"no plan fits: the ops need {bytes_text(total)} of weights, and all devices together hold {bytes_text(room)} "
            f"({caps}). Raise a device's memory, or add a device."
        )
    largest = float(np.sort(problem.memory_bytes)[::-1][:most_blocks].sum())
    if total > largest * (1 + TOLERANCE):
        raise InfeasibleError(
            f"no plan fits: these cannot hold together: at most {most_blocks} stages, {bytes_text(total)} of weights, and the "
            f"{bytes_text(largest)} that the {most_blocks} largest devices hold. Allow more stages, or raise a device's memory."
        )


def item_bytes(problem: Problem, ops: Sequence[int]) -> float:
    """The bytes that ops need together on one device."""
    members = set(ops)
    shared = sum(weight.num_bytes for weight in problem.weights if members.intersection(weight.users))
    return float(problem.op_bytes[list(ops)].sum()) + shared


def shown_ops(problem: Problem, ops: Sequence[int]) -> str:
    """The first three ops by name, and the number of the others; several stay together."""
    shown = ", ".join(f"'{problem.ops[op]}'" for op in ops[:3])
    if len(ops) == 1:
        return f"op {shown}"
    return f"ops {shown}" + (f" and {len(ops) - 3} more" if len(ops) > 3 else "") + ", which stay together,"


def why_not(problem: Problem, op: int, device: int) -> str:
    """Why an op cannot run on a device."""
    return problem.reasons.get((op, device), f"op '{problem.ops[op]}' cannot run on '{problem.devices[device]}'")


def _no_device(problem: Problem, ops: Sequence[int]) -> str:
    """Why no device takes all the ops, with one reason for each device."""
    reasons = []
    for device in range(problem.num_devices):
        reasons.append(why_not(problem, next(op for op in ops if np.isinf(problem.compute_s[op, device])), device))
    ends = "; ".join(dict.fromkeys(reasons))
    verb = "has" if len(ops) == 1 else "have"
    return f"{shown_ops(problem, ops)} {verb} no device: {ends}. Drop one of these, or add a device that takes it."


def _too_large(problem: Problem, ops: Sequence[int], need: float, roomy: int, num_allowed: int) -> str:
    verb = "needs" if len(ops) == 1 else "need"
    among = "the largest cap" if num_allowed == problem.num_devices else "the largest cap among devices that may run it"
    cap = bytes_text(problem.memory_bytes[roomy])
    largest = max(ops, key=lambda op: float(problem.op_bytes[op]))
    part = "" if len(ops) == 1 else f" (the largest part is op '{problem.ops[largest]}', {bytes_text(problem.op_bytes[largest])})"
    return (
        f"{shown_ops(problem, ops)} {verb} {bytes_text(need)} of weights on one device{part}, and {among} is {cap} "
        f"('{problem.devices[roomy]}'). Raise that device's memory, or add a device that holds it."
    )


def require_stage_seconds(problem: Problem, demands: Demands) -> None:
    """Raise InfeasibleError if all stages together cannot take as long as is demanded."""
    all_s = most_s(problem)
    count = demands.num_stages or 1
    if count * demands.min_stage_s > all_s * (1 + TOLERANCE):
        stages = f"exactly {count} stages are asked for; " if count > 1 else ""
        least, most = seconds_text(demands.min_stage_s), seconds_text(all_s)
        raise InfeasibleError(
            f"no plan fits: these cannot hold together: {stages}a stage takes at least {least}; all ops with all transfers take "
            f"at most {most}. Ask for shorter stages{' or for fewer' if count > 1 else ''}."
        )


def require_latency(demands: Demands, bound_s: float, method: str) -> None:
    """Raise InfeasibleError if it is proved that a sample takes longer than is allowed."""
    if bound_s > demands.max_latency_s * (1 + TOLERANCE):
        raise InfeasibleError(
            f"no plan fits: a sample takes at least {seconds_text(bound_s)} ({method}), and at most "
            f"{seconds_text(demands.max_latency_s)} are asked for. Raise that limit, or use faster devices."
        )

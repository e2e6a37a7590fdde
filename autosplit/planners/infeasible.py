"""Why a problem has no plan, in words: faults that are seen without a search, and small sets of constraints that conflict."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from autosplit.costs.cost import TOLERANCE, most_s
from autosplit.costs.problem import Problem
from autosplit.errors import InfeasibleError
from autosplit.planners.clock import now
from autosplit.planners.cpsat.integer_program import is_refuted
from autosplit.tables import bytes_text, seconds_text
from autosplit.values.constraints import Demands

MOST_NAMED = 12
"""Constraints in one message."""


def refuse_obvious(problem: Problem, together: Sequence[Sequence[int]], most_blocks: int | None) -> None:
    """Raise InfeasibleError if ops that stay together fit on no device, or all ops do not fit on all devices.

    If ``most_blocks`` limits the blocks, only that many devices count.
    """
    for ops in together:
        allowed = np.flatnonzero(np.isfinite(problem.compute_s[list(ops)]).all(axis=0))
        if not len(allowed):
            raise InfeasibleError(f"no plan fits: {_no_device(problem, ops)}")
        need = item_bytes(problem, ops)
        roomy = allowed[problem.memory_bytes[allowed].argmax()]
        if need > problem.memory_bytes[roomy] * (1 + TOLERANCE):
            raise InfeasibleError(f"no plan fits: {_too_large(problem, ops, need, int(roomy), len(allowed))}")
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


def _names(problem: Problem, ops: Sequence[int]) -> str:
    shown = ", ".join(f"'{problem.ops[op]}'" for op in ops[:3])
    if len(ops) == 1:
        return f"op {shown}"
    return f"ops {shown}" + (f" and {len(ops) - 3} more" if len(ops) > 3 else "") + ", which stay together,"


def _reason(problem: Problem, op: int, device: int) -> str:
    """Why an op cannot run on a device."""
    return problem.reasons.get((op, device), f"op '{problem.ops[op]}' cannot run on '{problem.devices[device]}'")


def _no_device(problem: Problem, ops: Sequence[int]) -> str:
    """Why no device takes all the ops, with one reason for each device."""
    reasons = []
    for device in range(problem.num_devices):
        reasons.append(_reason(problem, next(op for op in ops if np.isinf(problem.compute_s[op, device])), device))
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


def refuse_short(problem: Problem, demands: Demands) -> None:
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


def refuse_latency(demands: Demands, bound_s: float, method: str) -> None:
    """Raise InfeasibleError if it is proved that a sample takes longer than is allowed."""
    if bound_s > demands.max_latency_s * (1 + TOLERANCE):
        raise InfeasibleError(
            f"no plan fits: a sample takes at least {seconds_text(bound_s)} ({method}), and at most "
            f"{seconds_text(demands.max_latency_s)} are asked for. Raise that limit, or use faster devices."
        )


def conflict(problem: Problem, demands: Demands, deadline: float, seed: int = 0) -> str:
    """A minimal set of constraints that cannot hold together, in words.

    Constraints are dropped while it is proved that no plan meets the others: whole kinds first, then halves, quarters, and at
    last single ones (ddmin, Zeller and Hildebrandt, 2002). The constraints that are left always conflict, so the search may end
    at any time.

    Args:
        problem, demands: no plan meets these.
        deadline: second of ``now()`` after which no more constraints are dropped; the answer then says so.
        seed: of the solver.
    """
    kept = _constraints(problem, demands)
    for kind in dict.fromkeys(kind for kind, _, _ in kept):
        fewer = [entry for entry in kept if entry[0] != kind]
        if fewer and now() < deadline and is_refuted(*_with(problem, demands, fewer), deadline, seed):
            kept = fewer
    size = len(kept) // 2
    while size >= 1 and now() < deadline:
        place = 0
        while place < len(kept) and len(kept) > 1 and now() < deadline:
            fewer = kept[:place] + kept[place + size :]
            if fewer and is_refuted(*_with(problem, demands, fewer), deadline, seed):
                kept = fewer
            else:
                place += size
        size //= 2
    words = [words for _, words, _ in kept]
    more = f"; and {len(words) - MOST_NAMED} more" if len(words) > MOST_NAMED else ""
    late = " (there was no time to find out whether fewer of them conflict)" if now() >= deadline else ""
    return f"these cannot hold together: {'; '.join(words[:MOST_NAMED]) or 'no constraint was given'}{more}{late}"


Constraint = tuple[str, str, int | str]


def _constraints(problem: Problem, demands: Demands) -> list[Constraint]:
    """(kind, in words, key) of all constraints that may be dropped; the chain is last, since proofs are quicker with it."""
    found: list[Constraint] = []
    for name, words in (
        ("num_stages", f"exactly {demands.num_stages} stages are asked for"),
        ("max_stages", f"at most {demands.max_stages} stages are asked for"),
        ("min_stage_s", f"a stage takes at least {seconds_text(demands.min_stage_s)}"),
        ("max_latency_s", f"a sample takes at most {seconds_text(demands.max_latency_s)}"),
    ):
        if getattr(demands, name) != getattr(Demands(), name):
            found.append((name, words, name))
    for group, ops in enumerate(problem.groups):
        found.append(("group", f"{_names(problem, ops)} stay together".replace(", which stay together,", ""), group))
    for device in np.flatnonzero(np.isfinite(problem.memory_bytes)):
        cap = bytes_text(problem.memory_bytes[device])
        found.append(("memory", f"'{problem.devices[device]}' holds at most {cap}", int(device)))
    for number, pool in enumerate(problem.pools):
        names = ", ".join(f"'{problem.devices[device]}'" for device in pool.devices)
        found.append(("pool", f"{names} hold at most {bytes_text(pool.num_bytes)} together", number))
    for op in np.flatnonzero(np.isinf(problem.compute_s).any(axis=1)):
        reasons = [_reason(problem, int(op), int(device)) for device in np.flatnonzero(np.isinf(problem.compute_s[op]))]
        found.append(("place", "; ".join(dict.fromkeys(reasons)), int(op)))
    if demands.contiguous and problem.order:
        shape = f"a chain of {demands.num_stages} blocks in all" if demands.num_stages else "stages form a chain"
        found.append(("chain", shape if demands.reuse else "stages form a chain, with one block on a device", 0))
    return found


def _with(problem: Problem, demands: Demands, kept: Sequence[Constraint]) -> tuple[Problem, Demands]:
    """The problem and demands with only these constraints. An op takes no time on a device from which it is no longer barred."""
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
    default = Demands()
    names = ("num_stages", "max_stages", "min_stage_s", "max_latency_s")
    options = {name: getattr(demands if (name, name) in keys else default, name) for name in names}
    contiguous = demands.contiguous and ("chain", 0) in keys
    return changed, replace(demands, contiguous=contiguous, **options)

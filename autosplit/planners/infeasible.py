"""Why a problem has no plan, in words: small sets of constraints that conflict."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import numpy as np

from autosplit.costs.problem import Problem
from autosplit.planners.clock import now
from autosplit.planners.cpsat.integer_program import is_refuted
from autosplit.planners.feasibility import shown_ops, why_not
from autosplit.tables import bytes_text, seconds_text
from autosplit.values.constraints import Demands

MOST_NAMED = 12
"""Constraints in one message."""


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
        found.append(("group", f"{shown_ops(problem, ops)} stay together".replace(", which stay together,", ""), group))
    for device in np.flatnonzero(np.isfinite(problem.memory_bytes)):
        cap = bytes_text(problem.memory_bytes[device])
        found.append(("memory", f"'{problem.devices[device]}' holds at most {cap}", int(device)))
    for number, pool in enumerate(problem.pools):
        names = ", ".join(f"'{problem.devices[device]}'" for device in pool.devices)
        found.append(("pool", f"{names} hold at most {bytes_text(pool.num_bytes)} together", number))
    for op in np.flatnonzero(np.isinf(problem.compute_s).any(axis=1)):
        reasons = [why_not(problem, int(op), int(device)) for device in np.flatnonzero(np.isinf(problem.compute_s[op]))]
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

"""The arena as a strip-packing problem for CP-SAT: each storage is a rectangle of steps and bytes, and none overlap."""

from collections.abc import Sequence

from ortools.sat.python import cp_model

from autosplit import cpsat
from autosplit.memory.lives import ALIGNMENT, Life


def pack(lives: Sequence[Life], offsets: Sequence[int], bound_bytes: int, time_limit_s: float) -> tuple[list[int], bool]:
    """The best offsets found within the time limit, and whether they are proved best.

    Args:
        offsets: a plan to start from; the returned one is never worse.
        bound_bytes: a proved lower bound on the peak.
    """
    model = cp_model.CpModel()
    peak = max(offset + life.num_bytes for offset, life in zip(offsets, lives, strict=True)) // ALIGNMENT
    top = model.new_int_var(bound_bytes // ALIGNMENT, peak, "peak")
    starts, times, places = [], [], []
    for number, life in enumerate(lives):
        size = life.num_bytes // ALIGNMENT
        start = model.new_int_var(0, peak - size, f"start{number}")
        model.add_hint(start, offsets[number] // ALIGNMENT)
        model.add(start + size <= top)
        times.append(model.new_fixed_size_interval_var(life.first, life.last - life.first + 1, ""))
        places.append(model.new_fixed_size_interval_var(start, size, ""))
        starts.append(start)
    model.add_no_overlap_2d(times, places)
    model.add_cumulative(times, [life.num_bytes // ALIGNMENT for life in lives], top)
    model.minimize(top)
    solver, status = cpsat.run(model, time_limit_s)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return list(offsets), False
    return [solver.value(start) * ALIGNMENT for start in starts], status == cp_model.OPTIMAL

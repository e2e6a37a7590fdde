"""A bound on latency from the segments of a graph: the ops between a fork and the op at which its branches meet again.

No op of a segment begins before the fork has ended, and the meeting op begins after all of them. So a path through the segment
takes at least the shortest schedule of the segment alone on all devices. That is at least its work spread over all devices, and
its branches run in turn if transfers cost more than running them side by side saves. A segment may contain others; a path takes
the longer of the two.
"""

from collections.abc import Sequence
from math import inf

import networkx
import numpy as np

from autosplit.costs.problem import Floats, Problem
from autosplit.planners.bounds import work_bound_s
from autosplit.planners.clock import now
from autosplit.planners.delays import Delays, critical_path_s
from autosplit.planners.incumbent import CLOSE
from autosplit.planners.latency.cut_vertices import CutVertices

MOST_OPS = 2000
"""Most ops of a graph whose segments are looked at. In larger graphs only all work spread over all devices counts."""

MOST_INSIDE = 60
"""Most ops of a segment, ends included, of which it is asked whether its branches run in turn."""

Edge = tuple[int, int, float]
"""Two ops, and the least seconds of the values between them if they are on different devices."""


def segment_bound_s(problem: Problem, max_replicas: int, deadline: float, limit_s: float = inf) -> float:
    """No schedule of one sample that takes less than ``limit_s`` is shorter, in seconds.

    Args:
        problem: the ops in topological order.
        max_replicas: of a block; transfers are as cheap as the cheapest of them.
        deadline: as a second of ``now()``; segments that are not looked at by then count as their work.
        limit_s: schedules that take longer do not count.
    """
    if problem.num_ops > MOST_OPS:
        return work_bound_s(problem)
    delays = Delays(problem, max_replicas)
    lengths: dict[int, tuple[int, float]] = {}
    known: dict[tuple[bytes, tuple[Edge, ...]], float] = {}
    segments = _segments(problem)
    for fork, inside in segments.items():
        goal, place = inside[-1], {op: number for number, op in enumerate(inside)}
        if len(inside) <= 3:
            continue
        least_s = work_bound_s(problem, inside[1:-1]) + float(problem.compute_s[goal].min())
        if len(inside) <= MOST_INSIDE and now() < deadline:
            work_s = problem.compute_s[inside][:, problem.representatives]
            work_s[0][np.isfinite(work_s[0])] = 0.0
            pairs = [(op, reader) for op in inside for reader in problem.readers[op] if reader in place]
            edges = tuple((place[a], place[b], float(delays.between_classes(a, b).min())) for a, b in pairs)
            key = work_s.tobytes(), edges
            if key not in known:
                known[key] = least_in_turn_s(work_s, edges, least_s)
            least_s = max(least_s, known[key])
        lengths[fork] = goal, least_s
    path_s = critical_path_s(problem, delays, CutVertices(problem, delays, segments, lengths, limit_s).after)
    return max(min(path_s, limit_s), work_bound_s(problem))


def least_in_turn_s(work_s: Floats, edges: Sequence[Edge], known_s: float) -> float:
    """A bound on the seconds of every schedule of some ops, by bisection between a known one and that on one device.

    Args:
        work_s: seconds of each op on each class of devices, shape (num_ops, K).
        edges: the values, sorted by the op that makes them.
        known_s: a known bound.
    """
    low_s, high_s = known_s, float(work_s.sum(axis=0).min())
    if not low_s < high_s < inf:
        return low_s
    work_s, target_s = np.minimum(work_s, high_s), high_s
    path_s = np.where(np.eye(len(work_s)), work_s.min(axis=1), -inf)
    for maker, reader, _ in edges:
        path_s[:, reader] = np.maximum(path_s[:, reader], path_s[:, maker] + path_s[reader, reader])
    while high_s - low_s > CLOSE * high_s:
        if _takes(work_s, edges, path_s, target_s):
            low_s = target_s
        else:
            high_s = target_s
        target_s = (low_s + high_s) / 2
    return low_s


def _takes(work_s: Floats, edges: Sequence[Edge], path_s: Floats, target_s: float) -> bool:
    """Whether it is shown that no schedule is shorter than a target.

    In a shorter one, an op does not read from another device what would come too late there. Ops that are joined by such values
    share a device, so an op begins after all of them that it depends on, one after the other; and so at the other end.

    Args:
        work_s, edges: see ``least_in_turn_s``.
        path_s: the longest path from each op to each other one, both included, shape (num_ops, num_ops); -inf if there is none.
        target_s: the seconds asked about.
    """
    maker, reader = np.array([edge[:2] for edge in edges]).T
    wait_s = np.array([edge[2] for edge in edges])
    least_s, label, linked = path_s.diagonal(), np.arange(len(work_s)), (path_s > -inf) & ~np.eye(len(work_s), dtype=np.bool_)
    head_s, tail_s = np.zeros((2, len(work_s)))  # the least seconds before and after each op
    sum_s, before_s = 0.0, -1.0
    while sum_s > before_s:
        head_s, tail_s = (head_s[:, None] + path_s).max(axis=0) - least_s, (path_s + tail_s).max(axis=1) - least_s
        there_s, rest_s = (head_s + least_s)[maker] + wait_s, wait_s + (least_s + tail_s)[reader]
        # a value that leaves a device and one that comes back to it wait both, or none of them
        returns = (label[maker][:, None] == label[reader]) & (label[reader][:, None] == label[maker])
        back_s = np.where(returns, path_s[reader][:, maker] + rest_s, -inf).max(axis=1)
        late = there_s + np.maximum(back_s, (least_s + tail_s)[reader]) >= target_s
        for one, other in zip(maker[late], reader[late], strict=True):
            label[label == label[other]] = label[one]
        together = label[:, None] == label
        for end_s, others in ((head_s, together & linked.T), (tail_s, together & linked)):
            first_s = np.where(others, end_s, inf).min(axis=1)
            np.maximum(end_s, first_s + (others @ work_s).min(axis=1), out=end_s, where=others.any(axis=1))
        ends_s = (np.where(together, one, inf).min(axis=1) for one in (head_s, tail_s))
        if max((head_s + least_s + tail_s).max(), (sum(ends_s) + (together @ work_s).min(axis=1)).max()) >= target_s:
            return True
        sum_s, before_s = float(head_s.sum() + tail_s.sum()), sum_s
    return False


def _segments(problem: Problem) -> dict[int, list[int]]:
    """Each op to all ops from it to the one at which its branches meet, both included, in order.

    Ops after which there is no work are left out: many graphs have ends that take no time.
    """
    after = list(problem.readers)
    works = problem.compute_s.min(axis=1) > 0
    for op in reversed(range(problem.num_ops)):
        after[op] = [reader for reader in after[op] if works[reader]]
        works[op] = works[op] or bool(after[op])
    found = {}
    for fork, goal in enumerate(meeting_ops(after)):
        if goal == problem.num_ops:
            continue
        inside, waiting = {fork, goal}, [fork]
        while waiting:
            fresh = set(after[waiting.pop()]) - inside
            inside |= fresh
            waiting += fresh
        found[fork] = sorted(inside)
    return found


def meeting_ops(after: Sequence[Sequence[int]]) -> list[int]:
    """For each op, its immediate postdominator: the first op on every path from it; the number of ops where there is none.

    Args:
        after: the readers of each op.
    """
    end, backward = len(after), networkx.DiGraph()
    for op, readers in enumerate(after):
        backward.add_edges_from((reader, op) for reader in readers or [end])
    dominators = networkx.immediate_dominators(backward, end)
    return [dominators[op] for op in range(end)]

"""A bound on latency along the ops that every path passes, which knows the bytes of all ops between two of them.

From an op to the one where all its paths meet, each op between the two is on the device of the first, on that of the second, or
on another one of some class. The least time of each such assignment counts, with the bytes that it puts on either device.
``critical_path_s`` adds the parts up, so a device that is full has to be left.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.problem import HOST, Floats, Net, Problem, Transfers
from autosplit.planners.delays import Delays, by_class, byte_steps

MOST_BETWEEN, MOST_ASSIGNMENTS = 11, 100_000
"""Most ops between two cut vertices, and most assignments of the first of them; a part with more takes at least its known length.

If there are too many assignments, those without classes of the other devices are tried.
"""

FIRST, SECOND = 0, 1
"""Labels of an op: on the device of the first cut of a part, or of the second one. Larger labels are other devices."""

Assignment = tuple[int, int, float]
"""Bytes on the first and on the second device, in steps, and the least seconds."""

Lengths = Mapping[int, tuple[int, float]]
"""``lengths[op] = other, seconds``: at least so many seconds pass from the end of ``op`` to the end of ``other``."""


def _start(problem: Problem, parts: Mapping[int, Sequence[int]], lengths: Lengths) -> tuple[int, float]:
    """The op from which the cut vertices in turn take longest, and the seconds that they take at least."""
    rest_s = problem.compute_s.min(axis=1)
    for op in sorted(parts, reverse=True):
        goal = parts[op][-1]
        known_s = lengths[op][1] - problem.compute_s[goal].min() if op in lengths else 0.0
        rest_s[op] += rest_s[goal] + max(0.0, known_s)
    return int(np.argmax(rest_s)), float(rest_s.max())


def _undominated(before: NDArray[np.int64], after: NDArray[np.int64], seconds: Floats) -> list[Assignment]:
    """The assignments of which no other one puts as few bytes on both devices in as little time."""
    width = int(after.max(initial=0)) + 1
    keys, place = np.unique(before * width + after, return_inverse=True)
    least_s = np.full(len(keys), inf)
    np.minimum.at(least_s, place, seconds)
    assignments: list[Assignment] = []
    for number in np.argsort(least_s, kind="stable").tolist():
        x, y = divmod(int(keys[number]), width)
        if least_s[number] < inf and not any(a <= x and b <= y for a, b, _ in assignments):
            assignments.append((x, y, float(least_s[number])))
    return assignments


class CutVertices:
    """Bounds from an op to the one where its paths meet: by bytes along the ops that every path passes, else by known lengths.

    Args:
        problem: the ops in topological order.
        delays: between ops on two devices.
        parts: an op to all ops between it and the op where its paths meet, both included, in order.
        lengths: known bounds.
        limit_s: schedules that take longer do not count, so assignments that leave less than the other parts need are left out.
    """

    def __init__(
        self, problem: Problem, delays: Delays, parts: Mapping[int, Sequence[int]], lengths: Lengths, limit_s: float = inf
    ) -> None:
        self.problem, self.delays, self.parts, self.lengths = problem, delays, parts, lengths
        self._binds, self._size, self._most = byte_steps(problem, delays)
        cut, shortest_s = _start(problem, parts, lengths)
        self.slack_s, self._passed = limit_s - shortest_s, set[int]()
        while delays.max_replicas == 1 and cut in parts:
            self._passed.add(cut)
            cut = parts[cut][-1]
        self._compute_s = problem.compute_s[:, problem.representatives]
        self._transfers = Transfers(*(by_class(problem, table) for table in problem.transfers.arrays()))
        self._known: dict[tuple[str, bytes, bytes], list[Assignment]] = {}
        self._made: list[list[Net]] = [[] for _ in problem.ops]
        for net in problem.nets:
            if net.producer != HOST:
                self._made[net.producer].append(net)

    def after(self, op: int, end_s: Floats) -> tuple[int, Floats] | None:
        """The op where the paths from an op meet, and the least seconds at which it ends; None if nothing is known.

        Args:
            op: where the paths part.
            end_s: the least seconds at which it ends, by class and bytes, as in ``critical_path_s``.
        """
        if op in self._passed:
            return self.parts[op][-1], self._through(self.parts[op], end_s)
        if op in self.lengths:
            goal, seconds = self.lengths[op]
            return goal, np.full_like(end_s, end_s.min() + seconds)
        return None

    def _through(self, ops: Sequence[int], end_s: Floats) -> Floats:
        """The least seconds at which the last op of a part ends, by class and bytes, for those of the first op."""
        found, most, binds = np.full_like(end_s, inf), self._most, self._binds
        for k, goal in product(np.flatnonzero(np.isfinite(end_s[:, -1])).tolist(), range(len(end_s))):
            alone = k == goal and len(self.problem.device_classes[k]) == 1
            for last in ([FIRST] if k == goal else []) + ([] if alone else [SECOND]):
                for before, after, seconds in self._of(ops, k, goal, last):
                    left, taken = int(most[k]) - before * bool(binds[k]), (after if last else before) * bool(binds[goal])
                    if left < 0 or taken > most[goal]:
                        continue
                    known_s = end_s[k, left : left + 1] if last else end_s[k, : found.shape[1] - taken]
                    found[goal, taken:] = np.minimum(found[goal, taken:], known_s + seconds)
        for k in np.flatnonzero(binds).tolist():
            found[k, most[k] + 1 :] = found[k, most[k]]
        return found

    def _of(self, ops: Sequence[int], k: int, goal: int, last: int) -> list[Assignment]:
        """The assignments from the first op, on class ``k``, to the last op, on class ``goal`` with label ``last``."""
        taken = np.bincount([k, goal] if last == SECOND else [k], minlength=self._compute_s.shape[1])
        others = [[j] for j, members in enumerate(self.problem.device_classes) if len(members) > taken[j]]
        place = {op: number for number, op in enumerate(ops)}
        made = [
            [(tuple(place[op] for op in net.consumers if op in place), net.num_bytes) for net in self._made[maker]]
            for maker in ops[:-1]
        ]
        least_s, size = self.lengths.get(ops[0], (0, 0.0))[1], self._size[list(ops)]
        key = str((made, k, goal, last, least_s)), self._compute_s[list(ops[1:])].tobytes(), size.tobytes()
        if key not in self._known and len(ops) - 2 <= MOST_BETWEEN:
            for classes in [[k], [goal], *others], [[k], [goal], [j for group in others for j in group]]:
                if (found := self._assigned(ops, size, classes, last, least_s)) is not None:
                    self._known[key] = found
                    break
        return self._known.get(key, [(0 if last else int(size[-1]), int(size[-1]), least_s)])

    def _assigned(
        self, ops: Sequence[int], size: NDArray[np.int64], classes: Sequence[Sequence[int]], last: int, least_s: float
    ) -> list[Assignment] | None:
        """The assignments of labels to the ops; None where they are too many.

        Args:
            ops, size: the ops of the part, and their bytes in steps.
            classes: those of the devices of each label.
            last: the label of the last op.
            least_s: known seconds of the part.
        """
        place = {op: number for number, op in enumerate(ops)}
        limit_s = max(least_s, float(self._compute_s[ops[-1]].min())) + self.slack_s
        edges: list[list[tuple[int, Floats]]] = [[] for _ in ops]
        for maker in ops[:-1]:
            for reader in {reader for net in self._made[maker] for reader in net.consumers if reader in place}:
                edges[place[reader]].append((place[maker], _by_label(self.delays.between_classes(maker, reader), classes)))
        work = np.stack([self._compute_s[list(ops)][:, list(group)].min(axis=1, initial=inf) for group in classes], axis=1)
        free = [label for label in range(len(classes)) if label != SECOND or last == SECOND]
        labels, end_s, load_s = np.full((1, 1), FIRST), np.zeros((1, 1)), np.zeros(1)
        for number in range(1, len(ops)):
            kinds = np.array(
                [label for label in ([last] if number == len(ops) - 1 else free) if work[number, label] < inf], dtype=np.int64
            )
            here = np.tile(kinds, labels.shape[1])
            labels, end_s, load_s = (np.repeat(table, len(kinds), axis=-1) for table in (labels, end_s, load_s))
            begin_s = np.zeros(labels.shape[1])
            for maker, table in edges[number]:
                begin_s = np.maximum(begin_s, end_s[maker] + table[labels[maker], here])
            ends_s = begin_s + work[number, here]
            load_s += np.where(here == FIRST, work[number, here], 0.0)
            kept = np.maximum(ends_s, load_s) <= limit_s
            if np.count_nonzero(kept) > MOST_ASSIGNMENTS:
                return None
            labels, end_s, load_s = np.vstack([labels, here])[:, kept], np.vstack([end_s, ends_s])[:, kept], load_s[kept]
        if not labels.shape[1]:
            return []
        before, after = ((np.where(labels[1:] == label, size[1:, None], 0)).sum(axis=0) for label in (FIRST, SECOND))
        work_s = np.take_along_axis(work, labels, axis=1)
        work_s[0] = 0.0
        seconds = np.maximum(self._seconds(ops, labels, work_s, classes), least_s)
        return _undominated(before, after, seconds)

    def _seconds(self, ops: Sequence[int], labels: NDArray[np.int64], work_s: Floats, classes: Sequence[Sequence[int]]) -> Floats:
        """The least seconds of each assignment, as blocks wait for all that they read and send all that they make at their end.

        The value of an op on the first device leaves after the work and the transfers of all ops there that it depends on. The
        second device works from the moment on at which all inputs of some op are there that depends on no other op there.
        """
        place, count = {op: number for number, op in enumerate(ops)}, labels.shape[1]
        on = [labels == label for label in (FIRST, SECOND)]
        sent_s, busy_s = np.zeros(labels.shape), [np.where(here, work_s, 0.0).sum(axis=0) for here in on]
        taken_s, apart_s = np.zeros(labels.shape), np.zeros(labels.shape)
        before = [{number} for number in range(len(ops))]
        makers: list[set[int]] = [set() for _ in ops]
        for number, op in enumerate(ops[:-1]):
            for net in self._made[op]:
                readers = sorted({place[op] for op in net.consumers if op in place})
                for reader in readers:
                    makers[reader].add(number)
                    before[reader] |= before[number]
                prices = self._transfers.sending_s(net.num_bytes), self._transfers.receiving_s(net.num_bytes)
                send, take = (_by_label(table, classes) * (not self.problem.overlap) for table in prices)
                dearest_s, read = np.zeros(count), [labels[reader] for reader in readers]
                for label in range(len(classes)):
                    here = np.array([one == label for one in read]).reshape(len(read), count)
                    cost_s = np.where(here.any(axis=0), send[labels[number], label], 0.0)
                    dearest_s = np.maximum(dearest_s, cost_s) if self.problem.send_once else dearest_s + cost_s
                    cost_s, alone = take[labels[number], label], here.sum(axis=0) == 1
                    for reader, mine in zip(readers, here, strict=True):
                        apart_s[reader] += np.where(mine & alone, cost_s, 0.0)
                        taken_s[reader] = np.maximum(taken_s[reader], np.where(mine, cost_s, 0.0))
                    if label in (FIRST, SECOND):
                        busy_s[label] += np.where(here.any(axis=0), cost_s, 0.0)
                sent_s[number] += dearest_s
        taken_s = np.maximum(taken_s, apart_s)
        delay_s = _by_label(self._transfers.latency_s, classes)
        end_s, leave_s, came_s = np.zeros(labels.shape), np.zeros(labels.shape), np.full(count, inf)
        for number in range(len(ops)):
            stay_s, cross_s = np.zeros(count), np.zeros(count)
            for maker in makers[number]:
                same = labels[maker] == labels[number]
                stay_s = np.maximum(stay_s, np.where(same, end_s[maker], 0.0))
                arrives_s = leave_s[maker] + delay_s[labels[maker], labels[number]]
                cross_s = np.maximum(cross_s, np.where(same, 0.0, arrives_s))
            earlier = sorted(before[number] - {number})
            source = on[SECOND][number] & ~on[SECOND][earlier].any(axis=0)
            came_s = np.where(source, np.minimum(came_s, cross_s), came_s)
            end_s[number] = np.maximum(stay_s, cross_s + taken_s[number]) + work_s[number]
            first_s = (work_s + sent_s)[[*earlier, number]] * on[FIRST][[*earlier, number]]
            leave_s[number] = np.maximum(end_s[number] + sent_s[number], np.where(on[FIRST][number], first_s.sum(axis=0), 0.0))
        busy = [own_s + (sent_s * here).sum(axis=0) for own_s, here in zip(busy_s, on, strict=True)]
        if labels[-1, 0] == FIRST:
            return np.asarray(np.maximum(end_s[-1], busy[FIRST]))
        return np.asarray(np.maximum(np.maximum(end_s[-1], busy[FIRST] + work_s[-1]), came_s + busy[SECOND]))


def _by_label(table: Floats, classes: Sequence[Sequence[int]]) -> Floats:
    """A table of classes as one of labels: the least between their classes, and nothing from a label to itself."""
    found = np.array([[table[np.ix_(source, target)].min(initial=inf) for target in classes] for source in classes])
    np.fill_diagonal(found, 0.0)
    return found

"""Choices of backends: problems for planners, and the backends on which the blocks of an answer run.

Planners put ops on devices and know no backends. They are asked with each op at its cheapest backend, which bounds every
mixture of backends, and with one backend on each device. Each block of an answer then gets the backends that take it the
least time; several of them on one device are stages of their own.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from autosplit.costs.cost import streamed
from autosplit.costs.judge import Judged, judge
from autosplit.costs.problem import HOST, Block, Floats, Problem
from autosplit.planning.predicting import counts_stages, grouped, problem_on, threads_on
from autosplit.planning.question import Question
from autosplit.values.constraints import Constraints, Demands
from autosplit.values.samples import Setting

MAX_CHOICES, MAX_PROVING = 9, 27
"""A choice gives each device one backend. The planner is asked about at most ``MAX_CHOICES`` choices; if there are at most
``MAX_PROVING``, it is asked about all of them, which proves the best plan."""


LEAST_GAIN = 0.01
"""Least share of the time of a block that each further stage in it must save. Op times are first guesses, so the least of several
is too low. Without a margin, equally fast backends would take turns op by op, and each turn is a stage with a hand-over."""


@dataclass(frozen=True)
class Backends:
    """A question as numbers, for one layout of its machine: a device of the problem for each backend on each device.

    Attributes:
        question: the question; the devices of its machine have no core in common.
        problem: a device for each setting; settings of one device share its processor. It judges plans.
        settings: the setting of each device of ``problem``.
        groups: the settings of each device of the machine, by number.
        num_choices: how many ways there are to give each device one of the backends that were asked for.
    """

    question: Question
    problem: Problem
    settings: tuple[Setting, ...]
    groups: tuple[tuple[int, ...], ...]
    num_choices: int

    @property
    def mixed(self) -> bool:
        """Whether several backends may run stages on one device."""
        return may_mix(self.question.constraints)

    @property
    def alone(self) -> bool:
        """Whether every device has one stage at most, unless no such plan exists."""
        constraints, num_devices = self.question.constraints, len(self.groups)
        quick = constraints.objective == "latency" and constraints.num_stages is None  # such plans may share devices
        return not (self.mixed or quick or constraints.reuse or (constraints.num_stages or 0) > num_devices)

    @property
    def devices(self) -> list[str]:
        """Names of the devices, in the order of ``groups``."""
        return list(dict.fromkeys(setting.device for setting in self.settings))

    def relaxed(self) -> tuple[Problem, Demands]:
        """A problem and demands that bound all plans: each op at the cheapest backend of its device.

        Several stages of a plan may be one block there, which may be shorter than each of them or send later.
        """
        there = [self.settings[k].backend for group in self.groups for k in group]
        loose = replace(self._replicated(there), min_stage_s=0.0)
        problem = grouped(self.problem, self.groups, self.devices).with_streams(self.question.streaming_s)
        return problem, replace(loose, max_latency_s=inf) if self.mixed else loose

    def with_one_each(self, choice: Mapping[str, str]) -> tuple[Problem, Demands]:
        """The problem and demands with one backend on each device. Ops that it refuses go to others that may run there."""
        chosen = [setting.backend == choice[setting.device] for setting in self.settings]
        groups = [sorted(group, key=lambda k: not chosen[k])[: None if self.mixed else 1] for group in self.groups]
        problem = grouped(self.problem, groups, self.devices, first=True).with_streams(self.question.streaming_s)
        return problem, self._replicated(choice.values())

    def _replicated(self, backends: Iterable[str]) -> Constraints:
        """The demands, with at most as many replicas as devices that have a backend in common."""
        most = max(Counter(backends).values())
        constraints = self.question.constraints
        return replace(constraints, max_replicas=min(constraints.max_replicas, most))

    def judge(self, blocks: Sequence[Block]) -> Judged:
        """The loads, latency and faults of blocks of ``problem``. Only the planner decides whether stages share a device."""
        demands = replace(self.question.constraints, reuse=True)
        return judge(self.problem, demands, blocks, self.question.num_parts)

    def every_chain(self) -> Iterator[list[Block]]:
        """Every row of blocks of ``problem`` that are runs of ops in graph order, on devices of their own, replicas included.

        Each block has one backend.
        """
        num_ops, home = self.problem.num_ops, {k: device for device, group in enumerate(self.groups) for k in group}
        most = min(self.question.constraints.max_replicas, len(self.groups))
        places = [
            row
            for backend in dict.fromkeys(setting.backend for setting in self.settings)
            for width in range(1, most + 1)
            for row in combinations([k for k, setting in enumerate(self.settings) if setting.backend == backend], width)
        ]

        def rest(start: int, used: frozenset[int]) -> Iterator[list[Block]]:
            for row in places:
                taken = {home[k] for k in row}
                if not used & taken:
                    yield [Block(tuple(range(start, num_ops)), row)]
                    for end in range(start + 1, num_ops):
                        yield from ([Block(tuple(range(start, end)), row), *more] for more in rest(end, used | taken))

        return rest(0, frozenset())

    def rows(self, blocks: Sequence[Block]) -> list[list[Block]]:
        """The blocks of an answer as blocks of ``problem``: with one backend for each, and with the cheapest mixtures."""
        ways = [self._ways(block) for block in blocks]
        if not all(ways):
            return []
        rows = [[part for way in ways for part in way[end]] for end in (0, -1)]
        if self.question.streaming_s:
            rows = [streamed(self.problem, row) for row in rows]
        return rows if rows[0] != rows[1] else rows[:1]

    def _ways(self, block: Block) -> list[list[Block]]:
        """The block on its cheapest backend, and on several if each change of backend saves ``LEAST_GAIN`` of its time.

        The list is empty if no backend runs on all devices of the block.
        """
        found = [{self.settings[k].backend: k for k in self.groups[device]} for device in block.devices]
        shared = [backend for backend in found[0] if all(backend in there for there in found)]
        if not shared:
            return []
        places = [tuple(there[backend] for there in found) for backend in shared]
        ops = sorted(block.ops)
        compute_s = np.stack([self.problem.compute_s[np.ix_(ops, row)] for row in places], axis=1)
        able = [k for k in range(len(shared)) if self.mixed or np.isfinite(compute_s[:, k]).all()]
        whole = [k for k in able if shared[k] in self.question.backends] or able  # the others run only ops that these refuse
        if not whole or np.isinf(compute_s.max(axis=2)).all(axis=1).any():
            return []
        costs = _Costs(compute_s, *self._moves(ops, places))
        usual = np.where(np.isinf(costs.mean_s), costs.mean_s.argmin(axis=1)[:, None], np.arange(len(shared)))
        best = min((usual[:, k] for k in whole), key=costs.of)
        ways = [self._parts(ops, best, places)]
        if self.mixed:
            labels = costs.cheapest(LEAST_GAIN * costs.of(best))
            if costs.of(labels) < costs.of(best):
                ways.append(self._parts(ops, labels, places))
        return ways

    def _moves(self, ops: Sequence[int], places: Sequence[Sequence[int]]) -> tuple[Floats, Floats]:
        """Seconds for values to enter the block and to pass each op.

        Args:
            places: for each backend its setting on each device of the block.
        Returns: arrays of shape (num_places, num_devices) and (num_ops, num_places, num_devices).
        """
        position = {op: number for number, op in enumerate(ops)}
        entering_bytes, counts, passing_bytes = 0.0, np.zeros(len(ops)), np.zeros(len(ops))
        for net in self.problem.nets:
            inside = [position[op] for op in net.consumers if op in position]
            if inside and net.producer in position:
                counts[position[net.producer] : max(inside)] += 1
                passing_bytes[position[net.producer] : max(inside)] += net.num_bytes
            elif inside and net.producer != HOST:
                entering_bytes += net.num_bytes
        t, here = self.problem.transfers, np.array(places)
        fixed_s = t.send_s[here, here] + t.receive_s[here, here]
        per_byte = t.send_s_per_byte[here, here] + t.receive_s_per_byte[here, here]
        passing_s = np.multiply.outer(counts, fixed_s) + np.multiply.outer(passing_bytes, per_byte)
        return entering_bytes * t.receive_s_per_byte[here, here], passing_s

    def _parts(self, ops: Sequence[int], labels: NDArray[np.int64], places: Sequence[tuple[int, ...]]) -> list[Block]:
        """The ops as one block for each run of ops on one backend."""
        label = {self.problem.ops[op]: str(k) for op, k in zip(ops, labels.tolist(), strict=True)}
        graph = self.question.graph
        runs = graph.runs(label, label)
        return [Block(tuple(graph.index[name] for name in run), places[int(label[run[0]])]) for run in runs]


@dataclass(frozen=True)
class _Costs:
    """The seconds of a block of ops in a row on the devices that run it, for every backend.

    Attributes:
        compute_s: seconds of each op, shape (num_ops, num_backends, num_devices).
        enter_s: seconds for values to enter the block, shape (num_backends, num_devices).
        change_s: seconds for the values that pass an op if the next op is on this backend and this one is not; the shape of
            ``compute_s``.
    """

    compute_s: Floats
    enter_s: Floats
    change_s: Floats

    @property
    def mean_s(self) -> Floats:
        """Seconds of each op on each backend, the mean over the devices, shape (num_ops, num_backends)."""
        return np.asarray(self.compute_s.mean(axis=2))

    def of(self, labels: NDArray[np.int64]) -> float:
        """Seconds of the slowest device with each op on the backend that its label names."""
        changes = np.flatnonzero(labels[1:] != labels[:-1])
        taken_s = self.compute_s[np.arange(len(labels)), labels].sum(axis=0) + self.enter_s[labels[0]]
        return float((taken_s + self.change_s[changes, labels[changes + 1]].sum(axis=0)).max())

    def cheapest(self, margin_s: float) -> NDArray[np.int64]:
        """The labels with the least seconds on the mean device, where each change costs ``margin_s`` more.

        They are a shortest path over the ops (Viterbi, 1967).
        """
        compute_s, change_s = self.mean_s, self.change_s.mean(axis=2) + margin_s
        num_ops, num_labels = compute_s.shape
        came = np.zeros((num_ops, num_labels), dtype=np.int64)
        best_s = self.enter_s.mean(axis=1) + compute_s[0]
        for op in range(1, num_ops):
            change = int(best_s.argmin())
            stays = best_s <= best_s[change] + change_s[op - 1]
            came[op] = np.where(stays, np.arange(num_labels), change)
            best_s = np.minimum(best_s, best_s[change] + change_s[op - 1]) + compute_s[op]
        labels = np.zeros(num_ops, dtype=np.int64)
        labels[-1] = best_s.argmin()
        for op in range(num_ops - 1, 0, -1):
            labels[op - 1] = came[op, labels[op]]
        return labels


def may_mix(constraints: Constraints) -> bool:
    """Whether the demands allow stages of several backends on one device."""
    return not counts_stages(constraints) and constraints.reuse is not False


def backends_of(question: Question) -> Backends:
    """The backends that were measured on a machine. Those that were not asked for run only ops that these refuse.

    Raises: ProfileError: a device has no measurement with any backend that was asked for.
    """
    machine, profile, backends = question.machine, question.profile, question.backends
    threads = {device.name: threads_on(machine, device.name, question.max_threads) for device in machine.devices}
    wanted = [Setting(name, backend, count) for name, count in threads.items() for backend in dict.fromkeys(backends)]
    settings = [setting for setting in wanted if setting in profile.measured]
    for name in threads.keys() - {setting.device for setting in settings}:
        profile.setting(name, backends[0], threads[name])
    num_choices = prod(Counter(setting.device for setting in settings).values())
    others = [
        s for s in profile.measured if may_mix(question.constraints) and s.threads == threads.get(s.device) and s not in settings
    ]
    problem = problem_on(question.graph, machine, profile, question.constraints, [*settings, *others])
    compute_s = problem.compute_s.copy()
    for number, setting in enumerate(others, start=len(settings)):
        rivals = [k for k, other in enumerate(settings) if other.device == setting.device]
        compute_s[np.isfinite(compute_s[:, rivals]).any(axis=1), number] = inf
    settings += others
    groups = tuple(tuple(k for k, setting in enumerate(settings) if setting.device == name) for name in threads)
    problem = replace(problem, compute_s=compute_s)
    return Backends(question, problem, tuple(settings), groups, num_choices)


def backend_subsets(question: Question) -> list[Question]:
    """The question for each subset of its backends of which every device was measured with one or more; the smallest first."""
    backends = question.backends
    measured = {(setting.device, setting.backend) for setting in question.profile.measured}
    parts = [part for count in range(1, len(backends) + 1) for part in combinations(dict.fromkeys(backends), count)]
    able = [part for part in parts if all(any((d.name, b) in measured for b in part) for d in question.machine.devices)]
    return [replace(question, backends=part) for part in able]


def backend_choices(question: Question, most: int = MAX_CHOICES) -> list[Mapping[str, str]]:
    """Choices of device name to backend: first one backend for all devices, then mixtures if they are few.

    If there are more than ``most``, all devices of a kind get one backend, or each device its first one. A device gets no backend
    that was not measured on it.
    """
    machine, backends = question.machine, question.backends
    names = [device.name for device in machine.devices]
    kinds = [device.kind for device in machine.devices]
    parts = names if len(backends) ** len(names) <= most else list(dict.fromkeys(kinds))
    same = [dict.fromkeys(parts, backend) for backend in backends]
    mixed = [dict(zip(parts, choice, strict=True)) for choice in product(backends, repeat=len(parts)) if len(set(choice)) > 1]
    choices = [{name: by.get(name) or by[kind] for name, kind in zip(names, kinds, strict=True)} for by in [*same, *mixed]]
    measured = {(setting.device, setting.backend): None for setting in question.profile.measured}
    first = {name: next((b for b in backends if (name, b) in measured), backends[0]) for name in names}
    return [choice for choice in choices if choice.items() <= measured.keys()] or [first]

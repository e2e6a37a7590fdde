"""Every backend has two or three turns that lie apart, for a slow time of the machine may last as long as one of them.

In a turn all devices time the same model at once, since busy neighbours are the truth for pipelines; in the first one of each
kind then times it alone. The cores of a virtual machine lose up to half of their speed for seconds at a time to others on its
host, and the kernel of the guest sees nothing of that: of turns that differ much the faster one tells what a device can do.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import psutil

from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.limits import memory_limit_bytes
from autosplit.errors import BackendError
from autosplit.measuring.bench import WorkerBench
from autosplit.measuring.canary import CANARY_LIMIT, drift
from autosplit.measuring.timing import Rounds, Timed
from autosplit.measuring.worker import Prepare, Prepared, Resume, TimeOps, TimeWhole
from autosplit.values.machine import Machine
from autosplit.values.samples import Measured, Precision, Samples, Setting

TURN_S, ALONE_S, CUT_S = 0.8, 0.2, 0.2
"""What timing takes in a turn, all devices at once and each kind alone, and of a cut; a second turn has no passes op by op."""

APART = 1.15
"""Turns whose medians are further apart than this did not see the same machine."""

HELD = 2
"""How many times the weights a worker may hold for each backend that it has loaded."""


@dataclass(frozen=True)
class Turns:
    """The turns of one measurement.

    Attributes:
        bench: the running workers.
        machine: their devices.
        precision: what the backends compute in.
        weight_bytes: weights of the model, once for each setting that is measured.
    """

    bench: WorkerBench
    machine: Machine
    precision: Precision
    weight_bytes: int

    @cached_property
    def keeping(self) -> bool:
        """Whether the workers keep what they load for its second turn; else they load it again."""
        return HELD * self.weight_bytes < min(psutil.virtual_memory().available, memory_limit_bytes()) / 2

    def prepares(self, group: Sequence[Setting], weights: Iterable[Setting] = ()) -> dict[str, Prepare]:
        """What makes each device ready for its setting; ``weights``: the settings that want eager's shares of the ops."""
        wanted = set(weights)
        return {s.device: Prepare(s.backend, s.threads, s in wanted, self.precision, self.keeping) for s in group}

    def first(
        self, group: Sequence[Setting], rounds: Rounds, weights: Iterable[Setting], early: Mapping[str, Prepared]
    ) -> tuple[Mapping[str, Prepared], Mapping[str, Timed], Mapping[str, Samples]]:
        """One setting on each device, whole passes and passes op by op in turn.

        Args:
            group: the settings.
            rounds: of all at once.
            weights: the settings that want eager's shares of the ops.
            early: the answers of devices that are ready already.
        Returns: by device what it answered when it was ready, and when all timed at once; and of one of each kind, alone.
        Raises: BackendError: a worker cannot load it, or the numbers are wrong.
        """
        prepared = early or self.bench.all(self.prepares(group, weights))
        _require_sound([prepared[setting.device] for setting in group])
        timed = self.bench.all({setting.device: TimeOps(rounds) for setting in group})
        return prepared, timed, self._alone(group, rounds)

    def another(self, measured: Mapping[Setting, Measured], rounds: Rounds) -> dict[Setting, Measured]:
        """The same settings some time later, whole passes only, for CPUs: an accelerator does not wait for its time.

        Raises: BackendError: a worker cannot load it again, or the numbers are wrong now.
        """
        group = [setting for setting in measured if not is_accelerator(self.machine[setting.device])]
        if self.keeping:
            self.bench.all({setting.device: Resume(setting.backend, setting.threads) for setting in group})
        else:
            _require_sound(self.bench.all(self.prepares(group)).values())
        fewer = replace(rounds, seconds=rounds.seconds / 2)  # as long as the whole passes among those of the first turn
        busy = self.bench.all({setting.device: TimeWhole(fewer) for setting in group})
        return {setting: _with_turn(measured[setting], sampled(busy[setting.device])) for setting in group}

    def cuts(self, group: Sequence[Setting], rounds: Rounds) -> dict[str, float]:
        """CPU device to what a cut costs there (``time_cuts``)."""
        cores = [setting for setting in group if not is_accelerator(self.machine[setting.device])]
        return self.bench.time_cuts(cores, self.precision, Rounds(min(CUT_S, rounds.seconds), least=3))

    def _alone(self, group: Sequence[Setting], rounds: Rounds) -> dict[str, Samples]:
        """Seconds of the whole on one device of each kind while all others are idle; none where there is but one."""
        few = TimeWhole(Rounds(min(ALONE_S, rounds.seconds), least=2, most=20))
        lone = self._one_of_each(group) if len(group) > 1 else []
        return {setting.device: sampled(self.bench.all({setting.device: few})[setting.device]) for setting in lone}

    def _one_of_each(self, group: Sequence[Setting]) -> list[Setting]:
        """The settings to time alone: a device that is like an earlier one would tell nothing new, and takes turns with all."""
        chosen: list[Setting] = []
        for setting in group:
            device, canary_s = self.machine[setting.device], self.bench.canaries[setting.device]
            same = (
                len(device.cores) == len(self.machine[other.device].cores)
                and setting.threads == other.threads
                and abs(drift(canary_s, self.bench.canaries[other.device])) <= CANARY_LIMIT
                for other in chosen
                if not is_accelerator(device) and not is_accelerator(self.machine[other.device])
            )
            if not any(same):
                chosen.append(setting)
        return chosen


def seems_slowed(measured: Measured) -> bool:
    """Whether devices took longer together than one alone: their memory is the limit, or a slow moment met all turns so far."""
    whole, lone = measured.whole, measured.alone
    return whole is not None and lone is not None and whole.median_s > APART * lone.median_s


def _with_turn(measured: Measured, turn: Samples) -> Measured:
    """What was measured, with one more turn of the whole; no device is slower alone than beside busy ones."""
    whole = turn if measured.whole is None else together(measured.whole, turn)
    lone = measured.alone
    return replace(measured, whole=whole, alone=whole if lone is not None and lone.median_s > whole.median_s else lone)


def together(one: Samples, two: Samples) -> Samples:
    """The samples of two turns; only those of the faster one where they did not see the same machine.

    >>> together(Samples((1.0, 1.2)), Samples((1.1,))).samples_s
    (1.0, 1.2, 1.1)
    >>> together(Samples((1.9, 1.8)), Samples((1.1,))).samples_s
    (1.1,)
    """
    faster, slower = sorted((one, two), key=lambda turn: turn.median_s)
    return faster if slower.median_s > APART * faster.median_s else Samples((*one.samples_s, *two.samples_s))


def sampled(seconds: Iterable[float]) -> Samples:
    """Samples to five significant digits: a clock gives no more, and the files are read by people."""
    return Samples(tuple(float(f"{value:.5g}") for value in seconds))


def _require_sound(prepared: Iterable[Prepared]) -> None:
    for answer in prepared:
        if answer.fault:
            raise BackendError(answer.fault)

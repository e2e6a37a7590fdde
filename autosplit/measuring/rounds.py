"""Measurement rounds: all devices time the same model at once, since busy neighbours are the normal case in a pipeline.

Every setting has two or three rounds that lie apart, because a slow time of the machine may last as long as one round: cores
of a virtual machine lose up to half of their speed for seconds to its neighbours, unseen by the guest's kernel. If rounds
differ much, the faster one shows the speed of the device. After the first round one device of each kind is timed alone.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.limits import memory_limit_bytes
from autosplit.errors import BackendError
from autosplit.measuring.attribution import WAITED_LIMIT, measured_of, rounded
from autosplit.measuring.calibration import DRIFT_LIMIT, drift
from autosplit.measuring.cut_cost import loses_at_cuts
from autosplit.measuring.measuring_worker import Calibrate, Prepare, Prepared, Time, TimeCut
from autosplit.measuring.model_files import BackendFiles, ModelFiles, Subgraph, merged
from autosplit.measuring.stage_timer import PassBudget
from autosplit.measuring.worker_pool import WorkerPool
from autosplit.values.machine import Machine
from autosplit.values.samples import Measured, Provenance, Samples, Setting

ROUND_S, ALONE_S, CUT_S = 0.8, 0.2, 0.2
"""Seconds of timing in a first round: of all devices at once, of each kind alone, and of the cut."""

SLOW_RATIO = 1.15
"""Rounds whose medians differ by more than this factor ran at different speeds of the machine."""

MEMORY_FACTOR = 2
"""Bytes that a worker may hold for a loaded stage, as a multiple of its weights."""

CALIBRATION_S, ALL_CALIBRATIONS_S = 0.6, 5.0
"""Seconds for the calibration kernel on one device, and at most on all: later runs are compared with its fastest time."""


@dataclass
class MeasurementRounds:
    """The rounds of one measurement.

    Attributes:
        pool: a worker on every device.
        machine: the devices.
        files: the model as the workers load it.
        stamps: setting to the provenance of a measurement made now.
        round_s: seconds of one round.
        keep: whether workers keep a stage for its later rounds; otherwise they load it again.
        backends: backend name to what it is timed on.
        calibration_s: device name to seconds of the calibration kernel.
        notes: remarks on what was measured.
        left_out: the backends that failed, of which no measurement may be used.
    """

    pool: WorkerPool
    machine: Machine
    files: ModelFiles
    stamps: Mapping[Setting, Provenance]
    round_s: float
    keep: bool
    backends: dict[str, BackendFiles] = field(default_factory=dict)
    calibration_s: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    left_out: set[str] = field(default_factory=set)

    def prepare(self, backend: str, first: Sequence[Setting]) -> None:
        """Write the files of a backend; workers warm up in eager meanwhile, if ``first``, the first group, is of eager."""
        try:
            self.backends[backend] = self.files.prepare(backend)
        except BackendError as failure:
            self._leave_out(backend, failure)
        else:
            if backend == "eager" == first[0].backend:
                self.pool.send({one.device: self._command(one, self.files.folder) for one in first})

    def calibrate(self) -> None:
        """Run the calibration kernel on one device after the other: later runs repeat it with idle neighbours too."""
        self.pool.answers()
        seconds = min(CALIBRATION_S, ALL_CALIBRATIONS_S / len(self.machine.devices))
        for device in self.machine.devices:
            self.calibration_s |= self.pool.ask({device.name: Calibrate(seconds)})

    def first(self, group: Sequence[Setting], eager_s: Mapping[Setting, Mapping[str, float]]) -> dict[Setting, Measured]:
        """The first round of one setting on each device; empty if the backend fails or gives wrong numbers.

        A backend that fails on the whole model is tried on subgraphs.

        Args:
            group: settings of one backend.
            eager_s: setting to eager's seconds of every op there, where they are known; the workers time the others.
        """
        backend = group[0].backend
        if backend not in self.backends:
            return {}
        try:
            try:
                return self._first(group, eager_s)
            except BackendError as failure:
                if self.backends[backend].refused:
                    raise
                self.backends[backend] = self.files.divide(backend, failure)
                return self._first(group, eager_s)
        except BackendError as failure:
            self._leave_out(backend, failure)
            return {}

    def another(self, known: Mapping[Setting, Measured], group: Sequence[Setting]) -> dict[Setting, Measured]:
        """One more round of whole passes on CPU devices; an accelerator does not lose its time to neighbours.

        None is made of a backend that was left out or timed on subgraphs.

        Raises: BackendError: a worker cannot load the stage again, or its numbers are wrong now.
        """
        files = self.backends.get(group[0].backend)
        if files is None or files.refused:
            return {}
        group = [setting for setting in group if not is_accelerator(self.machine[setting.device])]
        self._prepare(group, files.subgraphs[0].folder)
        half = PassBudget(self.round_s / 2, least=2, least_long=1)  # the whole passes are half of the passes of a first round
        timed = self.pool.ask({setting.device: Time(half, wake=self.keep) for setting in group})
        return {setting: _with_round(known[setting], rounded(timed[setting.device].whole_s)) for setting in group}

    def _leave_out(self, backend: str, failure: BackendError) -> None:
        """Note why a backend refuses the model or gives wrong numbers; raise it if there is no other backend."""
        if len({setting.backend for setting in self.stamps}) == 1:
            raise failure
        self.backends.pop(backend, None)
        self.left_out.add(backend)
        self.notes.append(f"{backend} is left out: {failure}")

    def _first(self, group: Sequence[Setting], eager_s: Mapping[Setting, Mapping[str, float]]) -> dict[Setting, Measured]:
        backend = group[0].backend
        files = self.backends[backend]
        found = [self._on_subgraph(group, subgraph, len(files.subgraphs), eager_s) for subgraph in files.subgraphs]
        cut_s = self._cut_s_per_byte(group, files)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        measured = {}
        waited = {setting: max(part[setting][1] for part in found) for setting in group}
        if disturbed := {setting.device: share for setting, share in waited.items() if share > WAITED_LIMIT}:
            self.notes.append(
                f"{backend} on {', '.join(disturbed)}: other processes had the core for up to {max(disturbed.values()):.0%} of "
                "the time; measure again (--remeasure) when it is quiet"
            )
        for setting in group:
            share = waited[setting]
            note = f"other processes had the core for {share:.0%} of the time" if share > WAITED_LIMIT else ""
            stamp = replace(self.stamps[setting], date=date, calibration_s=self.calibration_s[setting.device], note=note)
            whole = merged([part[setting][0] for part in found], files.refused)
            measured[setting] = replace(whole, provenance=stamp, cut_s_per_byte=cut_s.get(setting.device))
        uncut = [one.device for one in group if one.device not in cut_s and not is_accelerator(self.machine[one.device])]
        if uncut and self.files.cut is not None and loses_at_cuts(backend) and not files.refused:
            missing = f"{backend} on {', '.join(uncut)}: the cost of a cut could not be timed"
            self.notes.append(f"{missing}, so plans with several stages there may be slower than predicted")
        return measured

    def _on_subgraph(
        self, group: Sequence[Setting], subgraph: Subgraph, num_subgraphs: int, eager_s: Mapping[Setting, Mapping[str, float]]
    ) -> dict[Setting, tuple[Measured, float]]:
        """The measurement of some of the ops in each setting, and the share of the time in which others had the core."""
        budget = PassBudget(self.round_s / num_subgraphs, least=2)
        unknown = [one for one in group if one.backend != "eager" and one not in eager_s]
        prepared = self._prepare(group, subgraph.folder, unknown)
        timed = self.pool.ask({setting.device: Time(budget, ops=True, wake=True) for setting in group})
        alone = self._alone(group, budget)
        found = {}
        for setting in group:
            ready, passes = prepared[setting.device], timed[setting.device]
            op_s = eager_s.get(setting, ready.eager_s)
            measured = measured_of(subgraph.graph, setting.backend, passes, subgraph.names, op_s)
            measured = replace(measured, alone=alone.get(setting.device), error=float(f"{ready.error:.3g}"))
            found[setting] = measured, passes.waited
        return found

    def _prepare(self, group: Sequence[Setting], folder: Path, eager: Collection[Setting] = ()) -> dict[str, Prepared]:
        """Load a stage in each setting; those in ``eager`` time its ops in eager too. Raises: BackendError: as ``first``."""
        commands = {one.device: self._command(one, folder, one in eager) for one in group}
        prepared: dict[str, Prepared] = self.pool.ask(commands)
        for answer in prepared.values():
            if answer.fault:
                raise BackendError(answer.fault)
        return prepared

    def _command(self, setting: Setting, folder: Path, eager: bool = False) -> Prepare:
        return Prepare(folder, setting.backend, setting.threads, self.files.precision, eager, self.keep)

    def _cut_s_per_byte(self, group: Sequence[Setting], files: BackendFiles) -> dict[str, float]:
        """CPU device to the seconds that a cut costs there for each byte that crosses it; only where it could be timed."""
        if self.files.cut is None or files.cut is None:
            return {}
        budget = PassBudget(min(CUT_S, self.round_s), least=3)
        commands = {
            one.device: TimeCut(files.cut, one.backend, one.threads, self.files.precision, budget)
            for one in group
            if not is_accelerator(self.machine[one.device])
        }
        extra_s = self.pool.ask(commands)
        num_bytes = self.files.cut.num_bytes
        return {device: float(f"{seconds / num_bytes:.3g}") for device, seconds in extra_s.items() if seconds is not None}

    def _alone(self, group: Sequence[Setting], budget: PassBudget) -> dict[str, Samples]:
        """Whole passes on one device of each kind while all others are idle; none where there is but one device."""
        few = Time(PassBudget(min(ALONE_S, budget.seconds), least=2, most=20, least_long=1))
        chosen = self._one_of_each(group) if len(group) > 1 else []
        return {one.device: rounded(self.pool.ask({one.device: few})[one.device].whole_s) for one in chosen}

    def _one_of_each(self, group: Sequence[Setting]) -> list[Setting]:
        """One setting for each kind of device: CPU devices with as many cores and threads and the same speed are one kind."""
        chosen: list[Setting] = []
        for setting in group:
            device, seconds = self.machine[setting.device], self.calibration_s[setting.device]
            same = (
                len(device.cores) == len(self.machine[other.device].cores)
                and setting.threads == other.threads
                and abs(drift(seconds, self.calibration_s[other.device])) <= DRIFT_LIMIT
                for other in chosen
                if not is_accelerator(device) and not is_accelerator(self.machine[other.device])
            )
            if not any(same):
                chosen.append(setting)
        return chosen


def room_to_keep(weight_bytes: int) -> bool:
    """Whether memory holds every prepared stage until its last round; ``weight_bytes`` is the sum over all settings."""
    return MEMORY_FACTOR * weight_bytes < min(psutil.virtual_memory().available, memory_limit_bytes()) / 2


def seems_slowed(measured: Measured) -> bool:
    """Whether devices took longer together than one alone: memory is the limit, or all rounds so far met a slow time."""
    whole, alone = measured.whole, measured.alone
    return whole is not None and alone is not None and whole.median_s > SLOW_RATIO * alone.median_s


def _with_round(measured: Measured, samples: Samples) -> Measured:
    """The measurement with one more round of the whole; no device is slower alone than beside busy neighbours."""
    whole = samples if measured.whole is None else together(measured.whole, samples)
    alone = measured.alone
    return replace(measured, whole=whole, alone=whole if alone is not None and alone.median_s > whole.median_s else alone)


def together(one: Samples, two: Samples) -> Samples:
    """The samples of two rounds; only those of the faster one if they ran at different speeds of the machine.

    >>> together(Samples((1.0, 1.2)), Samples((1.1,))).samples_s
    (1.0, 1.2, 1.1)
    >>> together(Samples((1.9, 1.8)), Samples((1.1,))).samples_s
    (1.1,)
    """
    faster, slower = sorted((one, two), key=lambda samples: samples.median_s)
    return faster if slower.median_s > SLOW_RATIO * faster.median_s else Samples((*one.samples_s, *two.samples_s))

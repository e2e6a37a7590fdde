"""Rounds of timing: all devices time the same model at once, since busy neighbours are the normal case in a pipeline.

Every setting has two or three rounds that lie apart, because a slow time of the machine may last as long as one round: cores
of a virtual machine lose up to half of their speed for seconds to its neighbours, unseen by the guest's kernel. If rounds
differ much, the faster one shows the speed of the device. In each round one device of each kind is timed alone, too.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.limits import memory_limit_bytes
from autosplit.measuring.attribution import WAITED_LIMIT, measured_of, rounded
from autosplit.measuring.calibration import DRIFT_LIMIT, drift
from autosplit.measuring.cut_cost import loses_at_cuts
from autosplit.measuring.measuring_worker import MeasuringWorker, Prepared, Workers
from autosplit.measuring.model_files import BackendFiles, ModelFiles, Subgraph, merged
from autosplit.measuring.stage_timer import PassBudget
from autosplit.values.machine import Machine
from autosplit.values.samples import SLOW_RATIO, Measured, Provenance, Samples, Setting

ROUND_S, ALONE_S, CUT_S = 0.8, 0.1, 0.2
"""Seconds of timing: in a first round of all devices at once, in each round of each kind alone, and of the cut."""

MEMORY_FACTOR = 2
"""Bytes that a worker may hold for a loaded stage, as a multiple of its weights."""

EagerSeconds = Mapping[Setting, Mapping[str, float]]
"""Setting of a backend to eager's seconds of every op there."""


@dataclass(frozen=True)
class Rounds:
    """Times groups of settings: one backend on several devices at once.

    Attributes:
        stamps: setting to the provenance of a measurement made now.
        calibration_s: device name to seconds of the calibration kernel.
        keep: whether workers keep a stage for its later rounds; otherwise they load it again.
    """

    workers: Workers
    machine: Machine
    model: ModelFiles
    stamps: Mapping[Setting, Provenance]
    calibration_s: Mapping[str, float]
    round_s: float
    keep: bool
    notes: list[str] = field(default_factory=list)

    def first(self, group: Sequence[Setting], files: BackendFiles, eager_s: EagerSeconds) -> dict[Setting, Measured]:
        """The first round of each setting. Workers time the ops in eager where ``eager_s`` lacks them.

        Raises: DeviceFaults: the backend fails or gives wrong numbers on some devices.
        """
        found = [self._on_subgraph(group, subgraph, len(files.subgraphs), eager_s) for subgraph in files.subgraphs]
        cut_s = self._cut_s_per_byte(group, files)
        date = datetime.now(UTC).isoformat(timespec="seconds")
        measured = {}
        waited = {setting: max(part[setting][1] for part in found) for setting in group}
        for setting, share in waited.items():
            note = f"other processes had the core for {share:.0%} of the time" if share > WAITED_LIMIT else ""
            stamp = replace(self.stamps[setting], date=date, calibration_s=self.calibration_s[setting.device], note=note)
            whole = merged([part[setting][0] for part in found], files.refused)
            measured[setting] = replace(whole, provenance=stamp, cut_s_per_byte=cut_s.get(setting.device))
        self._remark(group[0].backend, waited, [one.device for one in group if one.device not in cut_s], files)
        return measured

    def another(
        self, group: Sequence[Setting], files: BackendFiles, known: Mapping[Setting, Measured]
    ) -> dict[Setting, Measured]:
        """One more round of whole passes on CPU devices; an accelerator does not lose its time to neighbours.

        Raises: DeviceFaults: the backend fails on some devices now.
        """
        group = [setting for setting in group if not is_accelerator(self.machine[setting.device])]
        self._prepare(group, files.subgraphs[0].folder)
        # The whole passes are half of the passes of a first round, and devices that are ready start together.
        half = PassBudget(self.round_s / 2, least=2, overlap_s=self.round_s / 4, least_long=1)
        budgets = {setting.device: replace(half, earlier=known[setting].whole) for setting in group}
        timed = self.workers.call(MeasuringWorker.time, {name: (one, False, self.keep) for name, one in budgets.items()})
        alone = self._alone(group, half)
        return {one: _with_round(known[one], rounded(timed[one.device].whole_s), alone.get(one.device)) for one in group}

    def _remark(self, backend: str, waited: Mapping[Setting, float], uncut: Sequence[str], files: BackendFiles) -> None:
        """Note the reasons that make the measurements less certain."""
        if disturbed := {setting.device: share for setting, share in waited.items() if share > WAITED_LIMIT}:
            self.notes.append(
                f"{backend} on {', '.join(disturbed)}: other processes had the core for up to {max(disturbed.values()):.0%} of "
                "the time; measure again (--remeasure) when it is quiet"
            )
        uncut = [device for device in uncut if not is_accelerator(self.machine[device])]
        if uncut and self.model.cut is not None and loses_at_cuts(backend) and not files.refused:
            missing = f"{backend} on {', '.join(uncut)}: the cost of a cut could not be timed"
            self.notes.append(f"{missing}, so plans with several stages there may be slower than predicted")

    def prepare_arguments(self, setting: Setting, folder: Path, eager: bool = False) -> tuple[object, ...]:
        """Arguments of ``MeasuringWorker.prepare``."""
        return folder, setting.backend, setting.threads, self.model.precision, eager, self.keep

    def _on_subgraph(
        self, group: Sequence[Setting], subgraph: Subgraph, num_subgraphs: int, eager_s: EagerSeconds
    ) -> dict[Setting, tuple[Measured, float]]:
        """The measurement of some of the ops in each setting, and the share of the time in which others had the core."""
        budget = PassBudget(self.round_s / num_subgraphs, least=2)
        unknown = [one for one in group if one.backend != "eager" and one not in eager_s]
        prepared = self._prepare(group, subgraph.folder, unknown)
        timed = self.workers.call(MeasuringWorker.time, {setting.device: (budget, True, True) for setting in group})
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
        """Load a stage in each setting; those in ``eager`` time its ops in eager too."""
        arguments = {one.device: self.prepare_arguments(one, folder, one in eager) for one in group}
        return self.workers.call(MeasuringWorker.prepare, arguments)

    def _cut_s_per_byte(self, group: Sequence[Setting], files: BackendFiles) -> dict[str, float]:
        """CPU device to the seconds that a cut costs there for each byte that crosses it; only where it could be timed."""
        if self.model.cut is None or files.cut is None:
            return {}
        budget = PassBudget(min(CUT_S, self.round_s), least=3)
        arguments = {
            one.device: (files.cut, one.backend, one.threads, self.model.precision, budget)
            for one in group
            if not is_accelerator(self.machine[one.device])
        }
        extra_s = self.workers.call(MeasuringWorker.time_cut, arguments)
        num_bytes = self.model.cut.num_bytes
        return {device: float(f"{seconds / num_bytes:.3g}") for device, seconds in extra_s.items() if seconds is not None}

    def _alone(self, group: Sequence[Setting], budget: PassBudget) -> dict[str, Samples]:
        """Whole passes on one device of each kind while all others are idle; none where there is but one device."""
        few = PassBudget(min(ALONE_S, budget.seconds), least=2, most=20, overlap_s=0.0, least_long=1)
        chosen = self._one_of_each(group) if len(group) > 1 else []
        timed = [self.workers.call(MeasuringWorker.time, {one.device: (few,)}) for one in chosen]
        return {device: rounded(passes.whole_s) for one in timed for device, passes in one.items()}

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


def _with_round(measured: Measured, busy: Samples, alone: Samples | None) -> Measured:
    """The measurement with one more round of the whole; no device is slower alone than beside busy neighbours."""
    whole = busy if measured.whole is None else measured.whole.with_round(busy)
    if measured.alone is not None:
        alone = measured.alone if alone is None else measured.alone.with_round(alone)
    return replace(measured, whole=whole, alone=whole if alone is not None and alone.median_s > whole.median_s else alone)

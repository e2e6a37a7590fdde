"""The measurement of one model: which times are missing, the files of each backend, and what was measured so far."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property

from autosplit.backends.workspace import Workspace
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.calls import Call
from autosplit.errors import BackendError
from autosplit.measuring.cut_cost import typical_cut
from autosplit.measuring.measuring_worker import DeviceFaults, MeasuringWorker, Prepared
from autosplit.measuring.model_files import BackendFiles, ModelFiles
from autosplit.measuring.rounds import Rounds, seems_slowed
from autosplit.measuring.settings import groups_of, link_stamp, piece_bytes_of
from autosplit.measuring.store import Store
from autosplit.tracing.capturing import Traced
from autosplit.values.links import Link
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint, Measured, Provenance, Setting


@dataclass(eq=False)
class Measurement:
    """The measurement of one model: its profile so far, and the settings that are left out.

    Attributes:
        stamps: wanted setting to the provenance of a measurement made now.
        held: setting to its footprints in the store.
    """

    traced: Traced
    machine: Machine
    stamps: Mapping[Setting, Provenance]
    store: Store | None
    profile: Profile
    held: Mapping[Setting, Mapping[str, Footprint]]
    files: dict[str, BackendFiles] = field(default_factory=dict)
    left_out: dict[Setting, str] = field(default_factory=dict)

    @cached_property
    def piece_bytes(self) -> Mapping[str, int]:
        """Accelerator without room for the model to the bytes of weights that are measured there at once."""
        return piece_bytes_of(self.machine, self.traced.graph.weight_bytes)

    @cached_property
    def groups(self) -> list[list[Setting]]:
        """The settings that are timed at once; each group lacks a time at the beginning."""
        measured = self.profile.measured
        groups = [group for group in groups_of(self.machine, self.stamps) if any(one not in measured for one in group)]
        return [part for group in groups for part in self._by_room(group)]

    @property
    def held_bytes(self) -> int:
        """The bytes of weights of the model in all settings."""
        return self.traced.graph.weight_bytes * sum(map(len, self.groups))

    def save(self, workspace: Workspace) -> ModelFiles:
        """Save the model, and choose its typical cut."""
        cut = None if all(map(is_accelerator, self.machine.devices)) else typical_cut(self.traced.graph)
        return ModelFiles.save(self.traced, cut, self.profile.precision, workspace)

    def load(self, backend: str, rounds: Rounds, is_first: bool) -> dict[str, Call[Prepared]]:
        """Prepare the files of a backend, and begin to load them while others are prepared, if they may be."""
        group = next((group for group in self.groups if group[0].backend == backend), None)
        if group is None:
            return {}
        try:
            self.files[backend] = rounds.model.prepare(backend)
        except BackendError as failure:
            self._leave_out({setting: str(failure) for setting in self.stamps if setting.backend == backend})
        if not self._may_load(group, is_first and group is self.groups[0], rounds.keep):
            return {}
        arguments = {one.device: rounds.prepare_arguments(one, rounds.model.folder) for one in group}
        return rounds.workers.begin(MeasuringWorker.prepare, arguments)

    def time(self, group: Sequence[Setting], rounds: Rounds) -> None:
        """The first round of a group."""
        self._time(group, lambda some, files: self._first(rounds, some, files))

    def time_again(self, group: Sequence[Setting], rounds: Rounds) -> None:
        """One more round, unless the backend was timed on subgraphs."""
        if group[0].backend in self.files and not self.files[group[0].backend].refused:
            self._time(group, lambda some, files: rounds.another(some, files, self.profile.measured))

    def is_slowed(self, group: Sequence[Setting]) -> bool:
        """Whether one more round of a group may find the machine faster."""
        return any(one in self.profile.measured and seems_slowed(self.profile.measured[one]) for one in group)

    def _by_room(self, group: Sequence[Setting]) -> list[list[Setting]]:
        """The settings of a group on devices with room for the model, and each other one alone."""
        small = [[one] for one in group if one.device in self.piece_bytes]
        roomy = [one for one in group if one.device not in self.piece_bytes]
        return [roomy, *small] if roomy else small

    def _may_load(self, group: Sequence[Setting], is_first: bool, keep: bool) -> bool:
        """Whether a group may be loaded before its round: whole, for good, and without asking for times in eager."""
        files, backend = self.files.get(group[0].backend), group[0].backend
        stays = is_first or (keep and not any(is_accelerator(self.machine[one.device]) for one in group))
        whole = files is not None and not files.refused and group[0].device not in self.piece_bytes
        return stays and whole and (backend == "eager" or "eager" in self.files)

    def _time(self, group: Sequence[Setting], work: Callable[[Sequence[Setting], BackendFiles], dict[Setting, Measured]]) -> None:
        """Time a group of settings, without those where the backend fails."""
        backend = group[0].backend
        while group := [setting for setting in group if setting not in self.left_out]:
            try:
                self._keep(work(group, self.files[backend]))
                return
            except DeviceFaults as faults:
                self._leave_out(
                    {
                        setting: faults.by_device[setting.device]
                        for setting in self.stamps
                        if setting.backend == backend and setting.device in faults.by_device
                    }
                )

    def _first(self, rounds: Rounds, group: Sequence[Setting], files: BackendFiles) -> dict[Setting, Measured]:
        """The first round. A backend that fails on the whole model is tried on subgraphs, unless it crashes there.

        An accelerator without room for the model measures it in pieces that fit, as it will run it.
        """
        eager_s, device, model = _eager_s(self.profile, group), self.machine[group[0].device], rounds.model
        if device.name in self.piece_bytes and not files.refused:
            files = model.in_pieces(group[0].backend, device, self.piece_bytes[device.name])
            rounds.notes.append(
                f"{group[0].backend} on {device.name}: measured in {len(files.subgraphs)} pieces, since the model does not fit"
            )
        try:
            return rounds.first(group, files, eager_s)
        except DeviceFaults as faults:
            if files.refused or faults.lost:
                raise
            backend = group[0].backend
            try:
                self.files[backend] = model.divide(backend, faults)
            except BackendError:
                raise faults from None
            return rounds.first(group, self.files[backend], eager_s)

    def _leave_out(self, reasons: Mapping[Setting, str]) -> None:
        """Leave settings out, with their measurements. Raises: BackendError: no backend is left on cores, or on any device."""
        self.left_out |= reasons
        for setting, reason in reasons.items():
            if setting.device not in self.devices_left_out:
                continue
            if is_accelerator(self.machine[setting.device]) and len(self.devices_left_out) < len(self.machine.devices):
                continue
            tried = [other.backend for other in self.stamps if other.device == setting.device]
            if "eager" in tried:
                raise BackendError(reason)
            way_out = f"No other backend is asked for on '{setting.device}'; add eager to the backends"
            raise BackendError(f"{reason.removesuffix('.')}. {way_out}")

    @property
    def devices_left_out(self) -> set[str]:
        """The devices on which no backend is left."""
        return {setting.device for setting in self.stamps} - {one.device for one in self.stamps if one not in self.left_out}

    def _keep(self, measured: Mapping[Setting, Measured]) -> None:
        """Put measurements into the profile and the store, in place of earlier ones and their stages."""
        fresh = {
            setting: replace(one, footprints={**self.held.get(setting, {}), **one.footprints})
            for setting, one in measured.items()
        }
        stages = tuple(stage for stage in self.profile.stages if stage.setting not in fresh)
        self.profile = replace(self.profile, measured={**self.profile.measured, **fresh}, stages=stages).verify()
        self._store(lambda store: store.save(self.traced.graph, self.profile, fresh))

    def keep_links(self, links: Sequence[Link]) -> None:
        """Put links into the profile and the store."""
        self.profile = self.profile.with_links(links)
        stamp = replace(link_stamp(self.stamps), date=datetime.now(UTC).isoformat(timespec="seconds"))
        self._store(lambda store: store.save_links(stamp, links))

    def _store(self, save: Callable[[Store], None]) -> None:
        """Write to the store, if there is one. If it cannot be written, a note says why, and the measurement goes on without."""
        lost: list[str] = []
        if self.store is not None:
            with self.store.noted(lost) as store:
                save(store)
        if lost:
            self.store, self.profile = None, replace(self.profile, notes=(*self.profile.notes, *lost))

    def end(self, notes: Sequence[str]) -> None:
        """Leave the settings that were left out out of the profile, with a note on each."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for setting, reason in self.left_out.items():
            reasons.setdefault((setting.backend, reason), []).append(setting.device)
        found = []
        for (backend, reason), devices in reasons.items():
            everywhere = {setting.device for setting in self.stamps if setting.backend == backend} <= set(devices)
            where = "" if everywhere else f" on {', '.join(dict.fromkeys(devices))}"
            found.append(f"{backend} is left out{where}: {reason}")
        found += [f"{device} is left out: no backend is left there" for device in sorted(self.devices_left_out)]
        measured = {setting: one for setting, one in self.profile.measured.items() if setting not in self.left_out}
        stages = tuple(stage for stage in self.profile.stages if stage.setting in measured)
        self.profile = replace(self.profile, measured=measured, stages=stages, notes=(*self.profile.notes, *found, *notes))


def _eager_s(profile: Profile, group: Sequence[Setting]) -> dict[Setting, dict[str, float]]:
    """Setting to eager's seconds of every op on the same device and threads, where they were measured."""
    eager = {setting: setting._replace(backend="eager") for setting in group if setting.backend != "eager"}
    return {
        setting: {op: profile.op_s(op, *same) for op in profile.signatures}
        for setting, same in eager.items()
        if same in profile.measured
    }

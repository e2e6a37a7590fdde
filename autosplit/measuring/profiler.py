"""measure(): profile a model on the devices of this machine. Only times that the store lacks are measured.

Four steps: look up stored times, list the missing ones, measure them in one pinned worker for each device, and keep each
result before the next measurement.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cache, partial
from math import isfinite
from pathlib import Path

from autosplit.backends.apart import limited
from autosplit.backends.workspace import Workspace
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import AutosplitError, BackendError
from autosplit.measuring.cache_lookup import footprints_of, look_up, look_up_links
from autosplit.measuring.cut_cost import typical_cut
from autosplit.measuring.links import measure_links, open_rings
from autosplit.measuring.measuring_worker import DeviceFaults, MeasuringWorker, Workers
from autosplit.measuring.model_files import BackendFiles, ModelFiles
from autosplit.measuring.rounds import ALONE_S, CUT_S, ROUND_S, Rounds, room_to_keep, seems_slowed
from autosplit.measuring.settings import groups_of, link_stamp, piece_bytes_of, refused_ops, stamps_of, wanted_settings
from autosplit.measuring.store import Store
from autosplit.progress import Progress, quiet
from autosplit.tracing.capturing import Traced
from autosplit.values.links import Link
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint, Measured, Precision, Provenance, Setting

NUM_PASSES = 8
"""Passes of a long model for a backend on a device: 1 reference, 1 that warms up and is checked, 4 in the first round, 1 alone,
and 1 in a later round. A short model gets more, for less time."""

WAITING = "waiting until another process has measured"


def measure(
    traced: Traced,
    machine: Machine,
    backends: Sequence[str] = ("eager",),
    *,
    store: Store | Path | None = None,
    budget_s: float | None = None,
    progress: Progress = quiet,
    remeasure: bool = False,
    links: bool = True,
    precision: Precision = "f32",
    workspace: Workspace | None = None,
    meanwhile: Callable[[], None] = lambda: None,
) -> Profile:
    """Seconds of every op of a model on every device and backend, and of the links between the devices.

    Args:
        traced: the model.
        machine: the devices; CPU core sets and CUDA devices.
        backends: names, eager first if it is among them.
        store: where measurements are kept and reused; None keeps nothing.
        budget_s: seconds for timing, without start-up and exports; by default about 1.4 s for each backend. Two passes in each
            of two rounds are made in any case.
        progress: called with ``profile``, the share done from 0 to 1, and the current step.
        remeasure: measure again, whatever the store holds.
        links: measure the links too, unless they are stored.
        precision: the precision of the backends; those that cannot compute in it are left out.
        workspace: where the model is saved and prepared, if a search or a run is to find it there.
        meanwhile: work of the caller, done once while another process prepares files, if ops are measured.
    Returns: a profile whose notes say what was measured again, and why. A backend is left out with a note where it refuses the
        model or the precision, gives wrong numbers, crashes or hangs, unless it is the only one on a device.
    Raises:
        UsageError: an argument of another type.
        DeviceError: a device that this machine does not have, or that has no cores.
        BackendError, MissingExtraError: the only backend on a device fails, or a runtime is not installed.
        WorkerError: an op failed in a worker; the store keeps all earlier measurements.
    """
    wanted, notes = wanted_settings(machine, backends, precision)
    keeper = Store(store) if isinstance(store, Path) else store
    stamps = stamps_of(machine, wanted, precision)
    tell = partial(progress, "profile")
    tell(0.0, "looking up what was measured before")

    def look() -> Profile:
        if keeper is None or remeasure:
            return Profile.empty(traced.graph, precision)
        found = look_up(traced, machine, keeper, stamps)
        return found.with_links(look_up_links(machine, keeper, link_stamp(stamps))) if links else found

    def missing(known: Profile) -> bool:
        return any(setting not in known.measured for setting in wanted) or (links and not known.links)

    known = look()
    if missing(known):
        with keeper.measuring(partial(tell, 0.0, WAITING)) if keeper is not None else nullcontext():
            # Another process may have measured the same while this one waited.
            known = replace(look(), notes=known.notes)
            held = {} if keeper is None or remeasure else footprints_of(traced.graph, keeper, stamps)
            if missing(known):
                known = _Measurement(traced, machine, stamps, keeper, tell, known, held).run(
                    links, budget_s, workspace, meanwhile
                )
    tell(1.0, "done")
    return replace(known, notes=(*notes, *refused_ops(known, wanted), *known.notes))


def shortest_measurement_s(profile: Profile) -> float:
    """Rough lower limit in seconds for measuring the model again, or one with the same ops for other microbatches."""
    num_devices = max(1, len({setting.device for setting in profile.measured}))
    wholes_s = [profile.whole_s(*setting) for setting in profile.measured]
    return NUM_PASSES * sum(seconds for seconds in wholes_s if isfinite(seconds)) / num_devices


class _Steps:
    """The steps of a measurement, by the seconds that they usually take."""

    def __init__(self, tell: Callable[[float, str], None], planned: Sequence[tuple[str, float]]) -> None:
        self._tell, self._left = tell, list(planned)
        self._past_s, self._all_s = 0.0, sum(seconds for _, seconds in planned)
        self._text, self._usual_s = "", 0.0

    def next(self) -> None:
        """Begin the next step."""
        self._past_s += self._usual_s
        self._text, self._usual_s = self._left.pop(0)
        self.watch(0.0)

    def watch(self, seconds: float) -> None:
        """Show a share between this step and the next; ``seconds``: the duration of a call in it, shown where it is unusual."""
        text = f"{self._text}, {seconds:.0f} s so far" if seconds > self._usual_s else self._text
        self._tell((self._past_s + min(seconds, self._usual_s)) / self._all_s, text)


@dataclass
class _Measurement:
    """One measurement: the profile so far, and the settings that are left out.

    Attributes:
        stamps: wanted setting to the provenance of a measurement made now.
        held: setting to its footprints in the store.
    """

    traced: Traced
    machine: Machine
    stamps: Mapping[Setting, Provenance]
    store: Store | None
    tell: Callable[[float, str], None]
    profile: Profile
    held: Mapping[Setting, Mapping[str, Footprint]]
    piece_bytes: Mapping[str, int] = field(default_factory=dict)
    """Accelerator without room for the model to the bytes of weights that are measured there at once."""
    files: dict[str, BackendFiles] = field(default_factory=dict)
    left_out: dict[Setting, str] = field(default_factory=dict)

    def run(self, links: bool, budget_s: float | None, workspace: Workspace | None, meanwhile: Callable[[], None]) -> Profile:
        """Measure the missing times; keep each result before the next one is measured."""
        measured, links = self.profile.measured, links and not self.profile.links
        groups = [group for group in groups_of(self.machine, self.stamps) if any(one not in measured for one in group)]
        self.piece_bytes = piece_bytes_of(self.machine, self.traced.graph.weight_bytes)
        groups = [part for group in groups for part in self._by_room(group)]
        round_s = ROUND_S if budget_s is None else max(0.05, 0.45 * budget_s / max(1, len(groups)))
        steps = _Steps(self.tell, _planned([group[0].backend for group in groups], round_s, links))
        prepare_to_spawn()
        with ExitStack() as stack:
            apart = self.machine.layouts[0].devices
            others = [device for device in self.machine.devices if device not in apart]
            rings = stack.enter_context(open_rings(apart if links else ()))
            steps.next()
            if not groups:
                workers = stack.enter_context(Workers(rings.devices, rings.fds))
                return self._keep_links(measure_links(rings, workers, others))
            workspace = workspace or stack.enter_context(Workspace())
            once = cache(meanwhile)
            cut = None if all(map(is_accelerator, self.machine.devices)) else typical_cut(self.traced.graph)
            model = ModelFiles.save(self.traced, cut, self.profile.precision, workspace)
            workers = stack.enter_context(Workers(self.machine.devices, rings.fds, model.program.packages))
            workers.watch = steps.watch

            def watch(seconds: float) -> None:
                once()
                steps.watch(seconds)

            stack.enter_context(limited(watch=watch))
            keep = room_to_keep(self.traced.graph.weight_bytes * sum(map(len, groups)))
            rounds = Rounds(workers, self.machine, model, self.stamps, {}, round_s, keep)
            loading = []
            for backend in dict.fromkeys(group[0].backend for group in groups):
                steps.next()
                self._prepare(backend, model)
                group = next(group for group in groups if group[0].backend == backend)
                if self._may_load(group, group is groups[0], keep):  # while exporters work
                    arguments = {one.device: rounds.prepare_arguments(one, model.folder) for one in group}
                    loading.append(workers.begin(MeasuringWorker.prepare, arguments))
            steps.next()
            for begun in loading:
                with suppress(AutosplitError):  # the first round fails too, and has the reason
                    workers.results(begun)
            once()
            rounds = replace(rounds, calibration_s=self._calibrate(workers))
            for group in groups:
                steps.next()
                self._time(group, lambda some, files: self._first(rounds, model, some, files))
            if links:
                steps.next()
                self._keep_links(measure_links(rings, workers, others))
            for group in groups:
                steps.next()
                self._time_again(group, rounds)
            for group in groups:
                if any(one in self.profile.measured and seems_slowed(self.profile.measured[one]) for one in group):
                    self._time_again(group, rounds)
        return self._without_left_out(rounds.notes)

    def _by_room(self, group: Sequence[Setting]) -> list[list[Setting]]:
        """The settings of a group on devices with room for the model, and each other one alone."""
        small = [[one] for one in group if one.device in self.piece_bytes]
        roomy = [one for one in group if one.device not in self.piece_bytes]
        return [roomy, *small] if roomy else small

    def _prepare(self, backend: str, model: ModelFiles) -> None:
        """Write the files of a backend."""
        try:
            self.files[backend] = model.prepare(backend)
        except BackendError as failure:
            self._leave_out({setting: str(failure) for setting in self.stamps if setting.backend == backend})

    def _may_load(self, group: Sequence[Setting], is_first: bool, keep: bool) -> bool:
        """Whether a group may be loaded before its round: whole, for good, and without asking for times in eager."""
        files, backend = self.files.get(group[0].backend), group[0].backend
        stays = is_first or (keep and not any(is_accelerator(self.machine[one.device]) for one in group))
        whole = files is not None and not files.refused and group[0].device not in self.piece_bytes
        return stays and whole and (backend == "eager" or "eager" in self.files)

    def _calibrate(self, workers: Workers) -> dict[str, float]:
        """Run the calibration kernel on one device after the other: later runs repeat it with idle neighbours too."""
        found: dict[str, float] = {}
        for device in self.machine.devices:
            found |= workers.call(MeasuringWorker.calibrate, {device.name: ()})
        return found

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

    def _first(self, rounds: Rounds, model: ModelFiles, group: Sequence[Setting], files: BackendFiles) -> dict[Setting, Measured]:
        """The first round. A backend that fails on the whole model is tried on subgraphs, unless it crashes there.

        An accelerator without room for the model measures it in pieces that fit, as it will run it.
        """
        eager_s, device = _eager_s(self.profile, group), self.machine[group[0].device]
        if device.name in self.piece_bytes and not files.refused:
            files = model.in_pieces(group[0].backend, [device], self.piece_bytes[device.name])
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

    def _time_again(self, group: Sequence[Setting], rounds: Rounds) -> None:
        """One more round, unless the backend was timed on subgraphs."""
        if group[0].backend in self.files and not self.files[group[0].backend].refused:
            self._time(group, lambda some, files: rounds.another(some, files, self.profile.measured))

    def _leave_out(self, reasons: Mapping[Setting, str]) -> None:
        """Leave settings out, with their measurements. Raises: BackendError: no backend is left on a device."""
        self.left_out |= reasons
        for setting, reason in reasons.items():
            tried = [other for other in self.stamps if other.device == setting.device]
            if all(other in self.left_out for other in tried):
                has_eager = any(other.backend == "eager" for other in tried)
                way_out = f". No other backend is asked for on '{setting.device}'; add eager to the backends"
                if has_eager:
                    is_left_out = len(self.machine.devices) > 1 and is_accelerator(self.machine[setting.device])
                    way_out = f"; leave '{setting.device}' out: name the other devices with --devices" if is_left_out else ""
                raise BackendError(f"{reason.removesuffix('.') if way_out else reason}{way_out}")

    def _keep(self, measured: Mapping[Setting, Measured]) -> None:
        """Put measurements into the profile and the store, in place of earlier ones and their stages."""
        fresh = {
            setting: replace(one, footprints={**self.held.get(setting, {}), **one.footprints})
            for setting, one in measured.items()
        }
        stages = tuple(stage for stage in self.profile.stages if stage.setting not in fresh)
        self.profile = replace(self.profile, measured={**self.profile.measured, **fresh}, stages=stages).verify()
        self._store(lambda store: store.save(self.traced.graph, self.profile, fresh))

    def _keep_links(self, links: Sequence[Link]) -> Profile:
        """Put links into the profile and the store."""
        self.profile = self.profile.with_links(links)
        stamp = replace(link_stamp(self.stamps), date=datetime.now(UTC).isoformat(timespec="seconds"))
        self._store(lambda store: store.save_links(stamp, links))
        return self.profile

    def _store(self, save: Callable[[Store], None]) -> None:
        """Write to the store, if there is one. If it cannot be written, a note says why, and the measurement goes on without."""
        lost: list[str] = []
        if self.store is not None:
            with self.store.noted(lost) as store:
                save(store)
        if lost:
            self.store, self.profile = None, replace(self.profile, notes=(*self.profile.notes, *lost))

    def _without_left_out(self, notes: Sequence[str]) -> Profile:
        """The profile without the settings that were left out, and a note on each."""
        reasons: dict[tuple[str, str], list[str]] = {}
        for setting, reason in self.left_out.items():
            reasons.setdefault((setting.backend, reason), []).append(setting.device)
        found = []
        for (backend, reason), devices in reasons.items():
            everywhere = {setting.device for setting in self.stamps if setting.backend == backend} <= set(devices)
            where = "" if everywhere else f" on {', '.join(dict.fromkeys(devices))}"
            found.append(f"{backend} is left out{where}: {reason}")
        measured = {setting: one for setting, one in self.profile.measured.items() if setting not in self.left_out}
        stages = tuple(stage for stage in self.profile.stages if stage.setting in measured)
        return replace(self.profile, measured=measured, stages=stages, notes=(*self.profile.notes, *found, *notes))


def _planned(backends: Sequence[str], round_s: float, links: bool) -> list[tuple[str, float]]:
    """The steps of a measurement, and the seconds that they usually take."""
    planned = [("starting the workers", 2.0)] if backends else []
    planned += [(f"preparing {backend}", 1.0 if backend == "eager" else 6.0) for backend in dict.fromkeys(backends)]
    planned += [("calibrating", 1.0)] if backends else []
    planned += [(f"timing {backend}", round_s + ALONE_S + CUT_S + 2.0) for backend in backends]
    planned += [("measuring the links", 2.0)] if links else []
    return planned + [(f"timing {backend} once more", round_s / 2) for backend in backends]


def _eager_s(profile: Profile, group: Sequence[Setting]) -> dict[Setting, dict[str, float]]:
    """Setting to eager's seconds of every op on the same device and threads, where they were measured."""
    eager = {setting: setting._replace(backend="eager") for setting in group if setting.backend != "eager"}
    return {
        setting: {op: profile.op_s(op, *same) for op in profile.signatures}
        for setting, same in eager.items()
        if same in profile.measured
    }

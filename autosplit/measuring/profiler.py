"""measure(): profile a model on the devices of this machine. Only what the store does not hold is measured.

Four steps: look up what is known, list what is missing, measure it in one pinned worker for each device, and keep each
result before the next one is measured.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from math import isfinite
from pathlib import Path

from autosplit.backends import conformance
from autosplit.deploying.workspace import Workspace
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.processes import prepare_to_spawn
from autosplit.measuring.cache_lookup import look_up, look_up_links
from autosplit.measuring.cut_cost import typical_cut
from autosplit.measuring.links import measure_links, open_rings
from autosplit.measuring.model_files import ModelFiles
from autosplit.measuring.rounds import ALONE_S, CUT_S, ROUND_S, MeasurementRounds, room_to_keep, seems_slowed
from autosplit.measuring.settings import refused_ops, stamps_of, wanted_settings
from autosplit.measuring.store import Store
from autosplit.measuring.worker_pool import open_pool
from autosplit.progress import Progress, quiet
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint, Measured, Precision, Provenance, Setting

MAX_AT_ONCE = 16
"""Devices that time a model at once; more would need more memory than a pipeline of the model does."""

NUM_PASSES = 8
"""Passes of a long model for a backend on a device: 1 reference, 1 that warms up and is checked, 4 in the first round, 1 alone,
and 1 in a later round. A short model gets more, for less time."""

WAITING = "waiting until another process has measured"


def measure(
    traced: Traced,
    machine: Machine,
    backends: Sequence[str] = ("eager",),
    *,
    threads: Mapping[str, Sequence[int]] | None = None,
    store: Store | Path | None = None,
    budget_s: float | None = None,
    progress: Progress = quiet,
    remeasure: bool = False,
    links: bool = True,
    precision: Precision = "f32",
    workspace: Workspace | None = None,
) -> Profile:
    """Seconds of every op of a model on every device and backend, and of the links between the devices.

    Args:
        traced: the model.
        machine: the devices; CPU core sets and CUDA devices.
        backends: names, eager first if it is among them.
        threads: device name to the thread counts to measure; by default one thread for each core.
        store: where measurements are kept and reused; None keeps nothing.
        budget_s: seconds for timing, without start-up and exports; by default about 1.4 s for each backend. Two passes in each
            of two rounds are made in any case.
        progress: called with ``profile``, the share done from 0 to 1, and the current step.
        remeasure: measure again what is stored.
        links: measure the links too, unless they are stored.
        precision: what the backends compute in; those that cannot are left out.
        workspace: where the model is saved and prepared, if a search or a run is to find it there.
    Returns: a profile whose notes say what was measured again, and why. A backend that refuses the model or the precision, or
        gives wrong numbers, is left out with a note, unless it is the only one.
    Raises:
        UsageError: an argument of another type, or a thread count that a device does not have.
        DeviceError: a device that this machine does not have, or that has no cores.
        BackendError, MissingExtraError: the only backend refuses the model, or a runtime is not installed.
        WorkerError: a worker died or an op failed in it; the store keeps what was measured before.
    """
    wanted, notes = wanted_settings(machine, backends, threads, precision)
    keeper = Store(store) if isinstance(store, Path) else store
    job = _Job(traced, machine, stamps_of(machine, wanted, precision), keeper, precision, remeasure, links)
    tell = partial(progress, "profile")
    tell(0.0, "looking up what was measured before")
    known = job.known()
    if any(job.missing(known)):
        with keeper.measuring(partial(tell, 0.0, WAITING)) if keeper is not None else nullcontext():
            # Another process may have measured the same while this one waited.
            known = replace(job.known(), notes=known.notes)
            groups, missing_links = job.missing(known)
            held = job.footprints()
            with closing(job.measured(known, groups, missing_links, budget_s, tell, workspace)) as results:
                for result, fresh in results:
                    result = replace(
                        result, measured={s: _with_footprints(one, held.get(s)) for s, one in result.measured.items()}
                    )
                    job.keep(result, fresh, links=result.links != known.links)
                    known = result
    tell(1.0, "done")
    return replace(known, notes=(*notes, *refused_ops(known, wanted), *known.notes))


def shortest_measurement_s(profile: Profile) -> float:
    """Rough lower limit in seconds for measuring the model again, or one with the same ops for other microbatches."""
    num_devices = max(1, len({setting.device for setting in profile.measured}))
    wholes_s = [profile.whole_s(*setting) for setting in profile.measured]
    return NUM_PASSES * sum(seconds for seconds in wholes_s if isfinite(seconds)) / num_devices


@dataclass(frozen=True)
class _Job:
    """One call of ``measure``; ``stamps`` gives each wanted setting the provenance of a measurement made now."""

    traced: Traced
    machine: Machine
    stamps: Mapping[Setting, Provenance]
    store: Store | None
    precision: Precision
    remeasure: bool
    links: bool

    @property
    def link_stamp(self) -> Provenance:
        """The provenance of links measured now; they depend on all accelerators of the machine."""
        identity = {f"{s.device} {key}": value for s, stamp in self.stamps.items() for key, value in stamp.accelerator.items()}
        return replace(next(iter(self.stamps.values())), accelerator=identity, calibration_s=0.0)

    def known(self) -> Profile:
        """The stored measurements that still hold here; none if everything is to be measured again."""
        if self.store is None or self.remeasure:
            return Profile.empty(self.traced.graph, self.precision)
        found = look_up(self.traced.graph, self.machine, self.store, self.stamps)
        found = self._with_todays_refusals(found)
        return found.with_links(look_up_links(self.machine, self.store, self.link_stamp)) if self.links else found

    def _with_todays_refusals(self, found: Profile) -> Profile:
        """The measurements without those of other ops than their backend may run now, because it was tried since."""
        may_not = {backend: conformance.refused(self.traced, backend) for backend in {one.backend for one in found.measured}}
        kept, notes = {}, list(found.notes)
        for setting, measured in found.measured.items():
            wrong, then = may_not[setting.backend].keys(), measured.refused
            if wrong <= then.keys() and wrong >= {op for op, reason in then.items() if reason.startswith(conformance.WRONG)}:
                kept[setting] = measured
            else:
                notes.append(f"{setting}: stored, but it may run other ops now, so it is measured again")
        stages = tuple(stage for stage in found.stages if stage.setting in kept)
        return replace(found, measured=kept, stages=stages, notes=tuple(notes))

    def footprints(self) -> dict[Setting, Mapping[str, Footprint]]:
        """The footprints that the store holds: a core of another speed than then changes the times, and not the memory."""
        if self.store is None or self.remeasure:
            return {}
        stored = self.store.load(self.traced.graph, {s.backend: stamp for s, stamp in self.stamps.items()}, self.precision)
        return {setting: one.footprints for setting, one in stored.measured.items()}

    def missing(self, known: Profile) -> tuple[list[list[Setting]], bool]:
        """Groups of settings to be timed at once, at least one of each missing, and whether the links are missing.

        A group has one backend and one thread count for each of up to ``MAX_AT_ONCE`` devices without a core in common.
        """
        rows: dict[tuple[str, int], list[Setting]] = {}
        num_counts: Counter[tuple[str, str]] = Counter()
        for setting in self.stamps:
            rows.setdefault((setting.backend, num_counts[setting.device, setting.backend]), []).append(setting)
            num_counts[setting.device, setting.backend] += 1
        apart = [part for row in rows.values() for part in self._apart(row)]
        groups = [row[start : start + MAX_AT_ONCE] for row in apart for start in range(0, len(row), MAX_AT_ONCE)]
        missing = [group for group in groups if any(setting not in known.measured for setting in group)]
        return missing, self.links and not known.links

    def _apart(self, row: Sequence[Setting]) -> list[list[Setting]]:
        """The settings in few sets of devices without a core in common, which may be timed at once."""
        sets, left = [], list(row)
        for layout in self.machine.layouts:
            names = {device.name for device in layout.devices}
            sets.append([setting for setting in left if setting.device in names])
            left = [setting for setting in left if setting.device not in names]
        return [found for found in sets if found]

    def measured(
        self,
        profile: Profile,
        groups: Sequence[Sequence[Setting]],
        links: bool,
        budget_s: float | None,
        tell: Callable[[float, str], None],
        workspace: Workspace | None,
    ) -> Generator[tuple[Profile, Sequence[Setting]], None, None]:
        """Measure the groups and the links; after each step yield the profile and the settings that are new in it."""
        if not groups and not links:
            return
        round_s = ROUND_S if budget_s is None else max(0.05, 0.45 * budget_s / max(1, len(groups)))
        steps = _steps([group[0].backend for group in groups], round_s, links)
        prepare_to_spawn()
        with ExitStack() as stack:
            apart = self.machine.layouts[0].devices
            others = [device for device in self.machine.devices if device not in apart]
            rings = stack.enter_context(open_rings(apart if links else ()))
            if not groups:
                tell(*next(steps))
                pool = stack.enter_context(open_pool(rings.devices, rings.fds))
                yield profile.with_links(measure_links(rings, pool, others)), ()
                return
            tell(*next(steps))
            workspace = workspace or stack.enter_context(Workspace())
            cut = None if all(map(is_accelerator, self.machine.devices)) else typical_cut(self.traced.graph)
            files = ModelFiles.save(self.traced, cut, self.precision, workspace)
            pool = stack.enter_context(open_pool(self.machine.devices, rings.fds, files.program.packages))
            keep = room_to_keep(self.traced.graph.weight_bytes * sum(map(len, groups)))
            rounds = MeasurementRounds(pool, self.machine, files, self.stamps, round_s, keep)
            for backend in dict.fromkeys(group[0].backend for group in groups):
                tell(*next(steps))
                rounds.prepare(backend, groups[0])
            tell(*next(steps))
            rounds.calibrate()
            for group in groups:
                tell(*next(steps))
                measured = rounds.first(group, _eager_s(profile, group))
                profile = _with_measured(profile, measured)
                yield profile, list(measured)
            if links:
                tell(*next(steps))
                profile = profile.with_links(measure_links(rings, pool, others))
                yield profile, ()
            for group in groups:
                tell(*next(steps))
                measured = rounds.another(profile.measured, group)
                profile = _with_measured(profile, measured)
                yield profile, list(measured)
            for group in groups:
                if any(setting in profile.measured and seems_slowed(profile.measured[setting]) for setting in group):
                    measured = rounds.another(profile.measured, group)
                    profile = _with_measured(profile, measured)
                    yield profile, list(measured)
        yield profile.without(rounds.left_out, *rounds.notes), ()

    def keep(self, profile: Profile, settings: Sequence[Setting], links: bool) -> None:
        """Store the settings, and the links if they are new."""
        if self.store is not None and settings:
            self.store.save(self.traced.graph, profile, settings)
        if self.store is not None and links:
            self.store.save_links(replace(self.link_stamp, date=datetime.now(UTC).isoformat(timespec="seconds")), profile.links)


def _with_footprints(measured: Measured, held: Mapping[str, Footprint] | None) -> Measured:
    return replace(measured, footprints={**held, **measured.footprints}) if held else measured


def _steps(backends: Sequence[str], round_s: float, links: bool) -> Iterator[tuple[float, str]]:
    """The share done and the name of each step of a measurement, by the seconds that steps usually take."""
    planned = [("starting the workers", 2.0)] if backends else []
    planned += [(f"preparing {backend}", 1.0 if backend == "eager" else 6.0) for backend in dict.fromkeys(backends)]
    planned += [("calibrating", 1.0)] if backends else []
    planned += [(f"timing {backend}", round_s + ALONE_S + CUT_S + 2.0) for backend in backends]
    planned += [("measuring the links", 2.0)] if links else []
    planned += [(f"timing {backend} once more", round_s / 2) for backend in backends]
    past_s, all_s = 0.0, sum(seconds for _, seconds in planned)
    for text, seconds in planned:
        yield past_s / all_s, text
        past_s += seconds


def _with_measured(profile: Profile, measured: Mapping[Setting, Measured]) -> Profile:
    """The profile with these settings measured anew, without the stages of their earlier measurements."""
    stages = tuple(stage for stage in profile.stages if stage.setting not in measured)
    return replace(profile, measured={**profile.measured, **measured}, stages=stages).verify()


def _eager_s(profile: Profile, group: Sequence[Setting]) -> dict[Setting, dict[str, float]]:
    """Setting to eager's seconds of every op on the same device and threads, where they were measured."""
    eager = {setting: setting._replace(backend="eager") for setting in group if setting.backend != "eager"}
    return {
        setting: {op: profile.op_s(op, *same) for op in profile.signatures}
        for setting, same in eager.items()
        if same in profile.measured
    }

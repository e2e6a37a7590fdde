"""measure(): profile a model on the devices of this machine. Only what the store does not hold is measured.

Four steps: look up what is known, list what is missing, measure it in one pinned worker for each device, and keep each
result before the next one is measured.
"""

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path

from autosplit.deploying.workspace import Workspace
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import BackendError
from autosplit.measuring.cache_lookup import look_up, look_up_links
from autosplit.measuring.cut_cost import loses_at_cuts, typical_cut
from autosplit.measuring.links import measure_links, open_rings
from autosplit.measuring.model_files import ModelFiles
from autosplit.measuring.rounds import ALONE_S, CUT_S, ROUND_S, MeasurementRounds, room_to_keep, seems_slowed
from autosplit.measuring.settings import refused_ops, stamps_of, wanted_settings
from autosplit.measuring.store import Store
from autosplit.measuring.worker_pool import open_pool
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Precision, Provenance, Setting

MAX_AT_ONCE = 16
"""Devices that time a model at once; more would need more memory than a pipeline of the model does."""

NUM_PASSES = 12
"""Passes for a backend on a device: 1 reference, 1 warm-up, 1 wake-up, 4 in two rounds, 2 alone, 3 in a later round."""

Progress = Callable[[float, str], None]


def measure(
    traced: Traced,
    machine: Machine,
    backends: Sequence[str] = ("eager",),
    *,
    threads: Mapping[str, Sequence[int]] | None = None,
    store: Store | Path | None = None,
    budget_s: float | None = None,
    progress: Progress | None = None,
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
        progress: called with the share done, from 0 to 1, and the current step.
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
    steps = _Steps(progress)
    known = job.known()
    if any(job.missing(known)):
        with keeper.measuring(steps.wait) if keeper is not None else nullcontext():
            # Another process may have measured the same while this one waited.
            known = replace(job.known(), notes=known.notes)
            groups, missing_links = job.missing(known)
            with closing(job.measured(known, groups, missing_links, budget_s, steps, workspace)) as results:
                for result, fresh in results:
                    job.keep(result, fresh, links=result.links != known.links)
                    known = result
    steps.finish()
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
        """What the store holds and still holds here; nothing if all is to be measured again."""
        if self.store is None or self.remeasure:
            return Profile.empty(self.traced.graph, self.precision)
        found = look_up(self.traced.graph, self.machine, self.store, self.stamps)
        return found.with_links(look_up_links(self.machine, self.store, self.link_stamp)) if self.links else found

    def missing(self, known: Profile) -> tuple[list[list[Setting]], bool]:
        """Groups of settings to be timed at once, at least one of each missing, and whether the links are missing.

        A group has one backend and one thread count for each of up to ``MAX_AT_ONCE`` devices.
        """
        rows: dict[tuple[str, int], list[Setting]] = {}
        num_counts: Counter[tuple[str, str]] = Counter()
        for setting in self.stamps:
            rows.setdefault((setting.backend, num_counts[setting.device, setting.backend]), []).append(setting)
            num_counts[setting.device, setting.backend] += 1
        groups = [row[start : start + MAX_AT_ONCE] for row in rows.values() for start in range(0, len(row), MAX_AT_ONCE)]
        missing = [group for group in groups if any(setting not in known.measured for setting in group)]
        return missing, self.links and not known.links

    def measured(
        self,
        profile: Profile,
        groups: Sequence[Sequence[Setting]],
        links: bool,
        budget_s: float | None,
        steps: "_Steps",
        workspace: Workspace | None,
    ) -> Generator[tuple[Profile, Sequence[Setting]], None, None]:
        """Measure the groups and the links; after each step yield the profile and the settings that are new in it."""
        if not groups:
            if links:
                steps.plan([("measuring the links", 2.0)])
                with open_rings(self.machine.devices) as rings, open_pool(rings.devices, rings.fds) as pool:
                    yield profile.with_links(measure_links(rings, pool)), ()
            return
        prepare_to_spawn()
        round_s = ROUND_S if budget_s is None else max(0.05, 0.45 * budget_s / len(groups))
        backends = list(dict.fromkeys(group[0].backend for group in groups))
        _plan(steps, backends, groups, round_s, links)
        refused: dict[str, str] = {}
        with ExitStack() as stack:
            rings = stack.enter_context(open_rings(self.machine.devices if links else ()))
            workspace = workspace or stack.enter_context(Workspace())
            cut = None if all(map(is_accelerator, self.machine.devices)) else typical_cut(self.traced.graph)
            files = ModelFiles.save(self.traced, cut, self.precision, workspace)
            pool = stack.enter_context(open_pool(self.machine.devices, rings.fds, files.program.packages))
            keep = room_to_keep(self.traced.graph.weight_bytes * sum(map(len, groups)))
            rounds = MeasurementRounds(pool, self.machine, files, self.stamps, round_s, keep)
            for backend in backends:
                with self._refusing(backend, refused):
                    rounds.backends[backend] = files.prepare(backend)
                    if backend == "eager" == groups[0][0].backend:
                        rounds.preload(groups[0])  # both the export of other backends and a warm-up leave cores idle
                steps.next()
            rounds.calibrate()
            steps.next()
            for group in groups:
                if group[0].backend not in refused:
                    with self._refusing(group[0].backend, refused):
                        measured = rounds.first(group, _eager_s(profile, group))
                        profile = _with_measured(profile, measured, self._notes(measured, files.cut is not None))
                        yield profile, group
                steps.next()
            if links:
                profile = profile.with_links(measure_links(rings, pool))
                yield profile, ()
                steps.next()
            again = [group for group in groups if group[0].backend in rounds.backends.keys() - refused.keys()]
            again = [group for group in again if not rounds.backends[group[0].backend].refused]
            for group in again:
                profile = _with_measured(profile, rounds.another({one: profile.measured[one] for one in group}))
                yield profile, group
                steps.next()
            for group in again:
                if any(seems_slowed(profile.measured[setting]) for setting in group):
                    profile = _with_measured(profile, rounds.another({one: profile.measured[one] for one in group}))
                    yield profile, group
        yield replace(profile, notes=(*profile.notes, *refused.values())), ()

    def keep(self, profile: Profile, settings: Sequence[Setting], links: bool) -> None:
        """Store the settings, and the links if they are new."""
        if self.store is not None and settings:
            self.store.save(self.traced.graph, profile, settings)
        if self.store is not None and links:
            self.store.save_links(replace(self.link_stamp, date=datetime.now(UTC).isoformat(timespec="seconds")), profile.links)

    @contextmanager
    def _refusing(self, backend: str, refused: dict[str, str]) -> Iterator[None]:
        """Note why a backend refuses the model or gives wrong numbers; raise it if there is no other backend."""
        try:
            yield
        except BackendError as failure:
            if len({setting.backend for setting in self.stamps}) == 1:
                raise
            refused[backend] = f"{backend} is left out: {failure}"

    def _notes(self, measured: Mapping[Setting, Measured], has_cut: bool) -> Iterator[str]:
        """Remarks on the first round of a group."""
        for setting, found in measured.items():
            if found.provenance.note:
                yield f"{setting}: {found.provenance.note}; measure again (--remeasure) when it is quiet"
        backend = next(iter(measured)).backend
        uncut = [s.device for s, m in measured.items() if m.cut_s_per_byte is None and not m.refused]
        uncut = [device for device in uncut if not is_accelerator(self.machine[device])]
        if uncut and has_cut and loses_at_cuts(backend):
            yield (
                f"{backend} on {', '.join(uncut)}: the cost of a cut could not be timed, so plans with several stages there "
                "may be slower than predicted"
            )


class _Steps:
    """Reports the share of the planned seconds that is done, and the current step."""

    def __init__(self, report: Progress | None) -> None:
        self._report = report or (lambda share, text: None)
        self._planned: Sequence[tuple[str, float]] = ()
        self._num_done = 0

    def plan(self, steps: Sequence[tuple[str, float]]) -> None:
        """Begin the first of these steps, each with the seconds that it usually takes."""
        self._planned = steps
        self._tell()

    def next(self) -> None:
        """Begin the next step."""
        self._num_done += 1
        self._tell()

    def wait(self) -> None:
        """Report that another process measures."""
        self._report(0.0, "waiting until another process has measured")

    def finish(self) -> None:
        """Report that all is done."""
        self._report(1.0, "done")

    def _tell(self) -> None:
        if self._num_done < len(self._planned):
            past_s, all_s = (sum(seconds for _, seconds in self._planned[:end]) for end in (self._num_done, None))
            self._report(past_s / all_s, self._planned[self._num_done][0])


def _plan(steps: _Steps, backends: Sequence[str], groups: Sequence[Sequence[Setting]], round_s: float, links: bool) -> None:
    timed = [group[0].backend for group in groups]
    steps.plan(
        [
            *((f"preparing {backend}", 1.0 if backend == "eager" else 6.0) for backend in backends),
            ("starting the workers", 2.0),
            *((f"timing {backend}", round_s + ALONE_S + CUT_S + 2.0) for backend in timed),
            *([("measuring the links", 2.0)] if links else []),
            *((f"timing {backend} once more", round_s / 2) for backend in timed),
        ]
    )


def _with_measured(profile: Profile, measured: Mapping[Setting, Measured], notes: Iterable[str] = ()) -> Profile:
    """The profile with these settings measured anew, without the stages of their earlier measurements."""
    stages = tuple(stage for stage in profile.stages if stage.setting not in measured)
    notes = tuple(dict.fromkeys((*profile.notes, *notes)))
    return replace(profile, measured={**profile.measured, **measured}, stages=stages, notes=notes).verify()


def _eager_s(profile: Profile, group: Sequence[Setting]) -> dict[Setting, dict[str, float]]:
    """Setting to eager's seconds of every op on the same device and threads, where they were measured."""
    eager = {setting: setting._replace(backend="eager") for setting in group if setting.backend != "eager"}
    return {
        setting: {op: profile.op_s(op, *same) for op in profile.signatures}
        for setting, same in eager.items()
        if same in profile.measured
    }

"""measure(): profile a model on the devices of this machine. Only times that the store lacks are measured.

Four steps: look up stored times, list the missing ones, measure them in one pinned worker for each device, and keep each
result before the next measurement. ``measure_together()`` does so for several models in the same rounds.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import cache, partial
from math import isfinite
from pathlib import Path
from typing import Any

from autosplit.backends.apart import limited
from autosplit.backends.workspace import Workspace
from autosplit.devices.processes import prepare_to_spawn
from autosplit.errors import AutosplitError
from autosplit.measuring.cache_lookup import footprints_of, look_up, look_up_links
from autosplit.measuring.links import measure_links, open_rings
from autosplit.measuring.measurement import Measurement
from autosplit.measuring.measuring_worker import MeasuringWorker, Workers
from autosplit.measuring.rounds import ALONE_S, CUT_S, ROUND_S, Rounds, room_to_keep
from autosplit.measuring.settings import link_stamp, refused_ops, stamps_of, wanted_settings
from autosplit.measuring.store import Store
from autosplit.progress import Progress, quiet
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision

NUM_PASSES = 9
"""Passes of a long model for a backend on a device: 1 reference, 1 that warms up and is checked, 4 in the first round, 1 in a
later round, and 1 alone in each. A short model gets more, for less time."""

NUM_ROUNDS = 3
"""Later rounds of models that are measured together. A single model has one."""

WAITING = "waiting until another process has measured"


def measure(traced: Traced, machine: Machine, backends: Sequence[str] = ("eager",), **options: Any) -> Profile:
    """The profile of one model; arguments, options and errors as for ``measure_together``."""
    [found] = measure_together([traced], machine, backends, **options)
    return found


def measure_together(
    traces: Sequence[Traced],
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
) -> list[Profile]:
    """Seconds of every op of models on every device and backend, and of the links between the devices.

    Rounds of the models take turns, so that a slow time of the machine meets all of them. Models that memory cannot hold together
    are measured one after the other.

    Args:
        machine: the devices; CPU core sets and CUDA devices.
        backends: names, eager first if it is among them.
        store: where measurements are kept and reused; None keeps nothing.
        budget_s: seconds for timing, without start-up and exports; by default about 1.4 s for each model and backend. Two passes
            in each of two rounds are made in any case.
        progress: called with ``profile``, the share done from 0 to 1, and the current step.
        remeasure: measure again, whatever the store holds.
        links: measure the links too, unless they are stored.
        precision: the precision of the backends; those that cannot compute in it are left out.
        workspace: where the models are saved and prepared, if a search or a run is to find them there.
        meanwhile: work of the caller, done once while another process prepares files, if ops are measured.
    Returns: for each model a profile whose notes say what was measured again, and why. A backend is left out with a note where it
        refuses the model or the precision, gives wrong numbers, crashes or hangs, unless it is the only one on cores. An
        accelerator without another one is left out, with its links, unless there is no other device.
    Raises:
        UsageError: an argument of another type.
        DeviceError: a device that this machine does not have, or that has no cores.
        BackendError, MissingExtraError: the only backend on cores, or on all devices, fails; or a runtime is not installed.
        WorkerError: an op failed in a worker; the store keeps all earlier measurements.
    """
    wanted, notes = wanted_settings(machine, backends, precision)
    keeper = Store(store) if isinstance(store, Path) else store
    stamps = stamps_of(machine, wanted, precision)
    tell = partial(progress, "profile")
    tell(0.0, "looking up what was measured before")

    def look(traced: Traced) -> Profile:
        if keeper is None or remeasure:
            return Profile.empty(traced.graph, precision)
        found = look_up(traced, machine, keeper, stamps)
        return found.with_links(look_up_links(machine, keeper, link_stamp(stamps))) if links else found

    def is_missing(known: Profile) -> bool:
        return any(setting not in known.measured for setting in wanted) or (links and not known.links)

    known = list(map(look, traces))
    if any(map(is_missing, known)):
        with keeper.measuring(partial(tell, 0.0, WAITING)) if keeper is not None else nullcontext():
            # Another process may have measured the same while this one waited.
            known = [replace(look(traced), notes=one.notes) for traced, one in zip(traces, known, strict=True)]
            parts = []
            for traced, one in zip(traces, known, strict=True):
                held = {} if keeper is None or remeasure else footprints_of(traced.graph, keeper, stamps)
                parts.append(Measurement(traced, machine, stamps, keeper, one, held))
            together = room_to_keep(sum(part.held_bytes for part in parts))
            for some in [parts] if together else [[part] for part in parts]:
                lacks_links = links and not parts[0].profile.links
                if lacks_links or any(is_missing(part.profile) for part in some):
                    _run(some, tell, lacks_links, budget_s, workspace, meanwhile)
                for part in parts[1:] if links else ():
                    part.profile = part.profile.with_links(parts[0].profile.links)
            known = [part.profile for part in parts]
    tell(1.0, "done")
    return [replace(one, notes=(*notes, *refused_ops(one, wanted), *one.notes)) for one in known]


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
        self._share = 0.0
        self._text, self._usual_s = "", 0.0

    def next(self) -> None:
        """Begin the next step."""
        self._past_s += self._usual_s
        self._text, self._usual_s = self._left.pop(0)
        self.watch(0.0)

    def watch(self, seconds: float) -> None:
        """Show a share between this step and the next; ``seconds``: the duration of a call in it, shown where it is unusual."""
        text = f"{self._text}, {seconds:.0f} s so far" if seconds > self._usual_s else self._text
        share = (self._past_s + min(seconds, self._usual_s)) / self._all_s
        self._share = max(self._share, share)  # a step may have several calls
        self._tell(self._share, text)


def _run(
    parts: Sequence[Measurement],
    tell: Callable[[float, str], None],
    links: bool,
    budget_s: float | None,
    workspace: Workspace | None,
    meanwhile: Callable[[], None],
) -> None:
    """Measure the missing times of some models; the first of them keeps the links, where these are measured, too."""
    machine, stamps = parts[0].machine, parts[0].stamps
    backends = [group[0].backend for part in parts for group in part.groups]
    keep, num_again = room_to_keep(sum(part.held_bytes for part in parts)), 1 if len(parts) == 1 else NUM_ROUNDS
    round_s = ROUND_S if budget_s is None else max(0.05, 0.45 * budget_s / max(1, len(backends)))
    steps = _Steps(tell, _planned(backends, len(parts), round_s, links, num_again))
    prepare_to_spawn()
    with ExitStack() as stack:
        apart = machine.layouts[0].devices
        others = [device for device in machine.devices if device not in apart]
        rings = stack.enter_context(open_rings(apart if links else ()))
        steps.next()
        if not backends:
            workers = stack.enter_context(Workers(rings.devices, rings.fds))
            parts[0].keep_links(measure_links(rings, workers, others))
            return
        workspace = workspace or stack.enter_context(Workspace())
        once = cache(meanwhile)
        models = [part.save(workspace) for part in parts]
        packages = dict.fromkeys(package for model in models for package in model.program.packages)
        workers = stack.enter_context(Workers(machine.devices, rings.fds, tuple(packages)))
        workers.watch = steps.watch

        def watch(seconds: float) -> None:
            once()
            steps.watch(seconds)

        stack.enter_context(limited(watch=watch))
        calibration_s = dict[str, float]()
        pairs = [
            (part, Rounds(workers, machine, model, stamps, calibration_s, round_s, keep))
            for part, model in zip(parts, models, strict=True)
        ]
        loading = []
        for backend in dict.fromkeys(backends):
            steps.next()
            loading += [part.load(backend, rounds, part is parts[0]) for part, rounds in pairs]
        steps.next()
        for begun in loading:
            with suppress(AutosplitError):  # the first round fails too, and has the reason
                workers.results(begun)
        once()
        for device in machine.devices:  # one after the other: later runs repeat it with idle neighbours too
            calibration_s |= workers.call(MeasuringWorker.calibrate, {device.name: ()})
        work = [(part, rounds, group) for part, rounds in pairs for group in part.groups]
        for part, rounds, group in work:
            steps.next()
            part.time(group, rounds)
        if links:
            steps.next()
            parts[0].keep_links(measure_links(rings.without(parts[0].devices_left_out), workers, others))
        for part, rounds, group in work * num_again:
            steps.next()
            part.time_again(group, rounds)
        for part, rounds, group in work:
            if part.is_slowed(group):
                part.time_again(group, rounds)
    for part, rounds in pairs:
        part.end(rounds.notes)


def _planned(backends: list[str], num_models: int, round_s: float, links: bool, num_again: int) -> list[tuple[str, float]]:
    """The steps of a measurement, and the seconds that they usually take; ``backends``: of each group of each model."""
    planned = [("starting the workers", 2.0)] if backends else []
    planned += [(f"preparing {one}", num_models * (1.0 if one == "eager" else 6.0)) for one in dict.fromkeys(backends)]
    planned += [("calibrating", 1.0)] if backends else []
    planned += [(f"timing {backend}", round_s + ALONE_S + CUT_S + 2.0) for backend in backends]
    planned += [("measuring the links", 2.0)] if links else []
    return planned + [(f"timing {backend} once more", round_s / 2) for backend in backends * num_again]

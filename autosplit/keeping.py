"""Keep the stages and runs that were measured in the store of profiles, and find the profile of a plan there."""

from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from autosplit.backends.base import installed
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.setup import Setup
from autosplit.devices.discovering import absent_devices
from autosplit.generating.phases import PhaseProfile
from autosplit.measuring.settings import link_stamp, stamps_of
from autosplit.measuring.store import open_store
from autosplit.memory.stages import with_footprints
from autosplit.reports.accuracy import run_of, runs_of_report
from autosplit.reports.outcomes import PLAN
from autosplit.reports.runreport import RunReport
from autosplit.tracing.capturing import Traced
from autosplit.tracing.family import Family
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from autosplit.values.profile import Profile
from autosplit.values.samples import Setting, backend_in

if TYPE_CHECKING:
    # Solvers and Optuna take 1.3 s to load; running a plan needs none of them.
    from autosplit.searching.candidates import SearchResult


def stored_profile(traced: Traced, plan: Plan, machine: Machine, setup: Setup) -> Profile | None:
    """The stored profile of a model for this machine, these versions and the plan's precision; None if there is none.

    There is none where a device is not here: nothing says which of the stored measurements are of such a device.
    """
    if setup.store is None or setup.hosts is not None or absent_devices(machine):
        return None
    store = open_store(setup.store)
    settings = [Setting(device.name, backend, 1) for device in machine.devices for backend in installed()]
    stamped = stamps_of(machine, settings, plan.precision)
    stamps = {setting.backend: stamp for setting, stamp in stamped.items()}
    profile = store.load(traced.graph, stamps, plan.precision)
    for precision in dict.fromkeys(stage.precision for stage in plan.stages if stage.precision is not None):
        its = {backend: replace(stamp, precision=precision) for backend, stamp in stamps.items()}
        found = store.load(traced.graph, its, precision).measured
        own = {setting._replace(backend=backend_in(setting.backend, precision)): one for setting, one in found.items()}
        profile = replace(profile, measured={**profile.measured, **own})
    return profile.with_links(store.links(link_stamp(stamped))) if profile.measured else None


def keep_runs(report: RunReport, setup: Setup) -> tuple[str, ...]:
    """Store predicted beside measured of every run of a report. Returns: the fault, if any."""
    if setup.store is None:
        return ()
    notes: list[str] = []
    with open_store(setup.store).noted(notes) as store:
        store.add_runs(runs_of_report(report, now()))
    return tuple(notes)


def keep_search(found: "SearchResult", setup: Setup) -> tuple[str, ...]:
    """Store the stages and runs that a search measured, so that the next search begins with them. Returns: the fault, if any."""
    if setup.store is None or found.profile.shapes is not None:  # means under a traffic say nothing of other requests
        return ()
    notes: list[str] = []
    ran = [(trial.plan, trial.outcome) for trial in found.trials if trial.outcome is not None]
    runs = [run_of("searched", found.traced.graph.name, PLAN, plan, outcome, now()) for plan, outcome in ran]
    settings = [stage.setting for stage in found.profile.stages if stage.setting.precision is None]  # the store has one precision
    with open_store(setup.store).noted(notes) as store:
        store.save(found.traced.graph, found.profile, dict.fromkeys(settings))
        store.add_runs(run for run in runs if run is not None)
    return tuple(notes)


def keep_footprints(family: Family, profile: Profile | None, footprints: Footprints, setup: Setup) -> tuple[str, ...]:
    """Store the memory of workers of a generator beside the times of its largest step. Returns: the fault, if any."""
    if setup.store is None or not isinstance(profile, PhaseProfile):
        return ()
    notes, times = list[str](), profile.phases[max(profile.phases)]
    kept = with_footprints(times, footprints.of(family.variants[0]))
    fresh = [setting for setting, one in kept.measured.items() if one is not times.measured[setting]]
    with open_store(setup.store).noted(notes) as store:
        store.save(family.graph, kept, fresh)
    return tuple(notes)


def now() -> str:
    """The date and time, with which measurements and runs are stamped."""
    return datetime.now(UTC).isoformat(timespec="seconds")

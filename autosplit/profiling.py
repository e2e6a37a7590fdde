"""Profiles of traces: measured on this machine or on hosts, or estimated where devices are not here."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from autosplit.deploying.setup import Setup
from autosplit.devices.discovering import absent_devices
from autosplit.planning import estimating
from autosplit.preloading import load_planner
from autosplit.progress import progress_shown
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_device
from autosplit.values.profile import Profile


def profiles_of(
    traces: Sequence[Traced], machine: Machine, setup: Setup, then_search: Constraints | None = None
) -> list[Profile]:
    """The profile of each trace, as for ``api.measure``. Those that are measured here take turns in the same rounds."""
    from autosplit.measuring.profiler import measure_together
    from autosplit.measuring.store import open_store

    store = None if setup.store is None else open_store(setup.store)
    if absent_devices(machine) or any(device.speed for device in machine.devices):
        return [_estimated(one, machine, setup) for one in traces]
    with progress_shown(setup.progress) as progress:
        if setup.hosts is not None:
            progress("profile", 0.0, "measuring on the hosts")
            root = None if store is None else store.root
            found = [setup.hosts.measure(one, setup.considered, setup.precision, root, setup.remeasure) for one in traces]
            progress("profile", 1.0, "done")
            return found
        return measure_together(
            traces,
            machine,
            setup.considered,
            store=store,
            remeasure=setup.remeasure,
            precision=setup.precision,
            workspace=setup.workspace,
            progress=progress,
            meanwhile=(lambda: None) if then_search is None else load_planner,
        )


def _estimated(traced: Traced, machine: Machine, setup: Setup) -> Profile:
    """The profile of a machine of which some devices are not here, or have a stated speed. The others are measured.

    Raises: ProfileError: the times of a device are not known. UsageError: a table lacks ops.
    """
    from autosplit.measuring.store import open_store, user_root

    absent = absent_devices(machine)
    estimating.require_costs(machine, absent, setup.profile_of)
    profile = Profile.empty(traced.graph, setup.precision)
    there = [name for name in estimating.sources(machine) if name not in absent]
    if there:
        known = {device.name: replace(device, speed=None) for device in machine.devices}
        [profile] = profiles_of([traced], Machine.of(known.get(name) or parse_device(name) for name in there), setup)
    unstated = [machine[name] for name in absent if machine[name].speed is None]
    if unstated:
        load = partial(open_store(setup.store or user_root()).load, traced.graph, precision=setup.precision)
        stamps = [one.provenance for one in load().measured.values()]
        machines = sorted({stamp.accelerator.get("name", stamp.cpu) for stamp in stamps})
        others = f" (stored: {', '.join(machines) or 'none'})"
        profile = estimating.as_measured_elsewhere(profile, load(of=setup.profile_of), unstated, setup.profile_of, others)
    return estimating.estimated(profile, traced.graph, machine)

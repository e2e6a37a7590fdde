"""Profiles of traces: measured on this machine or on hosts, or estimated where devices are not here."""

from collections.abc import Sequence

from autosplit.absent import estimated_profile
from autosplit.deploying.setup import Setup
from autosplit.devices.discovering import absent_devices
from autosplit.preloading import load_planner
from autosplit.progress import progress_shown
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile


def profiles_of(
    traces: Sequence[Traced], machine: Machine, setup: Setup, then_search: Constraints | None = None
) -> list[Profile]:
    """The profile of each trace, as for ``api.measure``. Those that are measured here take turns in the same rounds."""
    from autosplit.measuring.profiler import measure_together
    from autosplit.measuring.store import open_store

    store = None if setup.store is None else open_store(setup.store)
    if absent_devices(machine) or any(device.speed for device in machine.devices):
        return [estimated_profile(one, machine, setup, profiles_of) for one in traces]
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

"""Devices that are not here: a profile with estimates for them, and plans that say so."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from autosplit.deploying.setup import Setup
from autosplit.devices.discovering import absent_devices
from autosplit.measuring.store import open_store, user_root
from autosplit.planning import estimating
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import ON_ESTIMATES, Plan
from autosplit.values.profile import Profile


def estimated_profile(traced: Traced, machine: Machine, setup: Setup, measure: Callable[..., list[Profile]]) -> Profile:
    """The profile of a machine of which some devices are not here, or have a stated speed.

    ``measure`` is ``profiling.profiles_of``, which measures the others.

    Raises: ProfileError: the times of a device are not known. UsageError: a table lacks ops.
    """
    absent = absent_devices(machine)
    estimating.require_costs(machine, absent, setup.profile_of)
    profile = Profile.empty(traced.graph, setup.precision)
    there = [name for name in estimating.sources(machine) if name not in absent]
    if there:
        known = {device.name: replace(device, speed=None) for device in machine.devices}
        [profile] = measure([traced], Machine.of(known.get(name) or parse_device(name) for name in there), setup)
    unstated = [machine[name] for name in absent if machine[name].speed is None]
    if unstated:
        load = partial(open_store(setup.store or user_root()).load, traced.graph, precision=setup.precision)
        stamps = [one.provenance for one in load().measured.values()]
        machines = sorted({stamp.accelerator.get("name", stamp.cpu) for stamp in stamps})
        others = f" (stored: {', '.join(machines) or 'none'})"
        profile = estimating.as_measured_elsewhere(profile, load(of=setup.profile_of), unstated, setup.profile_of, others)
    return estimating.estimated(profile, traced.graph, machine)


def with_estimates(plan: Plan, profile: Profile) -> Plan:
    """The plan, whose method says for which of its devices the times were not measured."""
    guessed = {setting.device for setting, measured in profile.measured.items() if measured.is_estimate}
    named = [name for name in plan.devices if name in guessed]
    method = plan.method.partition(f", {ON_ESTIMATES}")[0]
    return replace(plan, method=f"{method}, {ON_ESTIMATES} {', '.join(named)}" if named else method)

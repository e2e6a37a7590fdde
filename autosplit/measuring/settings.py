"""The settings to measure: which backends, devices and thread counts there are, and which are left out with a note."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

from autosplit.backends.base import get_backend, require_device, require_precision
from autosplit.devices import discovering
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.limits import affinity
from autosplit.errors import BRIEF, BackendError, DeviceError, UsageError, listed, refusals
from autosplit.values.machine import Device, Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision, Provenance, Setting

WEIGHTS_SHARE = 0.4
"""Share of an accelerator's free memory for the weights that it measures at once, twice; the rest is for values."""

MAX_AT_ONCE = 16
"""Devices that time a model at once; more would need more memory than a pipeline of the model does."""


def wanted_settings(machine: Machine, backends: Sequence[str], precision: Precision) -> tuple[list[Setting], list[str]]:
    """A setting for each backend and device with a thread for each core and with one, and a note on each that is left out.

    Raises:
        UsageError: no backend, or an unknown precision.
        DeviceError: a device that is not here or cannot be measured.
        BackendError: no backend computes in the precision, or none runs on a device.
    """
    if not isinstance(machine, Machine):
        raise UsageError(
            f"machine must be a Machine, but is {BRIEF.repr(machine)}; machine_for('cpu:0,cpu:1') makes one of names"
        )
    if precision not in get_args(Precision):
        raise UsageError(f"precision must be one of {', '.join(get_args(Precision))}, but is {BRIEF.repr(precision)}")
    if not listed("backends", backends, str):
        raise UsageError("no backend is named; name one, such as eager")
    discovering.check_here(machine)
    for device in machine.devices:
        if device.kind == "null":
            raise DeviceError(
                f"device '{device.name}' cannot be measured: it is no hardware. Profile.given takes seconds of its ops"
            )
    faults = {backend: _fault(require_precision, get_backend(backend), precision) for backend in backends}
    able = [backend for backend, fault in faults.items() if not fault]
    notes = [f"{backend} is left out: {fault}" for backend, fault in faults.items() if fault]
    if not able:
        raise BackendError("; ".join(faults.values()))
    for device in machine.devices:
        reasons = [reason for backend in able if (reason := _refusal(backend, device))]
        if len(reasons) == len(able):
            raise BackendError(f"no backend is left for '{device.name}': {'; '.join(reasons)}")
        notes += reasons
    counts = {device.name: sorted({1, max(1, len(device.cores))}, reverse=True) for device in machine.devices}
    places = [(backend, device) for backend in able for device in machine.devices if not _refusal(backend, device)]
    settings = [Setting(device.name, backend, count) for backend, device in places for count in counts[device.name]]
    return list(dict.fromkeys(settings)), notes


def _refusal(backend: str, device: Device) -> str:
    """The reason why a backend does not run on a device; '' if it does."""
    if device.backends and backend not in device.backends:
        return f"{backend} is left out on '{device.name}', whose backends are {', '.join(device.backends)}"
    return _fault(require_device, get_backend(backend), device.name)


def _fault(require: Callable[..., None], *arguments: object) -> str:
    """The text of the BackendError that a check raises; '' if it raises none."""
    try:
        require(*arguments)
    except BackendError as failure:
        return str(failure)
    return ""


def stamps_of(machine: Machine, settings: Sequence[Setting], precision: Precision) -> dict[Setting, Provenance]:
    """Setting to the provenance of a measurement made here, without date. An accelerator's calibration is of now."""
    cores = affinity()
    here = Provenance(discovering.cpu_name(), len(cores), discovering.caches(cores[0]), precision=precision)
    facts = discovering.facts_of(tuple(device.name for device in machine.devices if is_accelerator(device)))
    stamps = {}
    for setting in settings:
        stamps[setting] = replace(here, versions=discovering.versions([setting.backend]))
        if found := facts.get(setting.device):
            stamps[setting] = replace(stamps[setting], accelerator=found.identity, calibration_s=found.calibration_s)
    return stamps


def piece_bytes_of(machine: Machine, weight_bytes: int) -> dict[str, int]:
    """Each accelerator that has no room to measure a model with so many bytes of weights, and the bytes that it measures at once.

    A measurement holds its weights twice: as they will run, and op by op.
    """
    facts = discovering.facts_of(tuple(device.name for device in machine.devices if is_accelerator(device)))
    rooms = {name: int(WEIGHTS_SHARE * (one.free_bytes - one.context_bytes)) for name, one in facts.items()}
    return {name: max(1, room) for name, room in rooms.items() if room < weight_bytes}


def link_stamp(stamps: Mapping[Setting, Provenance]) -> Provenance:
    """The provenance of links measured now, with what identifies each accelerator under its name."""
    identity = {f"{setting.device} {key}": value for setting, stamp in stamps.items() for key, value in stamp.accelerator.items()}
    return replace(next(iter(stamps.values())), accelerator=identity, calibration_s=0.0)


def groups_of(machine: Machine, settings: Iterable[Setting]) -> list[list[Setting]]:
    """The settings in groups to be timed at once.

    A group has one backend and one thread count for each of up to ``MAX_AT_ONCE`` devices without a core in common.
    """
    rows: dict[tuple[str, int], list[Setting]] = {}
    num_counts: Counter[tuple[str, str]] = Counter()
    for setting in settings:
        rows.setdefault((setting.backend, num_counts[setting.device, setting.backend]), []).append(setting)
        num_counts[setting.device, setting.backend] += 1
    groups = []
    for row in rows.values():
        for layout in machine.layouts:
            names = {device.name for device in layout.devices}
            together = [setting for setting in row if setting.device in names]
            row = [setting for setting in row if setting.device not in names]
            groups += [together[start : start + MAX_AT_ONCE] for start in range(0, len(together), MAX_AT_ONCE)]
    return groups


def refused_ops(profile: Profile, wanted: Sequence[Setting]) -> list[str]:
    """A note on each backend that refuses ops, which stages of another backend run.

    Raises: BackendError: every backend that was measured on a device refuses an op.
    """
    for device in dict.fromkeys(setting.device for setting in wanted):
        there = [profile.measured[one].refused for one in wanted if one.device == device and one in profile.measured]
        if stuck := set.intersection(*map(set, there)) if there else set():
            raise BackendError(f"no backend is left on '{device}' for {refusals({op: there[0][op] for op in stuck})}; add eager")
    notes = []
    for backend in dict.fromkeys(setting.backend for setting in wanted):
        if refused := profile.refused(backend):
            notes.append(f"{backend} refuses {refusals(refused)}; stages of another backend run what it refuses")
    return notes

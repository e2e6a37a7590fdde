"""What a measurement is asked for: which settings there are, which backends and devices are left out of them, and their stamp."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosplit.backends.base import get_backend, require_device, require_precision
from autosplit.devices import discovering
from autosplit.devices.accelerators import is_accelerator
from autosplit.devices.limits import affinity
from autosplit.errors import BackendError, DeviceError, UsageError, listed, refusals
from autosplit.values.machine import Device, Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision, Provenance, Setting


def require_measurable(machine: Machine, backends: Sequence[str]) -> None:
    """Raise UsageError or DeviceError unless something can be measured on these devices."""
    if not listed("backends", backends, str):
        raise UsageError("no backend is named; name one, such as eager")
    discovering.check_here(machine)
    for device in machine.devices:
        if device.kind != "cpu" and not is_accelerator(device):
            raise DeviceError(
                f"device '{device.name}' cannot be measured: only CPU core sets and CUDA devices can. Profile.given "
                "takes seconds of its ops"
            )


def able_backends(backends: Sequence[str], precision: Precision) -> tuple[list[str], list[str]]:
    """The backends that compute in a precision, and a note on each of the others. Raises: BackendError: none does."""
    able, notes = [], []
    for backend in backends:
        try:
            require_precision(get_backend(backend), precision)
        except BackendError as failure:
            notes.append(f"{backend} is left out: {failure}")
            if len(notes) == len(backends):
                raise
        else:
            able.append(backend)
    return able, notes


def refused_devices(machine: Machine, backends: Sequence[str]) -> list[str]:
    """A note on each device that a backend does not run on. Raises: BackendError: no backend runs on a device."""
    notes = []
    for device in machine.devices:
        refusals = [refusal for backend in backends if (refusal := _refusal(backend, device))]
        if len(refusals) == len(backends):
            raise BackendError(f"no backend is left for '{device.name}': {'; '.join(refusals)}")
        notes += refusals
    return notes


def settings_of(machine: Machine, backends: Sequence[str], threads: Mapping[str, Sequence[int]] | None) -> list[Setting]:
    """A setting for each backend, each device that it runs on, and each number of threads.

    Raises: UsageError: a device has not so many cores.
    """
    settings = []
    for backend in backends:
        for device in machine.devices:
            if _refusal(backend, device):
                continue
            for count in (threads or {}).get(device.name, [max(1, len(device.cores))]):
                if not 1 <= count <= max(1, len(device.cores)):
                    raise UsageError(f"device '{device.name}' has {len(device.cores)} cores, so it cannot run {count} threads")
                settings.append(Setting(device.name, backend, count))
    return list(dict.fromkeys(settings))


def handed_over(profile: Profile, wanted: Sequence[Setting]) -> list[str]:
    """A note on each backend that refuses ops, which stages of another backend run then.

    Raises: BackendError: an op is refused by every backend that was measured on a device.
    """
    for device in dict.fromkeys(setting.device for setting in wanted):
        known = [setting for setting in wanted if setting.device == device and setting in profile.measured]
        there = [profile.measured[setting].refused for setting in known]
        if stuck := set.intersection(*(set(refused) for refused in there)) if there else set():
            raise BackendError(f"no backend is left on '{device}' for {refusals({op: there[0][op] for op in stuck})}; add eager")
    notes = []
    for backend in dict.fromkeys(setting.backend for setting in wanted):
        if refused := profile.refused(backend):
            notes.append(f"{backend} refuses {refusals(refused)}; stages of another backend run what it refuses")
    return notes


def stamps_of(backends: Sequence[str], precision: Precision) -> dict[str, Provenance]:
    """For each backend what a measurement made here is stamped with, but for date and canary."""
    cores = affinity()
    here = Provenance(discovering.cpu_name(), len(cores), discovering.caches(cores[0]), precision=precision)
    return {backend: replace(here, versions=discovering.versions([backend])) for backend in backends}


def _refusal(backend: str, device: Device) -> str:
    """Why a backend does not run on a device; '' if it does."""
    if device.backends and backend not in device.backends:
        return f"{backend} is left out on '{device.name}', whose backends are {', '.join(device.backends)}"
    try:
        require_device(get_backend(backend), device.name)
    except BackendError as failure:
        return str(failure)
    return ""

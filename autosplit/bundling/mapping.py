"""Map the devices of a plan to the devices of the machine that loads its bundle."""

from collections.abc import Sequence

from autosplit.bundling.manifest import Part
from autosplit.values.machine import Device


def mapped_devices(parts: Sequence[Part], there: Sequence[Device]) -> list[tuple[Device, ...]]:
    """The devices of each part, one for each replica.

    A device that the plan names and that is there stays. Otherwise the plan's devices, in the order of their first part, are
    mapped to the present devices: several to one where there are fewer, one each where there are enough. Each device that is
    left over becomes a replica of the part with the most seconds for each replica.
    """
    planned = list(dict.fromkeys(name for part in parts for name in part.devices))
    by_name = {device.name: device for device in there}
    if all(name in by_name for name in planned):
        target = {name: by_name[name] for name in planned}
    else:
        count = min(len(planned), len(there))
        target = {name: there[position * count // len(planned)] for position, name in enumerate(planned)}
    found = [list(dict.fromkeys(target[name] for name in part.devices)) for part in parts]
    used = {device for devices in found for device in devices}
    for device in there:
        if device not in used:
            loads_s = [part.load_s / len(devices) for part, devices in zip(parts, found, strict=True)]
            found[loads_s.index(max(loads_s))].append(device)
    return [tuple(devices) for devices in found]

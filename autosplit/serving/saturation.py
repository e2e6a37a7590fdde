"""Replicas of a whole network on the idle devices of a host."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from autosplit.running.stage import StagePlacement
from autosplit.values.machine import Device


def saturated(stages: Sequence[StagePlacement], idle: Mapping[Device, int | None]) -> list[StagePlacement]:
    """The stages with as many replicas of the whole network as fit on idle devices.

    Each replica has, for each device of the network, a device of the same kind with the same number of cores.

    Args:
        idle: the devices that no network uses, each with the bytes that it can hold; None for no limit.
    """
    num_bytes: dict[Device, int] = {}
    for stage in stages:
        for device in dict.fromkeys(stage.devices):
            num_bytes[device] = num_bytes.get(device, 0) + (stage.needs_bytes(device.name) or 0)
    left = dict(idle)
    devices = {stage.name: stage.devices for stage in stages}
    while True:
        copy: dict[Device, Device] = {}
        for device, needed in num_bytes.items():
            alike = [one for one in left if (one.kind, len(one.cores)) == (device.kind, len(device.cores))]
            fitting = [one for one in alike if (room := left[one]) is None or room >= needed]
            if not fitting:
                return [replace(stage, devices=devices[stage.name]) for stage in stages]
            copy[device] = fitting[0]
            del left[fitting[0]]
        devices = {stage.name: (*devices[stage.name], *(copy[one] for one in stage.devices)) for stage in stages}

"""The machine file: devices with their limits, and links, as a person writes them (YAML)."""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt

from autosplit.errors import DeviceError, UsageError, raise_faults
from autosplit.files import read_data, validated
from autosplit.parsing import shown
from autosplit.values.links import Link, bus
from autosplit.values.machine import (
    HOST,
    HOST_KINDS,
    MAX_DEVICES,
    Device,
    Machine,
    Speed,
    kind_of,
    parse_bytes,
    parse_device,
    span,
)
from autosplit.values.samples import backend_fault


def _read_by(parse: Callable[[Any], Any]) -> AfterValidator:
    """A check of one field, so that all faults of the file are named at once."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


def _require_backends(names: Sequence[str]) -> None:
    if fault := backend_fault(*names):
        raise UsageError(fault)


TIMES = re.compile(r"\s*(\d{1,9}(?:\.\d{1,9})?)\s*x\s*(\S+)\s*")
"""``3.5 x cpu:0``."""


def _parse_times(text: str) -> Speed:
    """The speed of a device as a multiple of another one's. Raises: UsageError: another form."""
    match = TIMES.fullmatch(text)
    if not match or not float(match[1]):
        raise UsageError(f"speed {shown(text)} is not understood; write 3.5 x cpu:0")
    return Speed(times=float(match[1]), of=parse_device(match[2]).name)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Roofline(_Strict):
    flops: float = Field(gt=0, allow_inf_nan=False)
    bytes_per_s: float = Field(gt=0, allow_inf_nan=False)


class _Table(_Strict):
    table: str


class _Seconds(_Strict):
    seconds: dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class _DeviceEntry(_Strict):
    name: Annotated[str, _read_by(parse_device)]
    memory: Annotated[str | StrictInt, _read_by(parse_bytes)] | None = None
    count: int = Field(default=1, ge=1, le=MAX_DEVICES)
    operators: tuple[str, ...] = ()
    backends: Annotated[tuple[str, ...], _read_by(_require_backends)] = ()
    dtypes: tuple[str, ...] = ()
    max_subgraphs: int | None = Field(default=None, ge=1)
    min_ops: int = Field(default=1, ge=1)
    shares: str = ""
    one_model: bool = False
    speed: Annotated[str, _read_by(_parse_times)] | _Roofline | _Table | None = None

    def speed_in(self, folder: Path) -> Speed | None:
        """The stated speed. Raises: UsageError: its table, a file beside the machine file, is not op pattern to seconds."""
        match self.speed:
            case str():
                return _parse_times(self.speed)
            case _Roofline():
                return Speed(flops=self.speed.flops, bytes_per_s=self.speed.bytes_per_s)
            case _Table():
                path = folder / self.speed.table
                found = {"seconds": read_data(path, "table of seconds", UsageError)}
                return Speed(op_s=tuple(validated(_Seconds, found, UsageError, f"table '{path}' does not fit").seconds.items()))
        return None

    def devices(self) -> list[Device]:
        """This device and the ones after it, ``count`` in all: ``cpu:0-1`` is followed by ``cpu:2-3``, ``cuda:0`` by ``cuda:1``.

        Raises: DeviceError: a number is too large.
        """
        first = parse_device(self.name)
        width = max(first.cores) - min(first.cores) + 1 if first.cores else 0
        given = self.model_dump(exclude={"name", "memory", "count", "speed"})
        given["memory_bytes"], made = parse_bytes(self.memory) if self.memory is not None else None, []
        for number in range(self.count):
            cores = [core + number * width for core in first.cores]
            device = parse_device(f"{first.kind}:{span(cores, '+') or first.index + number}") if number else first
            made.append(replace(device, **given))
        return made


class _LinkEntry(_Strict):
    source: str
    target: str
    latency_s: float = Field(default=35e-6, ge=0, allow_inf_nan=False)
    bytes_per_s: float = Field(ge=1)


class _BusEntry(_Strict):
    devices: list[str] = Field(min_length=1)
    bytes_per_s: float = Field(ge=1)
    peer_to_peer: bool = False


class _MachineFile(_Strict):
    devices: list[_DeviceEntry] = Field(max_length=MAX_DEVICES)
    links: list[_LinkEntry] = []
    buses: list[_BusEntry] = []


def _link(entry: _LinkEntry) -> Link:
    """The link of an entry. An accelerator copies weights from the host at the same rate."""
    copies = entry.source == HOST and kind_of(entry.target) not in HOST_KINDS
    rate = 1 / entry.bytes_per_s
    return Link(entry.source, entry.target, entry.latency_s, 0.0, rate, 0.0, 0.0, pinned_s_per_byte=rate if copies else 0.0)


def read_machine(path: Path) -> Machine:
    """The machine that a YAML file describes.

    ``devices: [{name: cpu:0, memory: 300MB, count: 2, operators: [aten.conv*], backends: [onnxruntime, eager]}]``; all fields but
    the name may be left out. ``links: [{source: cpu:0, target: cpu:1, bytes_per_s: 1e9}]``: the sender spends the time. A link of
    the file takes precedence over a measured one. ``buses: [{devices: [cuda:0, cuda:1], bytes_per_s: 2.5e10}]``: all bytes that
    enter these devices share one bandwidth, and so do all that leave them; with ``peer_to_peer: true`` values from one of them to
    another do not count. An accelerator may have rules: ``dtypes: [float32]``, ``max_subgraphs: 8``, ``min_ops: 3``,
    ``shares: cpu:0`` (it uses the memory of that device), ``one_model: true``. A device that is not here may have a ``speed``:
    ``3.5 x cpu:0``, ``{flops: 1e14, bytes_per_s: 9e11}``, or ``{table: seconds.json}`` (op pattern to seconds).

    Raises: DeviceError, UsageError: every fault of the file.
    """
    data = read_data(path, "machine", UsageError)
    content = validated(_MachineFile, data, UsageError, f"machine file '{path}' is not understood")
    if (total := sum(entry.count for entry in content.devices)) > MAX_DEVICES:
        raise DeviceError(f"machine file '{path}' has {total} devices, and at most {MAX_DEVICES} are allowed")
    devices = [replace(device, speed=entry.speed_in(path.parent)) for entry in content.devices for device in entry.devices()]
    pairs = [(entry.source, entry.target) for entry in content.links]
    faults = [f"the link from '{a}' to '{b}' is given {n} times" for (a, b), n in Counter(pairs).items() if n > 1]
    links = [_link(entry) for entry in content.links]
    names = [device.name for device in devices]
    wires = [
        wire
        for one in content.buses
        for wire in bus(one.devices, [name for name in names if name not in one.devices], 1 / one.bytes_per_s, one.peer_to_peer)
    ]
    machine = Machine.of(devices, links, wires)
    named = [end for ends in (*machine.links, *(one.devices for one in content.buses)) for end in ends]
    faults += [f"'{end}' is not among its devices" for end in named if end not in (HOST, *names)]
    raise_faults(DeviceError, f"the links of machine file '{path}' do not fit", list(dict.fromkeys(faults)))
    return machine

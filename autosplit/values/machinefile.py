"""The machine file: devices, memory caps and links as a person writes them (YAML)."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StrictInt

from autosplit.errors import DeviceError, UsageError, raise_faults
from autosplit.files import read_data, validated
from autosplit.values.machine import HOST, Link, Machine, parse_bytes, parse_device


def _read_by(parse: Callable[[Any], Any]) -> AfterValidator:
    """What cannot be read is a fault of its field, so that all faults are named at once."""

    def check(value: Any) -> Any:
        parse(value)
        return value

    return AfterValidator(check)


class _DeviceEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: Annotated[str, _read_by(parse_device)]
    memory: Annotated[str | StrictInt, _read_by(parse_bytes)] | None = None


class _LinkEntry(BaseModel):
    model_config = ConfigDict(extra="forbid")
    source: str
    target: str
    latency_s: float = Field(default=35e-6, ge=0, allow_inf_nan=False)
    bytes_per_s: float = Field(ge=1)


class _MachineFile(BaseModel):
    model_config = ConfigDict(extra="forbid")
    devices: list[_DeviceEntry]
    links: list[_LinkEntry] = []


def read_machine(path: Path) -> Machine:
    """The machine that a YAML file describes: ``devices: [{name: cpu:0, memory: 300MB}]``, ``links: [...]`` if known.

    A link's ``bytes_per_s`` is spent by the sender. Such a link counts, also where another one was measured.

    Raises: DeviceError, UsageError: every fault of the file.
    """
    data = read_data(path, "machine", UsageError)
    content = validated(_MachineFile, data, UsageError, f"machine file '{path}' is not understood")
    devices = [parse_device(entry.name) for entry in content.devices]
    pairs = [(entry.source, entry.target) for entry in content.links]
    faults = [f"the link from '{a}' to '{b}' is given {n} times" for (a, b), n in Counter(pairs).items() if n > 1]
    links = [Link(e.source, e.target, e.latency_s, 0.0, 1 / e.bytes_per_s, 0.0, 0.0) for e in content.links]
    machine = Machine.of(devices, links)
    known = {HOST, *(device.name for device in devices)}
    faults += [f"'{end}' is not among its devices" for ends in machine.links for end in ends if end not in known]
    raise_faults(DeviceError, f"the links of machine file '{path}' do not fit", list(dict.fromkeys(faults)))
    caps = zip(devices, content.devices, strict=True)
    return machine.with_memory({device.name: parse_bytes(entry.memory) for device, entry in caps if entry.memory is not None})

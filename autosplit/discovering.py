"""The devices of this machine: cores within affinity and container quota, CUDA devices, memory, caches, backends installed."""

import importlib.metadata
import importlib.util
import math
import os
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autosplit import tables
from autosplit.errors import DeviceError, UsageError, raise_faults
from autosplit.limits import affinity, cpu_quota, memory_limit_bytes, read_words, usable_cores
from autosplit.machine import Device, Machine, parse_bytes, parse_device, read_machine

CPUS = Path("/sys/devices/system/cpu")

PACKAGES: Mapping[str, tuple[str, ...]] = {
    "eager": ("torch",),
    "onnxruntime": ("onnxruntime", "onnx", "onnxscript"),
    "openvino": ("openvino",),
    "inductor": ("torch",),
}
"""Backend name to the packages it needs, the runtime itself first."""

EXTRAS: Mapping[str, str] = {"onnxruntime": "onnx", "openvino": "openvino"}


@dataclass(frozen=True)
class Description:
    """What this machine is, for ``autosplit devices``: facts, and one row for each device and backend."""

    facts: Mapping[str, Any]
    devices: tuple[Mapping[str, Any], ...]
    backends: tuple[Mapping[str, Any], ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"machine": dict(self.facts), "devices": [*map(dict, self.devices)], "backends": [*map(dict, self.backends)]}

    def frame(self) -> Any:
        """The devices as a pandas DataFrame indexed by name."""
        return tables.frame(self.devices, index="device")

    def _repr_html_(self) -> str:
        facts = ", ".join(f"{key.replace('_', ' ')}: {value}" for key, value in self.facts.items())
        return tables.html(self.devices, facts) + tables.html(self.backends, "backends")


def discover() -> Machine:
    """This machine with its default devices: each usable CPU core alone, then each CUDA device.

    Usable is what the process may run on (its affinity), and no more cores than the container's CPU quota pays for.
    """
    cpus = [parse_device(f"cpu:{core}") for core in usable_cores()]
    return Machine.of([*cpus, *cuda_devices()])


def machine_for(
    devices: str | None = None, machine_file: Path | None = None, memory: str | Mapping[str, str | int] | None = None
) -> Machine:
    """The machine that the user named, checked against this one.

    Args:
        devices: names with commas between, such as ``cpu:0,cpu:1`` or ``cpu:0-1,cuda:0``; by default all that are there.
        machine_file: a YAML file with devices, memory caps and links; not together with ``devices``.
        memory: caps, either one size for every device (``300MB``), sizes by device (``cpu:0=300MB,cpu:1=1GiB``), or a mapping.
    Raises:
        DeviceError: a core or CUDA device that is not here, more cores than the quota pays for, or an overlap.
        UsageError: both a list and a file, or a size that is not understood.
    """
    if devices is not None and machine_file is not None:
        raise UsageError("devices are given twice, by --devices and by a machine file; leave one of them out")
    if machine_file is not None:
        machine = read_machine(machine_file)
    elif devices is not None:
        machine = Machine.of([parse_device(name) for name in devices.split(",") if name.strip()])
    else:
        machine = discover()
    check_here(machine)
    return machine.with_memory(parse_memory(memory, machine)) if memory is not None else machine


def parse_memory(memory: str | Mapping[str, str | int], machine: Machine) -> dict[str, int]:
    """Device name to cap in bytes. Raises: UsageError: not a size, or a device named twice.

    >>> parse_memory("cpu:0=1KiB", Machine.of([parse_device("cpu:0"), parse_device("cpu:1")]))
    {'cpu:0': 1024}
    """
    if isinstance(memory, Mapping):
        return {name: parse_bytes(size) for name, size in memory.items()}
    if "=" not in memory:
        return dict.fromkeys((device.name for device in machine.devices), parse_bytes(memory))
    caps: dict[str, int] = {}
    for entry in memory.split(","):
        name, equals, size = entry.partition("=")
        if not equals or name.strip() in caps:
            raise UsageError(f"memory '{memory}' is not understood at '{entry}'; write 300MB, or cpu:0=300MB,cpu:1=1GiB")
        caps[name.strip()] = parse_bytes(size)
    return caps


def check_here(machine: Machine) -> None:
    """Raise DeviceError, with every fault, unless this machine has the devices; null devices are everywhere."""
    available = affinity()
    faults = []
    for device in machine.devices:
        absent = sorted(set(device.cores) - set(available)) if device.kind == "cpu" else []
        if absent:
            cores = ", ".join(map(str, absent))
            faults.append(f"device '{device.name}' names core {cores}, and this process may use cores {span(available)}")
    count = torch.cuda.device_count()
    for device in machine.devices:
        if device.kind == "cuda" and device.index >= count:
            faults.append(f"device '{device.name}' is not here: torch {torch.__version__} sees {count} CUDA devices")
    num_cores = sum(len(device.cores) for device in machine.devices if device.kind == "cpu")
    quota = cpu_quota()
    if quota is not None and not faults and num_cores > max(1, math.floor(quota)):
        faults.append(
            f"the devices hold {num_cores} cores, and the CPU quota of this container pays for {quota:g}; "
            f"name at most {max(1, math.floor(quota))}"
        )
    raise_faults(DeviceError, "the devices do not fit this machine", faults)


def cuda_devices() -> list[Device]:
    """A device for each CUDA device that torch sees, with its memory as the cap."""
    if not torch.cuda.is_available():
        return []
    return [
        Device(f"cuda:{index}", "cuda", index=index, memory_bytes=torch.cuda.get_device_properties(index).total_memory)
        for index in range(torch.cuda.device_count())
    ]


def cpu_name() -> str:
    """The processor's model name."""
    for line in _lines(Path("/proc/cpuinfo")):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def caches(core: int = 0, cpus: Path = CPUS) -> dict[str, int]:
    """Cache level to bytes as one core sees it, instruction caches left out.

    Every level that a kernel lists in ``/sys``, such as ``{"L1": 32768, "L2": 1048576, "L3": 33554432}``.
    """
    found = {}
    for folder in sorted((cpus / f"cpu{core}" / "cache").glob("index*")):
        kind, level, size = (read_words(folder / name) for name in ("type", "level", "size"))
        if kind and level and size and kind[0] != "Instruction":
            found[f"L{level[0]}"] = parse_bytes(size[0].replace("K", "Ki").replace("M", "Mi"))
    return found


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []


def versions(backends: Sequence[str] = ()) -> dict[str, str]:
    """Package name to installed version: torch, and what the named backends need. Nothing is imported for it."""
    names = dict.fromkeys(["torch", *(package for backend in backends for package in PACKAGES.get(backend, ()))])
    return {name: version for name in names if (version := _version(name))}


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def span(cores: Sequence[int]) -> str:
    """Cores as a person writes them.

    >>> span([0, 1, 2, 5])
    '0-2,5'
    """
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def describe() -> Description:
    """This machine as ``autosplit devices`` shows it."""
    quota = cpu_quota()
    facts = {
        "cpu": cpu_name(),
        "cores": span(affinity()),
        "cpu_quota": "none" if quota is None else f"{quota:g} cores",
        "memory": tables.bytes_text(memory_limit_bytes()),
        "caches": ", ".join(f"{level} {tables.bytes_text(size)}" for level, size in caches(affinity()[0]).items()) or "not known",
        "python": platform.python_version(),
    }
    rows = []
    for device in discover().devices:
        what = facts["cpu"] if device.kind == "cpu" else torch.cuda.get_device_name(device.index)
        memory = tables.bytes_text(device.memory_bytes) if device.memory_bytes else "the machine's"
        rows.append(
            {"device": device.name, "kind": device.kind, "what": what, "cores": span(device.cores) or "-", "memory": memory}
        )
    return Description(facts, tuple(rows), tuple(_backend_row(name) for name in PACKAGES))


def _backend_row(name: str) -> dict[str, str]:
    """Whether a backend's packages are there, from their metadata."""
    absent = [package for package in PACKAGES[name] if importlib.util.find_spec(package) is None]
    state = "installed"
    if absent:
        state = f"needs {', '.join(absent)}: pip install 'autosplit[{EXTRAS[name]}]'"
    elif name == "inductor" and not any(shutil.which(compiler) for compiler in (os.environ.get("CXX", "g++"), "clang++")):
        state = "needs a C++ compiler: install g++"
    return {"backend": name, "version": _version(PACKAGES[name][0]) or "-", "state": state}

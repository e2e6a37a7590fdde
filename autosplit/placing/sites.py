"""Site: the device, backend and precision of an op. Choice: a site with the reason why the op is there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from autosplit.errors import UsageError, close_names
from autosplit.values.machine import Machine
from autosplit.values.samples import Precision, backend_fault

AUTO = "auto"
"""The default that leaves an op to the planner."""

Kind = Literal["pattern", "copy", "default", "fallback", "planner", "plan"]
"""The rule that decided the site of an op."""

SiteText = str | Sequence[str]
"""``"cpu:1"``, ``("cpu:1", "openvino")`` or ``("cpu:1", "openvino", "bf16")``."""


@dataclass(frozen=True, slots=True)
class Site:
    """The device, the backend and the precision of an op."""

    device: str
    backend: str = "eager"
    precision: Precision = "f32"

    def __str__(self) -> str:
        return f"{self.device} ({self.backend}{'' if self.precision == 'f32' else f', {self.precision}'})"


@dataclass(frozen=True, slots=True)
class Choice:
    """The site of an op, the rule that decided it, and the reason in words."""

    site: Site
    kind: Kind
    reason: str


def usual_backend(machine: Machine, device: str) -> str:
    """The preferred backend of a device by the machine file, else eager."""
    backends = machine[device].backends
    return backends[0] if backends else "eager"


def parse_site(text: SiteText, machine: Machine) -> Site:
    """The site of a device, a backend and a precision; the last two may be left out.

    Raises: UsageError: a device that the machine does not have, an unknown backend or precision.
    """
    parts = tuple(text) if isinstance(text, Sequence) and not isinstance(text, str) else (text,)
    if not 1 <= len(parts) <= 3 or not all(isinstance(part, str) for part in parts):
        raise UsageError(f"{text!r} is not a site; write 'cpu:1', ('cpu:1', 'openvino') or ('cpu:1', 'openvino', 'bf16')")
    names = [device.name for device in machine.devices]
    if parts[0] not in names:
        raise UsageError(f"device '{parts[0]}' is not one of {', '.join(names)}{close_names(parts[0], names)}")
    backend = parts[1] if len(parts) > 1 else usual_backend(machine, parts[0])
    if fault := backend_fault(backend):
        raise UsageError(fault)
    allowed = machine[parts[0]].backends
    if allowed and backend not in allowed:
        raise UsageError(f"backend '{backend}' may not run on '{parts[0]}', which has {', '.join(allowed)}")
    if len(parts) > 2 and parts[2] not in get_args(Precision):
        raise UsageError(f"precision '{parts[2]}' is not one of {', '.join(get_args(Precision))}")
    return Site(parts[0], backend, cast(Precision, parts[2]) if parts[2:] else "f32")


def backends_named(patterns: Mapping[str, SiteText]) -> tuple[str, ...]:
    """The backends that a map of patterns names, each once.

    >>> backends_named({"a": "cpu:0", "b": ("cpu:1", "openvino", "bf16")})
    ('openvino',)
    """
    listed = (text for text in patterns.values() if isinstance(text, Sequence) and not isinstance(text, str))
    found = (str(text[1]) for text in listed if len(text) > 1)
    return tuple(dict.fromkeys(found))

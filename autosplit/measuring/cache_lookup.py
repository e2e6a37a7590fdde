"""Cache lookup: the stored measurements of a model that still hold here, with a note on each that does not, and why."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from autosplit.backends import conformance
from autosplit.measuring.calibration import DRIFT_LIMIT, drift, kernel_now_s
from autosplit.measuring.store import Store
from autosplit.tracing.capturing import Traced
from autosplit.values.graph import Graph
from autosplit.values.links import Link
from autosplit.values.machine import HOST, Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Footprint, Measured, Provenance, Setting


def look_up(traced: Traced, machine: Machine, store: Store, stamps: Mapping[Setting, Provenance]) -> Profile:
    """The stored measurements of the wanted settings on devices that are as fast as then. ``stamps`` tell of now."""
    stored = _load(traced.graph, store, stamps)
    refused = cache(lambda backend: conformance.refused(traced, backend))
    # notes of the store on wanted settings, and on whole files
    wanted = tuple(f"{setting}: " for setting in stamps)
    kept, notes = {}, [note for note in stored.notes if ": stored, but" not in note or note.startswith(wanted)]
    now_s = _calibrations_s(machine, stamps, stored)
    for setting, stamp in stamps.items():
        if setting not in stored.measured:
            continue
        then = stored.measured[setting].provenance
        if dict(then.accelerator) != dict(stamp.accelerator):
            there, here = (", ".join(identity.values()) for identity in (then.accelerator, stamp.accelerator))
            notes.append(f"{setting}: stored, but measured on {there}, and here it is {here}")
            continue
        off = drift(now_s[setting.device], then.calibration_s)
        if abs(off) > DRIFT_LIMIT:
            notes.append(
                f"{setting}: stored, but the calibration kernel takes {abs(off):.0%} {'more' if off > 0 else 'less'} time "
                f"than then (the limit is {DRIFT_LIMIT:.0%}), so it is measured again"
            )
        elif not _same_refusals(stored.measured[setting], refused(setting.backend)):
            notes.append(f"{setting}: stored, but it may run other ops now, so it is measured again")
        else:
            kept[setting] = stored.measured[setting]
    stages = tuple(stage for stage in stored.stages if stage.setting in kept)
    return replace(stored, measured=kept, stages=stages, notes=tuple(notes))


def footprints_of(graph: Graph, store: Store, stamps: Mapping[Setting, Provenance]) -> dict[Setting, Mapping[str, Footprint]]:
    """The stored footprints: a core of another speed than then changes the times, and not the memory."""
    return {setting: one.footprints for setting, one in _load(graph, store, stamps).measured.items()}


def _load(graph: Graph, store: Store, stamps: Mapping[Setting, Provenance]) -> Profile:
    precision = next(iter(stamps.values())).precision
    return store.load(graph, {setting.backend: stamp for setting, stamp in stamps.items()}, precision)


def _same_refusals(measured: Measured, wrong: Mapping[str, str]) -> bool:
    """Whether a backend may run the same ops as when it was measured; it was perhaps tried on further ops since."""
    then = measured.refused
    return {op for op, reason in then.items() if reason.startswith(conformance.WRONG)} <= wrong.keys() <= then.keys()


def look_up_links(machine: Machine, store: Store, stamp: Provenance) -> tuple[Link, ...]:
    """The stored links of the machine; none if one is missing or was measured before the host's time was."""
    names = {HOST, *(device.name for device in machine.devices)}
    found = {(link.source, link.target): link for link in store.links(stamp) if {link.source, link.target} <= names}
    cores = {device.name for device in machine.devices if device.kind == "cpu"}
    old = any(link.target == HOST and link.source in cores and not link.cold_receive_s for link in found.values())
    return tuple(found.values()) if not old and len(found) == len(names) * (len(names) - 1) else ()


def _calibrations_s(machine: Machine, stamps: Mapping[Setting, Provenance], stored: Profile) -> dict[str, float]:
    """Seconds of the calibration kernel now on every device that was measured before."""
    then_s: dict[str, list[float]] = {}
    now_s = {setting.device: stamp.calibration_s for setting, stamp in stamps.items() if stamp.accelerator}
    for setting in stamps:
        if setting in stored.measured and setting.device not in now_s:
            then_s.setdefault(setting.device, []).append(stored.measured[setting].provenance.calibration_s)
    return now_s | {device: kernel_now_s(machine[device].cores, min(seconds)) for device, seconds in then_s.items()}

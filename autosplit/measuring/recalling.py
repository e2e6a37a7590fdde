"""What the store holds of a model and is still true here; the notes say what is not, and why."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autosplit.devices.accelerators import Facts
from autosplit.measuring.canary import CANARY_LIMIT, drift, now_s
from autosplit.measuring.store import Store
from autosplit.values.graph import Graph
from autosplit.values.machine import HOST, Link, Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision, Provenance, Setting


def recall(
    graph: Graph,
    machine: Machine,
    wanted: Sequence[Setting],
    store: Store,
    stamps: Mapping[str, Provenance],
    precision: Precision,
    facts: Mapping[str, Facts],
) -> Profile:
    """What is stored of the wanted settings and what the canary finds unchanged, with notes on the rest.

    Args:
        graph: the model.
        machine: the devices.
        wanted: settings of them.
        store: where measurements are kept.
        stamps: what they would be stamped with now, by backend.
        precision: what they computed in.
        facts: what the accelerators are now.
    """
    stored = store.load(graph, stamps, precision)
    kept, notes = {}, [note for note in stored.notes if _concerns(note, wanted)]
    canaries = _canaries_s(machine, [setting for setting in wanted if setting.device not in facts], stored)
    for setting in wanted:
        measured = stored.measured.get(setting)
        if measured is None:
            continue
        now = facts.get(setting.device)
        if now is not None and now.identity != dict(measured.provenance.accelerator):
            then = ", ".join(measured.provenance.accelerator.values())
            notes.append(f"{setting}: stored, but measured on {then}, and here it is {', '.join(now.identity.values())}")
            continue
        off = drift(canaries[setting.device] if now is None else now.canary_s, measured.provenance.canary_s)
        if abs(off) > CANARY_LIMIT:
            notes.append(
                f"{setting}: stored, but the canary takes {abs(off):.0%} {'more' if off > 0 else 'less'} time than then "
                f"(the limit is {CANARY_LIMIT:.0%}), so it is measured again"
            )
        else:
            kept[setting] = measured
    stages = tuple(stage for stage in stored.stages if stage.setting in kept)
    return replace(stored, measured=kept, stages=stages, notes=tuple(notes))


def recall_links(machine: Machine, store: Store, stamp: Provenance) -> Iterable[Link] | None:
    """The machine's links as they are stored; None if one is not."""
    names = {HOST, *(device.name for device in machine.devices)}
    found = {(link.source, link.target): link for link in store.links(stamp) if {link.source, link.target} <= names}
    cores = {device.name for device in machine.devices if device.kind == "cpu"}
    if any(link.target == HOST and link.source in cores and not link.cold_receive_s for link in found.values()):
        return None  # measured before the host's time was
    return found.values() if len(found) == len(names) * (len(names) - 1) else None


def _canaries_s(machine: Machine, settings: Sequence[Setting], stored: Profile) -> dict[str, float]:
    """What the canary takes now on every device whose cores were measured before."""
    thens: dict[str, list[float]] = {}
    for setting in settings:
        if setting in stored.measured:
            thens.setdefault(setting.device, []).append(stored.measured[setting].provenance.canary_s)
    return {device: now_s(machine[device].cores, min(seconds)) for device, seconds in thens.items()}


def _concerns(note: str, wanted: Sequence[Setting]) -> bool:
    """Whether a note of the store is about a wanted setting, or about a whole file."""
    return ": stored, but" not in note or any(note.startswith(f"{setting}: ") for setting in wanted)

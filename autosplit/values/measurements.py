"""Measurements: everything that was measured of one model on the devices of one machine, as it was measured. No torch.

All samples are kept; the statistic is the median. Samples belong to an op's signature (all its occurrences together), or to
its name where the backend fuses ops. ``profile`` makes seconds for planners of them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, Self

from autosplit.errors import ProfileError, raise_faults
from autosplit.files import content_hash, from_plain
from autosplit.parsing import MALFORMED
from autosplit.values.graph import Graph, Op
from autosplit.values.links import Link, Wire
from autosplit.values.machine import Machine
from autosplit.values.samples import (
    Measured,
    Precision,
    Samples,
    Setting,
    StageMeasured,
    measured_from_dict,
    measured_to_dict,
    newest_stages,
    setting_from_dict,
    stage_from_dict,
    stage_to_dict,
)
from autosplit.values.shapes import Shapes

SCHEMA = 1


@dataclass(frozen=True)
class Measurements:
    """Measured seconds of one model on the devices of one machine.

    Attributes:
        graph_name: the model's name.
        graph_hash: ``Graph.hash`` of the model.
        signatures: op name to signature, for every op of the graph.
        measured: the measurements of each setting.
        stages: measured stages, oldest first.
        links: measured links.
        wires: measured wires between hosts.
        notes: reasons why measurements were repeated or left out; not part of the hash.
        precision: the precision of all measurements whose setting names no other one.
        shapes: buckets of a model of several sizes, whose seconds are means under its traffic. They are not kept in a store.
    """

    graph_name: str
    graph_hash: str
    signatures: Mapping[str, str]
    measured: Mapping[Setting, Measured] = field(default_factory=dict)
    stages: tuple[StageMeasured, ...] = ()
    links: tuple[Link, ...] = ()
    wires: tuple[Wire, ...] = ()
    notes: tuple[str, ...] = ()
    precision: Precision = "f32"
    shapes: Shapes | None = None

    @classmethod
    def empty(cls, graph: Graph, precision: Precision = "f32") -> Self:
        """The measurements of ``graph`` before anything was measured."""
        return cls(graph.name, graph.hash, {op.name: op.signature for op in graph.ops}, precision=precision)

    @classmethod
    def given(cls, graph: Graph, seconds: Mapping[tuple[str, str], float], backend: str = "eager", threads: int = 1) -> Self:
        """Measurements made of plain numbers, for null devices and simulations.

        Args:
            seconds: (op name, device name) to seconds.
            backend: the backend that the numbers are said to be of.
            threads: the threads that the numbers are said to be of.
        """
        devices = dict.fromkeys(device for _, device in seconds)
        measured = {
            Setting(device, backend, threads): Measured(
                {op: Samples((value,)) for (op, where), value in seconds.items() if where == device}, per="op"
            )
            for device in devices
        }
        return replace(cls.empty(graph), measured=measured).verify()

    def on(self, machine: Machine) -> Self:
        """The measurements without those of backends that a device of the machine may not run, the preferred backends first."""
        limited = {device.name: device.backends for device in machine.devices if device.backends}
        free = [setting for setting in self.measured if setting.device not in limited]
        wanted = [(device, backend) for device, backends in limited.items() for backend in backends]
        kept = [setting for one in wanted for setting in self.measured if (setting.device, setting.runtime) == one]
        measured = {setting: self.measured[setting] for setting in (*free, *kept)}
        return replace(self, measured=measured, stages=tuple(stage for stage in self.stages if stage.setting in measured))

    def left_out(self, machine: Machine) -> dict[str, str]:
        """Each device of the machine on which no backend was left, with the note that says so."""
        names = {device.name for device in machine.devices} - {setting.device for setting in self.measured}
        return {name: note for note in self.notes for name in names if note.startswith(f"{name} is left out: ")}

    def without(self, settings: Iterable[Setting], *notes: str) -> Self:
        """The measurements without those in some settings, with notes that say why."""
        dropped = set(settings)
        measured = {setting: one for setting, one in self.measured.items() if setting not in dropped}
        stages = tuple(stage for stage in self.stages if stage.setting in measured)
        return replace(self, measured=measured, stages=stages, notes=(*self.notes, *notes))

    def setting(self, device: str, backend: str, threads: int | None = None) -> Setting:
        """The measured setting of a device and a backend; without ``threads`` the one with the most threads.

        Raises: ProfileError: nothing of that kind was measured.
        """
        found = [s for s in self.measured if s[:2] == (device, backend) and threads in (None, s.threads)]
        if not found:
            known = "; ".join(str(setting) for setting in self.measured) or "nothing"
            what = f"{backend} on {device}" if threads is None else str(Setting(device, backend, threads))
            why = [note for note in self.notes if note.startswith(f"{backend} is left out")]
            raise ProfileError(
                f"profile of '{self.graph_name}' holds no measurement of {what} (it holds: {known}); "
                f"{'; '.join(why) or 'measure it with `autosplit profile`'}"
            )
        return max(found, key=lambda setting: setting.threads)

    def op_samples(self, op: Op | str, setting: Setting) -> Samples:
        """The raw samples of an op in a setting. Raises: ProfileError: the op was not measured."""
        name = op if isinstance(op, str) else op.name
        measured = self.measured[setting]
        if name in measured.refused:
            raise ProfileError(f"{setting.backend} refuses op '{name}', so it has no time: {measured.refused[name]}")
        key = name if measured.per == "op" else self.signatures.get(name, name)
        if key not in measured.ops:
            raise ProfileError(
                f"profile of '{self.graph_name}' lacks op '{name}' for {setting}; measure it with `autosplit profile`"
            )
        return measured.ops[key]

    def accepted(self, setting: Setting) -> list[str]:
        """The ops that the backend of a setting takes, in graph order."""
        refused = self.measured[setting].refused
        return [op for op in self.signatures if op not in refused]

    def refused(self, backend: str) -> dict[str, str]:
        """Op name to the reason, for each op that a backend was found to refuse on some device."""
        found = (measured.refused for setting, measured in self.measured.items() if setting.backend == backend)
        return {op: reason for refused in found for op, reason in refused.items()}

    def current_stages(self, setting: Setting) -> Sequence[StageMeasured]:
        """The measured stages that count in a setting: see ``samples.newest_stages``."""
        return self._current_stages.get(setting, [])

    def with_measured(self, setting: Setting, measured: Measured) -> Self:
        """The measurements with these ones of a setting in place of older ones."""
        return replace(self, measured={**self.measured, setting: measured}).verify()

    def with_links(self, links: Iterable[Link]) -> Self:
        """The measurements with these links in place of older links of the same pairs."""
        known = {(link.source, link.target): link for link in self.links}
        return replace(self, links=tuple({**known, **{(link.source, link.target): link for link in links}}.values())).verify()

    def with_stage(self, ops: Iterable[str], setting: Setting, samples: Samples, busy: Sequence[str] = ()) -> Self:
        """The measurements with a stage that was measured while it ran.

        Args:
            ops: names of the stage's ops.
            setting: its device, backend and threads.
            samples: seconds of its runs without transfers.
            busy: names of the devices that were busy at the same time.
        Raises: ProfileError: an unknown op, a setting that was never measured, or samples that are not durations.
        """
        stage = StageMeasured(frozenset(ops), setting, samples, tuple(busy))
        return replace(self, stages=(*self.stages, stage)).verify()

    def with_newest(self, stages: Iterable[tuple[Iterable[str], Setting]]) -> Self:
        """The measurements with those of these stages as the newest ones, which count most.

        Overlapping stages may contradict each other, and the newest ones count. A stage of the whole model that did not run
        counts with the time of the whole model, which has no cuts, if its backend refuses no op.
        """
        own = {(setting, frozenset(ops)) for ops, setting in stages}
        unseen = own - {(stage.setting, stage.ops) for stage in self.stages}
        timed = ((ops, s, self.measured[s]) for s, ops in unseen if ops == set(self.signatures) and s in self.measured)
        whole = (StageMeasured(ops, setting, one.whole) for ops, setting, one in timed if one.whole and not one.refused)
        return replace(self, stages=tuple(sorted((*self.stages, *whole), key=lambda stage: (stage.setting, stage.ops) in own)))

    @cached_property
    def _current_stages(self) -> dict[Setting, list[StageMeasured]]:
        return newest_stages(self.stages)

    @cached_property
    def hash(self) -> str:
        """Identity of all measurements."""
        return content_hash(self.to_dict())

    def verify(self) -> Self:
        """Return the measurements, or raise ProfileError with every fault."""
        faults = []
        for setting, measured in self.measured.items():
            computed = measured.provenance.precision
            if computed != (setting.precision or self.precision):
                faults.append(f"{setting} was measured in {computed}, and the profile is of {self.precision}")
            faults += measured.faults(setting, self.signatures)
        for stage in self.stages:
            faults += stage.faults(self.measured, self.signatures)
        raise_faults(ProfileError, f"profile of '{self.graph_name}' does not verify", faults)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON; the notes are left out."""
        return {
            "schema": SCHEMA,
            "graph": {"name": self.graph_name, "hash": self.graph_hash},
            "precision": self.precision,
            "signatures": dict(self.signatures),
            "measured": [{**setting._asdict(), **measured_to_dict(measured)} for setting, measured in self.measured.items()],
            "stages": [stage_to_dict(stage) for stage in self.stages],
            "links": [asdict(link) for link in self.links],
            **({"wires": [asdict(wire) for wire in self.wires]} if self.wires else {}),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """The inverse of to_dict. Raises: ProfileError: a field is missing, or the measurements do not verify."""
        try:
            return cls(
                graph_name=data["graph"]["name"],
                graph_hash=data["graph"]["hash"],
                signatures=from_plain(dict[str, str], data["signatures"]),
                measured={setting_from_dict(entry): measured_from_dict(entry) for entry in data["measured"]},
                stages=tuple(stage_from_dict(entry) for entry in data["stages"]),
                links=from_plain(tuple[Link, ...], data["links"]),
                wires=from_plain(tuple[Wire, ...], data.get("wires", [])),
                precision=data.get("precision", "f32"),
            ).verify()
        except MALFORMED as failure:
            raise ProfileError(f"profile data is incomplete: {failure!r:.300}; measure it again") from None

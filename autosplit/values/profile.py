"""Profile: everything that was measured of one model on the devices of one machine, and the seconds that planners take of it.

All samples are kept; the statistic is the median. Samples belong to an op's signature (all its occurrences together), or to
its name where the backend fuses ops. Op times are corrected when they are read: a scale for each setting makes their sum equal
the whole model, and a factor for each op makes the sums of measured stages right. No torch.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, Self

from autosplit import tables
from autosplit.errors import ProfileError, raise_faults
from autosplit.files import content_hash, from_plain
from autosplit.parsing import MALFORMED
from autosplit.values.fitting import fit_factors
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


@dataclass(frozen=True, repr=False)
class Profile(tables.Tabular):
    """Measurements of one model on the devices of one machine, with the corrected seconds of ops, stages and the whole model.

    Attributes:
        graph_hash: ``Graph.hash`` of the model.
        signatures: op name to signature, for every op of the graph.
        stages: measured stages, oldest first.
        wires: measured wires between hosts.
        notes: reasons why measurements were repeated or left out; not part of the hash.
        precision: the precision of all measurements whose setting names no other one.
        shapes: buckets of a model of several sizes, whose seconds are means under its traffic. They are not kept in a store.
    """

    INDEX = "op"
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
        """Measurements made of plain seconds by (op name, device name), for null devices and simulations."""
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

    def usable(self, machine: Machine, keep: Collection[str] = ()) -> Machine:
        """The machine without the devices on which no backend was left, unless they are named in ``keep``."""
        gone = {*self.left_out(machine)} - {*keep}
        return machine.only(device.name for device in machine.devices if device.name not in gone) if gone else machine

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

    def op_s(self, op: Op | str, device: str, backend: str, threads: int | None = None) -> float:
        """Corrected seconds of one op: median of its samples, scaled to the whole model and to the measured stages.

        Infinite where the backend refuses the op. Raises: ProfileError: the op, or the setting, was not measured.
        """
        setting = self.setting(device, backend, threads)
        name = op if isinstance(op, str) else op.name
        if name in self.measured[setting].refused:
            return inf
        return self.op_samples(op, setting).median_s * self.scales[setting] * self._factors.get(setting, {}).get(name, 1.0)

    def whole_s(self, device: str, backend: str, threads: int | None = None, busy: bool = True) -> float:
        """Seconds of the whole model, neighbours busy or idle; the sum of its ops if the whole was not measured.

        If the device was not measured with idle neighbours, the ratio of another device is used. Infinite if an op is refused.
        """
        setting = self.setting(device, backend, threads)
        measured = self.measured[setting]
        if measured.refused:
            return inf
        samples = (measured.whole or measured.alone) if busy else (measured.alone or measured.whole)
        if not samples:
            return sum(self.op_s(op, *setting) for op in self.signatures)
        return samples.median_s * (1.0 if busy or measured.alone else self.relief(setting))

    def relief(self, like: Setting) -> float:
        """Seconds with idle neighbours over seconds with busy ones, on a device where both were measured."""
        for setting, measured in self.measured.items():
            if setting[1:] == like[1:] and measured.alone and measured.whole:
                return measured.alone.median_s / measured.whole.median_s
        return 1.0

    def stage_s(self, ops: Iterable[str], device: str, backend: str, threads: int | None = None) -> float:
        """Seconds of a stage: its median if this stage was measured in the setting, else the sum of its ops."""
        setting = self.setting(device, backend, threads)
        names = frozenset(ops)
        for stage in self.current_stages.get(setting, []):
            if stage.ops == names:
                return stage.samples.median_s
        return sum(self.op_s(op, *setting) for op in names)

    def table(self, graph: Graph, setting: Setting) -> dict[str, float]:
        """Corrected seconds for planners, by op name; ops that the backend of the setting refuses are left out.

        Raises: ProfileError: the profile is of another model than ``graph``, or a measurement is missing.
        """
        if graph.hash != self.graph_hash:
            raise ProfileError(
                f"profile is of '{self.graph_name}' ({self.graph_hash}), not of '{graph.name}' ({graph.hash}); "
                "measure this model with `autosplit profile`"
            )
        return {op: self.op_s(op, *setting) for op in self.accepted(self.setting(*setting))}

    @cached_property
    def scales(self) -> dict[Setting, float]:
        """For each setting the factor that makes the sum of raw op times equal the whole model."""
        scales = {}
        for setting, measured in self.measured.items():
            total = sum(self.op_samples(op, setting).median_s for op in self.accepted(setting)) if measured.whole else 0.0
            scales[setting] = measured.whole.median_s / total if measured.whole and total > 0 else 1.0
        return scales

    @cached_property
    def _factors(self) -> dict[Setting, dict[str, float]]:
        return {
            setting: fit_factors(
                {op: self.op_samples(op, setting).median_s * self.scales[setting] for op in self.accepted(setting)},
                [(stage.ops, stage.samples.median_s) for stage in stages],
            )
            for setting, stages in self.current_stages.items()
        }

    def summary(self) -> list[dict[str, Any]]:
        """One row a setting: whole model, busy and alone, scale of the ops, seconds per MiB over a cut, error, source, date."""
        return [
            {
                "device": setting.device,
                "backend": setting.backend,
                "precision": setting.precision or self.precision,
                "threads": setting.threads,
                "whole_s": measured.whole.median_s if measured.whole else float("nan"),
                "alone_s": measured.alone.median_s if measured.alone else float("nan"),
                "spread": measured.whole.spread if measured.whole else float("nan"),
                "op_scale": self.scales[setting],
                "cut_per_MiB_s": float("nan") if measured.cut_s_per_byte is None else measured.cut_s_per_byte * (1 << 20),
                "max_error": measured.error,
                "refused_ops": len(measured.refused),
                "source": measured.source,
                "date": measured.provenance.date,
            }
            for setting, measured in self.measured.items()
        ]

    def rows(self) -> list[dict[str, Any]]:
        """One row for each setting and accepted op: corrected seconds, raw median, spread, number of samples."""
        return [
            {
                "op": op,
                **setting._asdict(),
                "seconds": self.op_s(op, *setting),
                "raw_median_s": samples.median_s,
                "spread": samples.spread,
                "num_samples": len(samples.samples_s),
                "signature": self.signatures[op],
            }
            for setting in self.measured
            for op in self.accepted(setting)
            for samples in [self.op_samples(op, setting)]
        ]

    def _repr_html_(self) -> str:
        caption = f"{self.graph_name}: {len(self.signatures)} ops, {len(self.stages)} stages and {len(self.links)} links measured"
        return tables.html(self.summary(), caption)

    def __repr__(self) -> str:
        return f"Profile({self.graph_name!r}, {len(self.measured)} settings, {len(self.stages)} stages, {self.hash})"

    @cached_property
    def current_stages(self) -> dict[Setting, list[StageMeasured]]:
        """The measured stages that count in each setting: see ``samples.newest_stages``."""
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

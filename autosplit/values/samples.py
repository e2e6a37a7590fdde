"""One measurement: its setting, samples and provenance, and their JSON form. No torch."""

import math
import statistics
from collections.abc import Container, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, cast

from autosplit.errors import close_names
from autosplit.files import content_hash, from_plain
from autosplit.versions import added

Precision = Literal["f32", "tf32", "bf16", "f16"]
"""Precision of matrix products, convolutions and attention: ``f32`` keeps the dtypes of the model, ``bf16`` and ``f16`` lower
them. ``tf32`` keeps the dtypes and lets an accelerator round factors to 10 bits of mantissa; cores compute in f32.
Inputs and outputs keep their dtypes."""


ESTIMATED = "estimated"
"""Beginning of the source of times that were not measured on the device itself."""

BACKENDS = ("eager", "onnxruntime", "openvino", "inductor")
"""Names of autosplit's own backends."""

STREAMING = ("eager",)
"""Backends that can stream weights to an accelerator."""

FROM_ONNX = ("onnxruntime", "openvino")
"""Backends that load an ONNX file. A session has threads of its own, while torch has one number of threads for the whole process,
and keeps the weights of products in another layout."""


def backends() -> Mapping[str, str]:
    """Name of each backend to its import path: autosplit's own, then entry points ``autosplit.backends`` of other packages."""
    own = {name: f"autosplit.backends.{name}:BACKEND" for name in BACKENDS}
    return own | {name: path for name, path in added("autosplit.backends").items() if name not in own}


def backend_fault(*names: str) -> str:
    """The fault of unknown names of backends, '' if all are known.

    >>> backend_fault("eager"), backend_fault("openvivo")
    ('', "backend 'openvivo' does not exist, the backends are eager, onnxruntime, openvino, inductor; close names: 'openvino'")
    """
    unknown = [name for name in names if name not in BACKENDS and name not in backends()]
    named, close = ", ".join(f"'{name}'" for name in unknown), "".join(close_names(name, backends()) for name in unknown[:1])
    return f"backend {named} does not exist, the backends are {', '.join(backends())}{close}" if unknown else ""


def backend_in(backend: str, precision: Precision | None) -> str:
    """A backend in a precision of its own, as one name among backends; None for the precision of the profile or plan.

    >>> backend_in("eager", "tf32"), backend_in("eager", None), runtime_of("eager:tf32"), runtime_of("eager")
    ('eager:tf32', 'eager', ('eager', 'tf32'), ('eager', None))
    """
    return backend if precision is None else f"{backend}:{precision}"


def runtime_of(name: str) -> tuple[str, Precision | None]:
    """The backend and the precision in a name that ``backend_in`` gave."""
    backend, _, precision = name.partition(":")
    return backend, cast(Precision, precision) if precision else None


class Setting(NamedTuple):
    """How something ran: device name, backend name, number of threads.

    A backend in another precision than that of the profile counts as a backend of its own: see ``backend_in``.
    """

    device: str
    backend: str
    threads: int

    @property
    def runtime(self) -> str:
        """The backend without a precision."""
        return runtime_of(self.backend)[0]

    @property
    def precision(self) -> Precision | None:
        """The precision, if it is not that of the profile."""
        return runtime_of(self.backend)[1]

    def __str__(self) -> str:
        return f"{self.backend} on {self.device} with {self.threads} thread{'s' * (self.threads != 1)}"


SLOW_RATIO = 1.15
"""Rounds whose medians differ by more than this factor ran at different speeds of the machine."""


@dataclass(frozen=True)
class Samples:
    """Every measured duration of one op, stage or model, in seconds.

    >>> Samples((0.002, 0.001, 0.004)).median_s
    0.002
    """

    samples_s: tuple[float, ...]

    @cached_property
    def median_s(self) -> float:
        """The median, in seconds."""
        return statistics.median(self.samples_s)

    def with_round(self, other: "Samples") -> "Samples":
        """The samples of two rounds; only those of the faster one if they ran at different speeds of the machine.

        >>> Samples((1.0, 1.2)).with_round(Samples((1.1,))).samples_s, Samples((1.9, 1.8)).with_round(Samples((1.1,))).samples_s
        ((1.0, 1.2, 1.1), (1.1,))
        """
        faster, slower = sorted((self, other), key=lambda samples: samples.median_s)
        return faster if slower.median_s > SLOW_RATIO * faster.median_s else Samples((*self.samples_s, *other.samples_s))

    @cached_property
    def spread(self) -> float:
        """Distance between the quartiles over the median; 0 for fewer than two samples or a median of 0."""
        if len(self.samples_s) < 2 or self.median_s == 0:
            return 0.0
        low, _, high = statistics.quantiles(self.samples_s, n=4, method="inclusive")
        return (high - low) / self.median_s

    def faults(self, subject: str) -> list[str]:
        """The fault of the samples: there are none, or one is not a duration."""
        if not self.samples_s:
            return [f"{subject} has no samples"]
        wrong = [sample for sample in self.samples_s if not (math.isfinite(sample) and sample >= 0)]
        return [f"{subject} has a sample of {wrong[0]} s; a duration is finite and not negative"] if wrong else []


@dataclass(frozen=True, slots=True)
class Provenance:
    """The place and the time of a measurement.

    Attributes:
        cpu: model name of the processor.
        num_cores: cores that the measuring process could use.
        caches: size in bytes of each cache level as one core sees it, such as ``{"L2": 1048576}``.
        versions: package name to version (torch, and the backend's runtime).
        date: the time of the measurement, in ISO 8601 with the time zone.
        calibration_s: seconds of the calibration kernel on this device at that time; a later run compares them with its own.
        note: a remark for readers, such as that the machine was not quiet.
        accelerator: name, compute capability, driver and CUDA version of a GPU; empty for CPU cores.
    """

    cpu: str = ""
    num_cores: int = 0
    caches: Mapping[str, int] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    date: str = ""
    calibration_s: float = 0.0
    note: str = ""
    precision: Precision = "f32"
    accelerator: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Memory of a worker while it ran a stage, measured.

    Attributes:
        base_bytes: bytes that the process takes for itself: memory that it was forked with and has written to.
        held_bytes: most memory beyond that of the fork: weights mapped from files, the backend's copies of them, values,
            scratch memory. Slots of rings are left out.
        extra_bytes: the part of ``held_bytes`` that is neither weights nor values at their peak.
    """

    base_bytes: int
    held_bytes: int
    extra_bytes: int

    def __post_init__(self) -> None:
        """Raises: ValueError: a number is below 0."""
        if min(self.base_bytes, self.held_bytes, self.extra_bytes) < 0:
            raise ValueError(f"a footprint has 0 bytes or more, but is {self}")


def stage_key(ops: Iterable[str], streams: int = 1) -> str:
    """The key of a stage in ``Measured.footprints``.

    >>> stage_key(["a", "b"]) == stage_key(["b", "a"]) != stage_key(["a", "b"], streams=2)
    True
    """
    return content_hash([sorted(ops), streams])


@dataclass(frozen=True)
class Measured:
    """The measurements of one model in one setting.

    Attributes:
        ops: raw samples by op signature or by op name, as ``per`` says.
        per: the kind of the keys of ``ops``.
        source: the origin of the op times: ``in-graph`` (each op timed in graph order), ``profiler`` (the runtime's own
            profiler), ``proportional`` (shares of the whole, as in eager), ``given`` (not measured), or the same after
            ``ESTIMATED`` (on another machine, or by a stated speed).
        whole: the whole model while the other devices run it too, or None.
        alone: the whole model while the other devices are idle, or None; of equal devices only the first one is measured.
        provenance: place and time.
        error: largest error of the whole model's outputs against f32 (of an exact backend against eager's bits), relative to
            their largest value; None if not known.
        refused: op name to the reason, for each op that the backend refuses; ``whole`` and ``alone`` leave these ops out.
        cut_s_per_byte: seconds that the ops on both sides of a cut take more as two stages than as one, per byte that passes the
            cut; None if it was not measured. The receiving stage pays it.
        footprints: ``stage_key`` of a stage to the memory of its worker, for the stages that were measured.
    """

    ops: Mapping[str, Samples]
    per: Literal["signature", "op"] = "signature"
    source: str = "given"
    whole: Samples | None = None
    alone: Samples | None = None
    provenance: Provenance = Provenance()
    error: float | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    cut_s_per_byte: float | None = None
    footprints: Mapping[str, Footprint] = field(default_factory=dict)

    @property
    def is_estimate(self) -> bool:
        """Whether the device itself was not measured."""
        return self.source.startswith(ESTIMATED)

    def faults(self, setting: Setting, signatures: Mapping[str, str]) -> list[str]:
        """The faults of these measurements.

        Args:
            signatures: op name to signature, for every op of the model.
        """
        found = []
        if setting.threads < 1:
            found.append(f"threads must be at least 1, but are {setting.threads} for {setting.backend} on {setting.device}")
        known = set(signatures) if self.per == "op" else set(signatures.values())
        absent = sorted(known - set(self.ops) - set(self.refused))
        if absent and self.whole:
            found.append(f"{setting} has the whole model but not {len(absent)} of its ops, such as '{absent[0]}'")
        for key, samples in self.ops.items():
            found += samples.faults(f"op '{key}' ({setting})")
        for name, whole in (("the whole model", self.whole), ("the whole model alone", self.alone)):
            found += whole.faults(f"{name} ({setting})") if whole else []
        if self.cut_s_per_byte is not None:
            found += Samples((self.cut_s_per_byte,)).faults(f"a byte that passes a cut ({setting})")
        return found


@dataclass(frozen=True, slots=True)
class StageMeasured:
    """One stage measured while it ran: its ops, its setting, the other busy devices, and the samples."""

    ops: frozenset[str]
    setting: Setting
    samples: Samples
    busy: tuple[str, ...] = ()

    def faults(self, measured: Mapping[Setting, Measured], ops: Container[str]) -> list[str]:
        """The faults of this measurement."""
        found = self.samples.faults(f"a stage of {len(self.ops)} ops ({self.setting})")
        unknown = sorted(op for op in self.ops if op not in ops)
        found += [f"a measured stage holds unknown op '{unknown[0]}'"] if unknown else []
        found += [] if self.ops else ["a measured stage holds no ops"]
        if self.setting not in measured:
            found.append(f"a stage was measured with {self.setting}, whose ops were never measured")
        elif impossible := sorted(self.ops & set(measured[self.setting].refused)):
            found.append(f"a stage measured with {self.setting} holds op '{impossible[0]}', which that backend refuses")
        return found


def newest_stages(stages: Iterable[StageMeasured]) -> dict[Setting, list[StageMeasured]]:
    """Setting to the newest measurement of each set of ops; one with busy neighbours takes precedence over one without.

    Args:
        stages: measured stages, oldest first.
    """
    newest: dict[tuple[Setting, frozenset[str]], StageMeasured] = {}
    for stage in stages:
        key = stage.setting, stage.ops
        if key not in newest or stage.busy or not newest[key].busy:
            newest.pop(key, None)
            newest[key] = stage
    by_setting: dict[Setting, list[StageMeasured]] = {}
    for stage in newest.values():
        by_setting.setdefault(stage.setting, []).append(stage)
    return by_setting


def measured_to_dict(measured: Measured) -> dict[str, Any]:
    """Plain data for JSON of one setting's measurements."""
    return {
        "per": measured.per,
        "source": measured.source,
        "whole": _seconds(measured.whole) if measured.whole else None,
        "alone": _seconds(measured.alone) if measured.alone else None,
        "ops": {key: _seconds(samples) for key, samples in measured.ops.items()},
        "provenance": provenance_to_dict(measured.provenance),
        "error": measured.error,
        **({"refused": dict(measured.refused)} if measured.refused else {}),
        **({"cut_s_per_byte": measured.cut_s_per_byte} if measured.cut_s_per_byte is not None else {}),
        **({"footprints": {key: asdict(one) for key, one in measured.footprints.items()}} if measured.footprints else {}),
    }


def measured_from_dict(data: Mapping[str, Any]) -> Measured:
    """The inverse of measured_to_dict. Raises: one of ``parsing.MALFORMED``: a field is missing or of another type."""
    provenance = {"calibration_s" if name == "canary_s" else name: value for name, value in data["provenance"].items()}
    samples = {name: _samples(data[name]) if data[name] is not None else None for name in ("whole", "alone")}
    ops = {key: _samples(seconds) for key, seconds in data["ops"].items()}
    return from_plain(Measured, {**data, **samples, "ops": ops, "provenance": provenance})


def stage_to_dict(stage: StageMeasured) -> dict[str, Any]:
    """Plain data for JSON of one measured stage."""
    return {
        **stage.setting._asdict(),
        "ops": sorted(stage.ops),
        "samples": _seconds(stage.samples),
        "busy": list(stage.busy),
    }


def stage_from_dict(data: Mapping[str, Any]) -> StageMeasured:
    """The inverse of stage_to_dict. Raises: one of ``parsing.MALFORMED``: a field is missing or of another type."""
    return from_plain(StageMeasured, {**data, "setting": setting_from_dict(data), "samples": _samples(data["samples"])})


def setting_from_dict(data: Mapping[str, Any]) -> Setting:
    """The inverse of ``Setting._asdict``. Raises: one of ``parsing.MALFORMED``: a field is missing or of another type."""
    return from_plain(Setting, {name: data[name] for name in Setting._fields})


def provenance_to_dict(provenance: Provenance) -> dict[str, Any]:
    """Plain data for JSON; the files have always called the seconds of the calibration kernel ``canary_s``."""
    return {"canary_s" if name == "calibration_s" else name: value for name, value in asdict(provenance).items()}


def _samples(seconds: Any) -> dict[str, Any]:
    return {"samples_s": seconds}


def _seconds(samples: Samples) -> list[float]:
    return [float(sample) for sample in samples.samples_s]

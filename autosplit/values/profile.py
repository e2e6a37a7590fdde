"""Profile: the measurements of a model, and the seconds that planners take of them. No torch.

Op times are corrected when they are read: a scale for each setting makes their sum equal the whole model, and a factor for each
op makes the sums of measured stages right.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf
from typing import Any

from autosplit import tables
from autosplit.errors import ProfileError
from autosplit.values.graph import Graph, Op
from autosplit.values.measurements import Measurements
from autosplit.values.samples import Setting

NUM_ROUNDS, TOLERANCE = 50, 1e-6
LEAST_SHARE = 0.1
"""Least share of the model's time that stages must cover for their ratio to count fully for the ops outside them."""


@dataclass(frozen=True, repr=False)
class Profile(Measurements, tables.Tabular):
    """Measurements with the corrected seconds of ops, stages and the whole model."""

    INDEX = "op"

    def op_s(self, op: Op | str, device: str, backend: str, threads: int | None = None) -> float:
        """Corrected seconds of one op: median of its samples, scaled to the whole model and to the measured stages.

        Infinite where the backend refuses the op. Raises: ProfileError: the op, or the setting, was not measured.
        """
        setting = self.setting(device, backend, threads)
        name = op if isinstance(op, str) else op.name
        if name in self.measured[setting].refused:
            return inf
        return self.op_samples(op, setting).median_s * self.scale(setting) * self._factors.get(setting, {}).get(name, 1.0)

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
        for stage in self.current_stages(setting):
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

    def scale(self, setting: Setting) -> float:
        """The factor that makes the sum of raw op times equal the whole model in a setting."""
        return self._scales[setting]

    @cached_property
    def _scales(self) -> dict[Setting, float]:
        scales = {}
        for setting, measured in self.measured.items():
            total = sum(self.op_samples(op, setting).median_s for op in self.accepted(setting)) if measured.whole else 0.0
            scales[setting] = measured.whole.median_s / total if measured.whole and total > 0 else 1.0
        return scales

    @cached_property
    def _factors(self) -> dict[Setting, dict[str, float]]:
        return {
            setting: fit_factors(
                {op: self.op_samples(op, setting).median_s * self.scale(setting) for op in self.accepted(setting)},
                [(stage.ops, stage.samples.median_s) for stage in stages],
            )
            for setting, stages in self._current_stages.items()
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
                "op_scale": self.scale(setting),
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


def fit_factors(op_s: Mapping[str, float], stages: Sequence[tuple[Collection[str], float]]) -> dict[str, float]:
    """Factors by op name that make the seconds of the ops sum to the measured seconds of every stage.

    Iterative proportional fitting (Deming and Stephan, 1940): each stage in turn scales its ops to its sum. Ops outside of all
    stages take the ratio of all stages together. If stages contradict each other, the last ones count.

    Args:
        op_s: op name to seconds.
        stages: the ops of each stage, and its measured seconds.

    >>> fit_factors({"a": 1.0, "b": 1.0, "c": 1.0}, [(["a", "b"], 4.0)])
    {'a': 2.0, 'b': 2.0, 'c': 2.0}
    """
    predicted_s = sum(op_s[op] for ops, _ in stages for op in ops)
    measured_s = sum(seconds for _, seconds in stages)
    # Stages of 0 s must not scale other ops: at a ratio of 0 the device would be infinitely fast.
    common = measured_s / predicted_s if measured_s > 0 and predicted_s > 0 else 1.0
    covered_s = sum(op_s[op] for op in frozenset().union(*(ops for ops, _ in stages)))
    weight = min(1.0, covered_s / (LEAST_SHARE * sum(op_s.values()))) if covered_s > 0 else 0.0
    factors = dict.fromkeys(op_s, common**weight)
    for _ in range(NUM_ROUNDS):
        worst = 0.0
        for ops, seconds in stages:
            total_s = sum(op_s[op] * factors[op] for op in ops)
            ratio = seconds / total_s if total_s > 0 else 1.0
            worst = max(worst, abs(ratio - 1))
            for op in ops:
                factors[op] *= ratio
        if worst < TOLERANCE:
            break
    return factors

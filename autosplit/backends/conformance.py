"""Known faults of backends, op by op: an op that a backend computes otherwise is refused there, with the values that show it.

Each case (operator, dtypes, attributes) is tried once for the versions that are installed. Outcomes come with the package for the
pinned versions, and are kept beside the exports in ``$AUTOSPLIT_CACHE`` or ``~/.cache/autosplit`` for all others.
"""

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from autosplit.backends.apart import apart
from autosplit.backends.base import Runnable, get_backend, named_backend
from autosplit.backends.hardvalues import SMALL, VALUES, Values
from autosplit.backends.onnxfile import ELEMENT_TYPES
from autosplit.backends.opcases import Case, case_of, probe_program
from autosplit.backends.probing import one_line
from autosplit.backends.trying import faults
from autosplit.devices.discovering import versions
from autosplit.errors import AutosplitError, BackendError, DeadlineError, refusals
from autosplit.files import content_hash, locked, write_atomic
from autosplit.parsing import MALFORMED, parse_json
from autosplit.scratch import scratch_folder
from autosplit.tracing.capturing import Traced
from autosplit.tracing.flattening import is_op
from autosplit.tracing.indexlimits import index_limits
from autosplit.tracing.splitting import load_stage, save_stage
from autosplit.tracing.valueranges import INT32, Assumed, Range, full, shape_of, values_of
from autosplit.values.plan import Plan

REFUSED = "refused"

Faults = Mapping[str, str]
"""Kind of values to what a backend computes otherwise on them; kinds without a fault are left out. ``REFUSED`` for an op that it
cannot convert or that crashes it."""

TRIED = ("onnxruntime", "openvino")
"""Backends whose unknown cases are tried; inductor would compile for half a minute."""

ASSUMED: Mapping[str, Assumed] = {"openvino": "narrow"}
"""Backend name to its assumption on requests, which it checks; ``ids`` for all others."""

SCHEMA = 1
"""Counts changes of the cases, of the values and of the translations to ONNX, after which known outcomes do not hold."""

SHIPPED = Path(__file__).with_name("conformance")

WRONG = "computes otherwise"
"""The start of the reason for which an op is refused here."""

MOST_S = 300.0
"""Most seconds for trying the ops of one model."""

_CASES: WeakKeyDictionary[fx.GraphModule, list[tuple[fx.Node, Case]]] = WeakKeyDictionary()

WORDS: Mapping[Values, str] = {
    "finite": "finite values",
    "large": "integers beyond 24 bits",
    "masked": "rows that are masked whole or in part",
    "nonfinite": "NaN or infinity",
    "wide": "integers that leave 32 bits or wrap round",
    "outside": "indices beyond the table",
}


def refused(traced: Traced, backend: str) -> dict[str, str]:
    """Op name to the reason, for each op whose values a backend cannot pass or computes otherwise.

    The values are those that the op may get (``Source.values``). Unknown cases are tried, which takes seconds.
    """
    if backend == "eager":
        return {}
    found = _impassable(traced, backend)
    if backend in traced.source.trusted or named_backend(backend).missing():
        return found
    needed = _needed(traced, backend)
    known = known_faults(backend, {case.key: case for _, case, _ in needed})
    for name, case, kinds in needed:
        told = known.get(case.key, {})
        if REFUSED in told:
            found.setdefault(name, told[REFUSED])
        elif name not in found and (kind := next((kind for kind in kinds if kind in told), None)):
            found[name] = f"{WRONG}, on {WORDS[kind]}: {told[kind]}"
    return found


def require_right(traced: Traced, plan: Plan) -> None:
    """Raise BackendError for a stage with an op that its backend computes otherwise than eager, or cannot pass the values of."""
    for stage in plan.stages:
        known = refused(traced, stage.backend)
        if found := {op: known[op] for op in stage.ops if op in known}:
            raise BackendError(
                f"backend '{stage.backend}' must not run {refusals(found)} of stage '{stage.name}'; plan anew, or trace the "
                f"model with trust_backends=['{stage.backend}'] (--trust-backend)",
                found,
            )


def _impassable(traced: Traced, backend: str) -> dict[str, str]:
    """Op name to the reason for each op that reads or makes a value of a dtype that the backend cannot exchange."""
    if backend not in TRIED:
        return {}
    strange = {
        name: spec.dtype
        for name, spec in traced.specs.items()
        if spec.torch_dtype not in ELEMENT_TYPES or (backend == "openvino" and spec.torch_dtype == torch.bfloat16)
    }
    touched = {op.name: next((value for value in (*op.inputs, *op.outputs) if value in strange), "") for op in traced.graph.ops}
    return {op: f"'{value}' is {strange[value]}, which it cannot pass" for op, value in touched.items() if value}


def _needed(traced: Traced, backend: str) -> list[tuple[str, Case, list[Values]]]:
    """Each op that can be tried alone: its name, its case, and the kinds of values that it may get on a backend."""
    assumed: Assumed = "any" if traced.source.values == "any" else ASSUMED.get(backend, "ids")
    known = values_of(traced.program, assumed)
    if traced.program not in _CASES:
        nodes = [node for node in known if is_op(node) and node.all_input_nodes]
        cases = [(node, case_of(node)) for node in nodes if getattr(node.target, "namespace", "") == "aten"]
        _CASES[traced.program] = [(node, case) for node, case in cases if case is not None]
    varying = [(node, case) for node, case in _CASES[traced.program] if not known[node].fixed]  # a run checks all others
    return [(node.name, case, _kinds(node, known)) for node, case in varying]


def _kinds(node: fx.Node, known: Mapping[fx.Node, Range]) -> list[Values]:
    """The kinds of values that an op may get or make."""
    sources = [known[source] for source in node.all_input_nodes]
    worst = max(one.strange for one in sources)
    kinds: list[Values] = ["finite", *(["masked"] if worst else []), *(["nonfinite"] if worst == 2 else [])]  # type: ignore[list-item]
    sizes = [_size(one, known[one]) for one in (*node.all_input_nodes, node)]
    kinds += [*(["large"] if {"large", "wide"} & set(sizes) else []), *(["wide"] if "wide" in sizes else [])]  # type: ignore[list-item]
    if any(not known[index].within(limits) for index, limits in index_limits(node, shape_of).items()):
        kinds.append("outside")
    return kinds


def _size(node: fx.Node, found: Range) -> Values:
    """The kind of values that the range of an integer needs; 'finite' for floats."""
    value = node.meta["val"]
    dtype = (value[0] if isinstance(value, list | tuple) else value).dtype
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool or found.within((-SMALL, SMALL)):
        return "finite"
    most = full(dtype)
    return "large" if found.within((max(most.low, INT32.min), min(most.high, INT32.max))) else "wide"


def known_faults(backend: str, cases: Mapping[str, Case]) -> dict[str, Faults]:
    """The faults of cases by key: shipped, kept, or found now and kept."""
    known = {**_shipped(backend), **_kept(backend)}
    unknown = [case for key, case in cases.items() if key not in known]
    if unknown and backend in TRIED:
        fresh = _tried(backend, unknown)
        _keep(backend, fresh)
        known |= fresh
    return {key: known[key] for key in cases if key in known}


def table(backend: str) -> dict[str, Faults]:
    """All outcomes that are known for the installed versions, by case."""
    return {**_shipped(backend), **_kept(backend)}


def _tried(backend: str, cases: Sequence[Case]) -> dict[str, Faults]:
    """The faults of cases that were never tried. Where the backend crashes or refuses, the cases are tried in halves."""
    with scratch_folder() as folder:
        save_stage(probe_program(cases), folder / "probe")
        doing = f"while {backend} was tried on {cases[0].key if len(cases) == 1 else f'{len(cases)} ops'}"
        try:
            by_case = apart(try_all, folder / "probe", backend, doing=doing, limit_s=MOST_S)
            return {case.key: by_case[f"case{number}"] for number, case in enumerate(cases)}
        except DeadlineError:  # the machine is busy: they stay unknown
            return {}
        except AutosplitError as failure:
            if "SIGKILL" in str(failure):  # memory ran out, or a person ended it
                return {}
            if len(cases) == 1:
                reasons = failure.refused.values() if isinstance(failure, BackendError) else ()
                return {cases[0].key: {REFUSED: next(iter(reasons), str(failure))}}
    middle = len(cases) // 2
    return _tried(backend, cases[:middle]) | _tried(backend, cases[middle:])


def try_all(folder: Path, backend: str) -> dict[str, Faults]:
    """Compile a probe program that is saved in a folder, and try each kind of values; called in a process apart."""
    program = load_stage(folder, trust=True)
    torch.set_num_threads(1)
    made = get_backend(backend)
    made.prepare(program, folder)
    run: Runnable = made.load(folder, 1)
    found: dict[str, dict[str, str]] = {op: {} for op in program.ops}
    with torch.inference_mode():
        for values in VALUES:
            try:
                told = faults(program, run, values)
            except Exception as failure:
                if len(program.ops) > 1:
                    raise BackendError(one_line(failure)) from failure
                told = {program.ops[0]: f"it fails: {one_line(failure)}"}
            for op, text in told.items():
                if text:
                    found[op][values] = text
    return dict(found)


def _identity(backend: str) -> dict[str, Any]:
    exporter = [] if backend in ("eager", "inductor") else ["onnxruntime"]
    released = {name: version.partition("+")[0] for name, version in versions([backend, *exporter]).items()}
    return {"schema": SCHEMA, "backend": backend, "versions": released}


@cache
def _shipped(backend: str) -> dict[str, Faults]:
    """The outcomes that come with the package, if they are of the installed versions."""
    return _read(SHIPPED / f"{backend}.json", backend)


def _place(backend: str) -> Path:
    base = os.environ.get("AUTOSPLIT_CACHE") or Path.home() / ".cache" / "autosplit"
    return Path(base) / "conformance" / f"{backend}-{content_hash(_identity(backend))[:8]}.json"


def _kept(backend: str) -> dict[str, Faults]:
    with contextlib.suppress(OSError, RuntimeError):  # the user has no home
        return _read(_place(backend), backend)
    return {}


def _read(path: Path, backend: str) -> dict[str, Faults]:
    """The outcomes in a file; none if it is of other versions, damaged or absent."""
    with contextlib.suppress(OSError, *MALFORMED):
        data = parse_json(path.read_text(encoding="utf-8"))
        if data["of"] == _identity(backend):
            return {str(key): _as_faults(one) for key, one in data["cases"].items()}
    return {}


def _as_faults(data: Mapping[str, Any]) -> Faults:
    return {kind: str(data[kind]) for kind in (REFUSED, *VALUES) if kind in data}


def _keep(backend: str, fresh: Mapping[str, Faults]) -> None:
    """Add outcomes to those that are kept. Nothing else depends on it, so no failure is told."""
    with contextlib.suppress(OSError, RuntimeError):
        path = _place(backend)
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path):
            write_atomic(path, as_text(backend, {**_kept(backend), **fresh}))


def as_text(backend: str, cases: Mapping[str, Faults]) -> str:
    """A file of outcomes."""
    return json.dumps({"of": _identity(backend), "cases": dict(sorted(cases.items()))}, indent=1) + "\n"


def rows(backends: Iterable[str]) -> list[dict[str, str]]:
    """One row for each fault that is known for the installed versions: operator case, backend, kind of values, both results."""
    return [
        {"case": key, "backend": backend, "values": kind, "fault": text}
        for backend in backends
        for key, told in sorted(table(backend).items())
        for kind, text in told.items()
    ]

"""Known faults of backends, by case: shipped with the package, kept in the cache, or found now.

A case (operator, dtypes, attributes) is tried once for the versions that are installed. Outcomes for the pinned versions come
with the package; all others are kept in the folder ``faults`` of the cache (``files.cache_folder``).
"""

import contextlib
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.apart import call_apart, limited
from autosplit.backends.base import Runnable, get_backend
from autosplit.backends.hardvalues import VALUES
from autosplit.backends.opcases import Case, probe_program
from autosplit.backends.probing import one_line
from autosplit.backends.trying import faults
from autosplit.devices.discovering import versions
from autosplit.errors import AutosplitError, BackendError, HungError
from autosplit.files import cache_folder, content_hash, locked, write_atomic
from autosplit.opening import open_file
from autosplit.parsing import MALFORMED, parse_json
from autosplit.scratch import scratch_folder
from autosplit.tracing.splitting import load_stage, save_stage

REFUSED = "refused"

Faults = Mapping[str, str]
"""Kind of values to what a backend computes otherwise on them; kinds without a fault are left out. ``REFUSED`` for an op that it
cannot convert or that crashes it."""

TRIED = ("onnxruntime", "openvino")
"""Backends whose unknown cases are tried; inductor would compile for half a minute."""

SCHEMA = 1
"""Counts changes of the cases, of the values and of the translations to ONNX, after which known outcomes do not hold."""

SHIPPED = Path(__file__).with_name("faults")

MOST_S = 300.0
"""Most seconds for trying the ops of one model."""


def known_faults(backend: str, cases: Mapping[str, Case]) -> dict[str, Faults]:
    """The faults of cases by key: shipped, kept, or found now and kept."""
    known = table(backend)
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
            with limited(MOST_S):
                by_case = call_apart(try_all, folder / "probe", backend, doing=doing)
            return {case.key: by_case[f"case{number}"] for number, case in enumerate(cases)}
        except HungError:  # the machine is busy: they stay unknown
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
    return cache_folder() / "faults" / f"{backend}-{content_hash(_identity(backend))[:8]}.json"


def _kept(backend: str) -> dict[str, Faults]:
    with contextlib.suppress(RuntimeError):  # the user has no home
        return _read(_place(backend), backend, cache_folder())
    return {}


def _read(path: Path, backend: str, root: Path | None = None) -> dict[str, Faults]:
    """The outcomes in a file; none if it is of other versions, damaged, absent or, below a root, a link."""
    with contextlib.suppress(OSError, *MALFORMED), open_file(path, root=root) as file:
        data = parse_json(file.read().decode())
        if data["of"] == _identity(backend):
            return {str(key): _as_faults(one) for key, one in data["cases"].items()}
    return {}


def _as_faults(data: Mapping[str, Any]) -> Faults:
    return {kind: str(data[kind]) for kind in (REFUSED, *VALUES) if kind in data}


def _keep(backend: str, fresh: Mapping[str, Faults]) -> None:
    """Add outcomes to those that are kept. Nothing else depends on it, so no failure is told."""
    with contextlib.suppress(OSError, RuntimeError):
        path, root = _place(backend), cache_folder()
        with locked(path, root=root):
            write_atomic(path, as_text(backend, {**_kept(backend), **fresh}), root)


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

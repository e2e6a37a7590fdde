"""Known faults of backends, by case: shipped with the package, kept in the cache, or found now.

A case (operator, dtypes, attributes) is tried once for the versions that are installed. Outcomes for the pinned versions come
with the package; all others are kept in the folder ``faults`` of the cache (``files.cache_folder``).
"""

import contextlib
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from autosplit.backends.hardvalues import VALUES
from autosplit.backends.opcases import Case
from autosplit.backends.trials import MOST_CASES, REFUSED, Faults, faults_of
from autosplit.devices.discovering import versions
from autosplit.files import cache_folder, content_hash, locked, write_atomic
from autosplit.opening import open_file
from autosplit.parsing import MALFORMED, parse_json
from autosplit.values.samples import BACKENDS, FROM_ONNX

TRIED = tuple(name for name in BACKENDS if name != "eager")
"""Backends whose unknown cases are tried."""

SCHEMA = 3
"""Counts changes of the cases, of the values and of the translations to ONNX, after which known outcomes do not hold."""

SHIPPED = Path(__file__).with_name("faults")


_found: dict[str, dict[str, Faults]] = defaultdict(dict)
"""Faults that this process found, by backend: operators of other packages may change before the next process."""


def known_faults(backend: str, cases: Mapping[str, Case]) -> dict[str, Faults]:
    """The faults of cases by key: shipped, kept, or found now; those of torch's own operators are kept."""
    known = {**_found[backend], **table(backend)}
    unknown = [case for key, case in cases.items() if key not in known]
    for start in range(0, len(unknown) if backend in TRIED else 0, MOST_CASES):
        fresh = faults_of(backend, unknown[start : start + MOST_CASES])
        _keep(backend, {key: told for key, told in fresh.items() if key.startswith("aten.")})
        _found[backend] |= fresh
        known |= fresh
    return {key: known[key] for key in cases if key in known}


def table(backend: str) -> dict[str, Faults]:
    """All outcomes that are known for the installed versions, by case."""
    return {**_shipped(backend), **_kept(backend)}


def _identity(backend: str) -> dict[str, Any]:
    exporter = ["onnxruntime"] if backend in FROM_ONNX else []
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
            kinds = (REFUSED, *VALUES)
            return {str(key): {kind: str(one[kind]) for kind in kinds if kind in one} for key, one in data["cases"].items()}
    return {}


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

"""Known faults of backends, by case: shipped with the package, kept in the cache, or found now.

A case (operator, dtypes, attributes) is tried once for the versions that are installed. Outcomes for the pinned versions come
with the package; all others are kept in the folder ``faults`` of the cache (``files.cache_folder``).
"""

import contextlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch

from autosplit.backends.apart import call_apart, limited
from autosplit.backends.base import Runnable, get_backend
from autosplit.backends.hardvalues import VALUES, Values
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

TRIED = ("onnxruntime", "openvino", "inductor")
"""Backends whose unknown cases are tried."""

SCHEMA = 2
"""Counts changes of the cases, of the values and of the translations to ONNX, after which known outcomes do not hold."""

SHIPPED = Path(__file__).with_name("faults")

TOLD = "told.json"
"""The file beside a probe program with the findings so far."""

MOST_CASES = 48
"""Most cases of one probe program."""

MOST_S = 300.0
"""Most seconds for trying the cases of one probe program."""


_found: dict[str, dict[str, Faults]] = defaultdict(dict)
"""What this process found, by backend: operators of other packages may change before the next one."""


def known_faults(backend: str, cases: Mapping[str, Case]) -> dict[str, Faults]:
    """The faults of cases by key: shipped, kept, or found now; those of torch's own operators are kept."""
    known = {**_found[backend], **table(backend)}
    unknown = [case for key, case in cases.items() if key not in known]
    for start in range(0, len(unknown) if backend in TRIED else 0, MOST_CASES):
        fresh = _tried(backend, unknown[start : start + MOST_CASES])
        _keep(backend, {key: told for key, told in fresh.items() if key.startswith("aten.")})
        _found[backend] |= fresh
        known |= fresh
    return {key: known[key] for key in cases if key in known}


def table(backend: str) -> dict[str, Faults]:
    """All outcomes that are known for the installed versions, by case."""
    return {**_shipped(backend), **_kept(backend)}


def _tried(backend: str, cases: Sequence[Case]) -> dict[str, Faults]:
    """The faults of cases that were never tried; of none if a process takes too long or is killed for its memory.

    Cases that the backend refuses to convert are left out. After a crash the trials go on behind it, or in halves.
    """
    doing = f"while {backend} was tried on {cases[0].key if len(cases) == 1 else f'{len(cases)} ops'}"
    with scratch_folder() as folder:
        probe, done = folder / "probe", ""
        program = probe_program(cases)
        save_stage(program, probe)
        while True:
            try:
                with limited(MOST_S):
                    by_case = call_apart(try_all, probe, backend, doing=doing, packages=program.packages)
                return {case.key: by_case[f"case{number}"] for number, case in enumerate(cases)}
            except HungError:  # the machine is busy: they stay unknown
                return {}
            except AutosplitError as failure:
                before, done = done, (probe / TOLD).read_text() if (probe / TOLD).exists() else ""
                refused = failure.refused if isinstance(failure, BackendError) else {}
                if "SIGKILL" in str(failure):  # memory ran out, or a person ended it
                    return {}
                if len(cases) == 1 and done == before:
                    return {cases[0].key: {REFUSED: next(iter(refused.values()), str(failure))}}
                if refused or done == before:
                    break
    if refused:
        named = {f"case{number}": case for number, case in enumerate(cases)}
        rest = [case for op, case in named.items() if op not in refused]
        found: dict[str, Faults] = {named[op].key: {REFUSED: reason} for op, reason in refused.items()}
        return found | (_tried(backend, rest) if rest else {})
    middle = len(cases) // 2
    return _tried(backend, cases[:middle]) | _tried(backend, cases[middle:])


def try_all(folder: Path, backend: str) -> dict[str, Faults]:
    """Compile a probe program that is saved in a folder, and try each kind of values; called in a process apart.

    Findings are written to the folder one by one. A call after a crash of one op goes on with the next kind or op.
    """
    program = load_stage(folder, trust=True)
    torch.set_num_threads(1)
    made, path = get_backend(backend), folder / TOLD
    made.prepare(program, folder)
    run: Runnable = made.load(folder, 1)
    found: dict[str, dict[str, str]] = json.loads(path.read_text()) if path.exists() else {op: {} for op in program.ops}

    def note(values: Values, told: Mapping[str, str]) -> None:
        for op, text in told.items():
            found[op][values] = text
        path.write_text(json.dumps(found))

    with torch.inference_mode(), _silent():
        for values in VALUES:
            together = [program.ops] if values != "outside" else [(op,) for op in program.ops]
            for ops in (ops for ops in together if values not in found[ops[0]]):
                if len(ops) == 1:
                    note(values, {ops[0]: "it ends the process"})
                try:
                    note(values, faults(program, run, values, ops))
                except Exception as failure:
                    if len(ops) > 1:
                        raise BackendError(one_line(failure)) from failure
                    note(values, {ops[0]: f"it fails: {one_line(failure)}"})
    always = VALUES[:1]  # each op may get these, so other faults of it do not matter
    return {
        op: {values: text for values, text in told.items() if text and (values in always or not told[always[0]])}
        for op, told in found.items()
    }


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep what native code writes before it ends the process from the user's terminal."""
    kept = os.dup(2)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


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

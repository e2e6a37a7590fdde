"""Try cases on a backend in the process apart, and continue after an op that crashes it."""

import contextlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from autosplit.backends.apart import apart, limited
from autosplit.backends.base import Runnable, get_backend
from autosplit.backends.hardvalues import VALUES, Values
from autosplit.backends.opcases import Case, probe_program
from autosplit.backends.probing import innermost
from autosplit.backends.trying import faults
from autosplit.errors import AutosplitError, BackendError, HungError
from autosplit.scratch import scratch_folder
from autosplit.tracing.splitting import load_stage, save_stage

REFUSED = "refused"

Faults = Mapping[str, str]
"""Kind of values to the difference of a backend on them, in words; kinds without a fault are left out. ``REFUSED`` for an op that
it cannot convert or that crashes it."""

TOLD = "told.json"
"""The file beside a probe program with the findings so far."""

MOST_CASES = 48
"""Most cases of one probe program."""

MOST_S = 300.0
"""Most seconds for trying the cases of one probe program."""


def faults_of(backend: str, cases: Sequence[Case]) -> dict[str, Faults]:
    """The faults of cases that were never tried; of none if a process takes too long or is killed for its memory.

    Cases that the backend refuses to convert are ``REFUSED``, and the others are tried without them. After a crash the trials go
    on behind it, or in halves.
    """
    doing = f"while {backend} was tried on {cases[0].key if len(cases) == 1 else f'{len(cases)} ops'}"
    with scratch_folder() as folder:
        probe, done = folder / "probe", ""
        program = probe_program(cases)
        save_stage(program, probe)
        while True:
            try:
                with limited(MOST_S):
                    by_case = apart(try_all, probe, backend, doing=doing, packages=program.packages)
                told = {case.key: by_case[f"case{number}"] for number, case in enumerate(cases)}
                return told | _alone(backend, [case for case in cases if VALUES[0] in told[case.key]] if len(cases) > 1 else ())
            except AutosplitError as failure:
                if isinstance(failure.__cause__, HungError) or "SIGKILL" in str(failure):
                    return {}  # the machine is busy, memory ran out, or a person ended it: they stay unknown
                before, done = done, (probe / TOLD).read_text() if (probe / TOLD).exists() else ""
                refused = failure.refused if isinstance(failure, BackendError) else {}
                if len(cases) == 1 and done == before:
                    return {cases[0].key: {REFUSED: next(iter(refused.values()), str(failure))}}
                if refused or done == before:
                    break
    if refused:
        named = {f"case{number}": case for number, case in enumerate(cases)}
        rest = [case for op, case in named.items() if op not in refused]
        found: dict[str, Faults] = {named[op].key: {REFUSED: reason} for op, reason in refused.items()}
        return found | (faults_of(backend, rest) if rest else {})
    middle = len(cases) // 2
    return faults_of(backend, cases[:middle]) | faults_of(backend, cases[middle:])


def _alone(backend: str, cases: Sequence[Case]) -> dict[str, Faults]:
    """The faults of cases, each tried in a program of its own: beside others, one may read what another has written over."""
    return {key: told for case in cases for key, told in faults_of(backend, [case]).items()}


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
                        raise BackendError(innermost(failure)) from failure
                    note(values, {ops[0]: f"it fails: {innermost(failure)}"})
    always = VALUES[:1]  # each op may get these, so other faults of it do not matter
    return {
        op: {values: text for values, text in told.items() if text and (values in always or not told[always[0]])}
        for op, told in found.items()
    }


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """Keep the output of native code that ends the process away from the user's terminal."""
    kept = os.dup(2)
    with Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)

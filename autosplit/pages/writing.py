"""Write the report of a run as a page, or as the run file that a page is drawn from."""

from dataclasses import replace
from pathlib import Path

from autosplit.api import AutoResult
from autosplit.arguments import checked
from autosplit.deploying.footprints import footprints_for
from autosplit.deploying.setup import Setup
from autosplit.errors import UsageError
from autosplit.files import write_atomic
from autosplit.keeping import stored_profile
from autosplit.measuring import Store
from autosplit.pages.contents import Contents, contents_of, read_contents, write_contents
from autosplit.pages.document import report_page
from autosplit.parsing import MALFORMED
from autosplit.reports.accuracy import Run
from autosplit.reports.runreport import RunReport
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan

FRONT_S = 5.0
"""Seconds for the front of a report."""


@checked
def write_report(
    result: AutoResult, path: str | Path, *, constraints: Constraints | None = None, store: str | Path | None = None
) -> Path:
    """Write the result of ``auto`` as one HTML page that loads nothing (``.html``), or as its run file (``.json``).

    Args:
        constraints: the demands, named where they decide the place of an op.
        store: the folder of the profile store, whose runs show how good predictions were.
    Returns: the path.
    Raises: UsageError: the file cannot be written.
    """
    notes = tuple(dict.fromkeys((*result.profile.notes, *result.report.notes)))
    found = contents_of(
        replace(result.report, notes=notes),
        result.traced.graph,
        result.machine,
        profile=result.profile,
        constraints=constraints or Constraints(),
        candidates=result.search.rows(),
        front=_front(result, constraints or Constraints()),
        runs=_runs(result.traced, store),
    )
    return _write(found, Path(path))


def _front(result: AutoResult, constraints: Constraints) -> list[tuple[Plan, int]]:
    """The planner's front under the user's demands, with the bytes of each plan's fullest device; nothing runs for it."""
    found = result.search
    footprints = footprints_for(result.family or found.traced, found.profile, result.machine)
    account = replace(footprints.account(found.traced, found.profile), run=None)
    limits = {"queue_depth": found.plan.queue_depth, "time_limit_s": FRONT_S, "shares_time": True}
    return found.front(result.machine, constraints, account=account, **limits)


def write_run(report: RunReport, traced: Traced, machine: Machine, path: Path, store: Path | None) -> Path:
    """``write_report`` for a plan that ran without a search; ops have the times that the store holds."""
    profile = stored_profile(traced, report.best.plan, machine, Setup(store=store))
    return _write(contents_of(report, traced.graph, machine, profile=profile, runs=_runs(traced, store)), path)


def draw_run(run: Path, page: Path) -> Path:
    """Draw the page of a run file. Raises: UsageError: the file is not a run file, or its parts do not fit together."""
    contents = read_contents(run)
    try:
        return _write(contents, page)
    except MALFORMED as failure:
        raise UsageError(f"run file '{run}' cannot be drawn, because its parts do not fit together: {failure!r:.300}") from None


def _runs(traced: Traced, store: str | Path | None) -> list[Run]:
    return [run for run in Store(Path(store)).accuracy().runs if run.model == traced.graph.name] if store is not None else []


def _write(contents: Contents, path: Path) -> Path:
    """Raises: UsageError: the file cannot be written."""
    try:
        write_contents(contents, path) if path.suffix == ".json" else write_atomic(path, report_page(contents))
    except OSError as failure:
        raise UsageError(f"report '{path}' cannot be written: {failure.strerror}; give the path of another file") from None
    return path

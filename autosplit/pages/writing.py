"""Write the report of a run as a page, or as the run file that a page is drawn from."""

from pathlib import Path

from autosplit.api import AutoResult
from autosplit.files import write_atomic
from autosplit.measuring import Store
from autosplit.pages.contents import Contents, contents_of, read_contents, write_contents
from autosplit.pages.document import report_page
from autosplit.reports.accuracy import Run
from autosplit.reports.runreport import RunReport
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine


def write_report(
    result: AutoResult, path: str | Path, *, constraints: Constraints | None = None, store: str | Path | None = None
) -> Path:
    """Write what ``auto`` found as one HTML page that loads nothing (``.html``), or as its run file (``.json``).

    Args:
        result: what ``auto`` returned.
        path: the file.
        constraints: the demands, named where they decide the place of an op.
        store: the folder of the profile store, whose runs show how good predictions were.
    Returns: the path.
    Raises: UsageError: the file cannot be written.
    """
    found = contents_of(
        result.report,
        result.traced.graph,
        result.machine,
        profile=result.profile,
        constraints=constraints or Constraints(),
        candidates=result.search.rows(),
        runs=_runs(result.traced, store),
    )
    return _write(found, Path(path))


def write_run(report: RunReport, traced: Traced, machine: Machine, path: Path, store: Path | None) -> Path:
    """``write_report`` for a plan that ran without a search."""
    return _write(contents_of(report, traced.graph, machine, runs=_runs(traced, store)), path)


def draw_run(run: Path, page: Path) -> Path:
    """Draw the page of a run file. Raises: UsageError: the file is not a run file, or the page cannot be written."""
    return _write(read_contents(run), page)


def _runs(traced: Traced, store: str | Path | None) -> list[Run]:
    return [run for run in Store(Path(store)).accuracy().runs if run.model == traced.graph.name] if store is not None else []


def _write(contents: Contents, path: Path) -> Path:
    if path.suffix == ".json":
        write_contents(contents, path)
    else:
        write_atomic(path, report_page(contents))
    return path

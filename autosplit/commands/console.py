"""Consoles of the commands, and how a result is shown, traced and written."""

import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from autosplit.commands import options
from autosplit.commands.report import table
from autosplit.errors import StageError
from autosplit.files import write_atomic
from autosplit.parsing import json_safe
from autosplit.progress import Progress
from autosplit.terminal import Terminal
from autosplit.values.dot import graph_dot
from autosplit.values.graph import Graph
from autosplit.values.plan import Plan
from autosplit.values.planfile import write_plan as write_plan_file
from autosplit.values.timeline import chrome_trace

WIDTH = 140
"""Columns of the output if it is not a terminal and COLUMNS is not set."""


def _width(stream: IO[str] | None) -> int | None:
    """Columns of the output; None lets rich find out. A stream that was closed before the start is None."""
    return None if "COLUMNS" in os.environ or (stream is not None and stream.isatty()) else WIDTH


out = Terminal(width=_width(sys.stdout))
err = Terminal(stderr=True, width=_width(sys.stderr))


answered = threading.Event()
"""Set when stdout has the JSON of this command, so that a later failure does not add a second JSON document."""


def show(given: options.Output, data: Any, *views: Any) -> None:
    """The result on stdout: the data as JSON, or the views for people.

    Raises: OSError, SystemExit: stdout is closed, or a file on a full disk. Write files that must be kept in a ``finally``.
    """
    try:
        if given.json:
            answered.set()
            print(json.dumps(json_safe(data), indent=1, allow_nan=False, default=str), flush=True)
        else:
            for view in views:
                out.print(view)
    except OSError as failure:
        raise OSError(failure.errno, failure.strerror, "standard output") from failure


def say_kept(given: options.Output) -> None:
    """Say where measurements are kept, before the first one of this user, unless the command line names the place."""
    if not given.is_given("profiles") and not given.store.exists():
        say(f"measurements are kept in '{given.store}'; --profiles names another folder")


def say_reused(profile: Any, store: Path, started: str) -> None:
    """Say how much of a profile was measured before ``started``, the date at which the command began."""
    dates = [measured.provenance.date for measured in profile.measured.values() if not measured.is_estimate]
    before = sorted(date for date in dates if date < started)
    if before:
        share = f"{len(before)} of {len(dates)}"
        say(f"{share} measurements are from '{store}', of {before[0]} or later; --remeasure makes them again")


def trace(given: Any, progress: Progress, model: str, weights: bool = True, generate: Any = None) -> Any:
    """A model, traced for the requests that the flags describe: a ``Family`` where they have several sizes.

    ``generate``: the sequences that the model continues.
    """
    from autosplit import api

    progress("trace", 0.0, "loading the model and capturing its graph")
    chosen: dict[str, Any] = {"batch": given.batch, "seq_len": given.seq_len, "weights": weights}
    if isinstance(given, options.Profile):
        several = {"sizes": given.sizes} if given.sizes else given.request
        chosen = {**several, "values": given.values, "trust_backends": given.trusted, "weights": weights}
        if generate is not None:
            chosen = {"generate": generate, "trust_backends": given.trusted}
    traced = api.trace(model, trust=given.trust, **chosen)
    say_notes(traced.notes)
    say_kept(given)
    progress("trace", 1.0, "done")
    return traced


def load_plan(
    path: str | Path, model: str | None, progress: Progress, share: float = 0.0, devices: Any = None, weights: bool = True
) -> Any:
    """A plan file with its model, which is traced; ``share`` of the step is done before. Arguments as for ``loadedplan.load``."""
    from autosplit.loadedplan import load

    progress("load", share, f"reading '{path}' and tracing its model")
    return load(path, model, devices=devices, weights=weights)


def keep_plan(path: Path) -> Callable[[Any], None]:
    """A function for ``Setup.keep``, which writes the plan that was found before a command was stopped."""

    def keep(found: Any) -> None:
        write_plan(found.plan, found.traced.graph, path, ": the best plan so far, which was not compared with its baselines")

    return keep


def say(text: str) -> None:
    """Print a line on stderr."""
    err.print(text, highlight=False, soft_wrap=True)


def say_notes(notes: Iterable[str]) -> None:
    """Print notes on stderr, each once and on a line of its own."""
    for note in dict.fromkeys(notes):
        say(f"note: {note}")


class LogLines(logging.Handler):
    """Prints log records on stderr as ``say`` does. Names of stages and files stand in them."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print the record's message."""
        say(self.format(record))


def write(path: Path | None, text: Callable[[], str], more: str = "") -> None:
    """Write a text to a file and say so, with ``more`` behind, if a path is given."""
    if path is not None:
        write_atomic(path, text())
        say(f"wrote {path}{more}")


def write_plan(plan: Plan, graph: Graph, path: Path, more: str = "") -> None:
    """Write a plan file and say so, with ``more`` behind."""
    write_plan_file(plan, graph, path)
    say(f"wrote {path}{more}")


def write_trace(path: Path | None, trace: Callable[[], Any]) -> None:
    """Write a Chrome trace, if a path is given."""
    write(path, lambda: json.dumps(trace()), "; open it in https://ui.perfetto.dev")


def log(given: options.Output) -> Callable[[str], None] | None:
    """A function that prints the solvers' lines on stderr; None without ``-v``."""
    return (lambda line: say(f"  solver: {line}")) if given.verbose else None


def add_explanation(explanation: Any, data: dict[str, Any], views: list[Any]) -> None:
    """Add an explanation to the data and the views."""
    data["explanation"] = explanation.to_dict()
    rows = explanation.rows()
    capped = any(row.get("cap_bytes") is not None for row in rows)
    views.append(table(rows, "why", explanation.text, hide=() if capped else ("cap_bytes",)))


def add_forecast(given: Any, plan: Any, family: Any, profile: Any, machine: Any, data: dict[str, Any], views: list[Any]) -> None:
    """Add the forecast of a generator to the data and the views, and with ``--explain`` the bottleneck of each phase."""
    from autosplit.generating.bounds import memory_bytes_per_s, phase_rows
    from autosplit.generating.forecast import forecast, host_text

    told: Any = forecast(plan, family, machine, profile)  # never None: the profile was measured for this plan
    host = host_text(plan, told, family.sequences, profile.host_s)
    data["forecast"] = {"sequences": family.sequences.given, **asdict(told), "host": host}
    views.append(table([asdict(told)], f"predicted for sequences that come at once: {family.sequences}", host))
    if given.explain:
        bytes_per_s = memory_bytes_per_s()
        data["phases"] = {"memory_bytes_per_s": bytes_per_s, "rows": phase_rows(plan, family, machine, profile, bytes_per_s)}
        views.append(table(data["phases"]["rows"], f"what bounds each phase; memory is read at {bytes_per_s / 1e9:.1f} GB/s"))


def add_simulation(
    given: Any, run: Callable[[int, Any], Any], data: dict[str, Any], views: list[Any], in_seconds: bool = False
) -> Any:
    """Simulate ``run(num_requests, arrivals_s)`` if the flags ask for it, and add the result to the data and the views.

    ``in_seconds`` says whether times are in seconds: a workload file has a time unit of its own.
    """
    from autosplit.costs.schedule import poisson_arrivals

    count = given.num_simulated
    if not count:
        return None
    arrivals_s = None if given.arrival_rate is None else poisson_arrivals(given.arrival_rate, count, given.seed)
    schedule = run(count, arrivals_s)
    latency = {f"p{share}": schedule.latency_s(share / 100) for share in (50, 90, 99)}
    unit, per = ("_s", "_per_s") if in_seconds else ("", "_per_unit")
    data["simulated"] = {
        "requests": count,
        f"arrivals{per}": given.arrival_rate,
        f"requests{per}": schedule.steady_per_s,
        f"makespan{unit}": schedule.makespan_s,
        f"latency{unit}": latency,
        "busy": {name: busy_s / schedule.makespan_s for name, busy_s in schedule.device_busy_s.items() if schedule.makespan_s},
    }
    row = {"requests": count, "come": given.arrival_rate or "all at once", f"requests{per}": schedule.steady_per_s}
    views.append(table([{**row, **{f"latency {name}{unit}": value for name, value in latency.items()}}], "simulated"))
    return schedule


def simulation_of(plan: Any, graph: Any, profile: Any, machine: Any) -> Callable[[int, Any], Any]:
    """A function that simulates the plan for a number of requests and their arrivals."""
    from autosplit.costs.planschedule import schedule_plan

    link, wires = machine.with_measured(profile.links).link, machine.wires or profile.wires
    cuts = plan.source.batch // plan.microbatch
    return lambda count, arrivals_s: schedule_plan(
        plan, graph, profile, link, count, arrivals_s=arrivals_s, microbatches=cuts, wires=wires
    )


def write_dot(path: Path | None, graph: Graph, plan: Plan) -> None:
    """Write the graph with the plan's stages for Graphviz, if a path is given."""
    write(path, lambda: graph_dot(graph, plan))


def write_simulation(path: Path | None, schedule: Any) -> None:
    """Write the Chrome trace of a simulation, if a path is given."""
    write_trace(path, lambda: chrome_trace(schedule.actions))


def require_equal(fault: str) -> None:
    """Raises: StageError: the outputs differed, as ``fault`` says."""
    if fault:
        raise StageError(f"the outputs differ from the unsplit model's: {fault}. Do not use this plan.")

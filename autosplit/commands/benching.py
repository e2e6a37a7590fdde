"""Measure a server under load, beside the prediction of a plan."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autosplit.commands.console import err, show, write
from autosplit.commands.options import Output, seconds
from autosplit.commands.report import table
from autosplit.commands.serving import read_token
from autosplit.errors import MissingExtraError, UsageError
from autosplit.progress import bars
from autosplit.values.planfile import read_plan

NUM_SIMULATED = 2000
"""Requests of a simulation for a rate."""


@dataclass(frozen=True, kw_only=True)
class Bench(Output):
    """What to load, and how much."""

    url: Annotated[str, typer.Argument(help="A server of the Open Inference Protocol, such as http://127.0.0.1:8000.")]
    model: Annotated[str, typer.Argument(help="One of its models; default: the only one.")] = ""
    rate: Annotated[
        str | None, typer.Option(help="Requests a second that come by chance; several with commas between, one after the other.")
    ] = None
    in_flight: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Instead: so many callers, each of which waits for its answer.")
    ] = None
    time: Annotated[str, typer.Option(help="How long each load lasts.")] = "10s"
    plan: Annotated[Path | None, typer.Option(help="The plan.yaml of the model: also show what it predicts for each rate.")] = (
        None
    )
    picture: Annotated[Path | None, typer.Option(help="Draw latency against rate as SVG.")] = None
    token_file: Annotated[Path | None, typer.Option(help="File of the server's token.")] = None


def bench(given: Bench) -> None:
    """Send requests to a server at a rate, or so many at a time, and show latency, throughput and refusals."""
    if (given.rate is None) == (given.in_flight is None):
        raise UsageError("say how much to send: either --rate 100 (requests a second) or --in-flight 8")
    rates = _rates(given.rate) if given.rate is not None else [None]
    limit_s = seconds(given.time)
    try:
        from autosplit.webservice.load import find_target, load_at_rate, load_in_flight, measure_http_s
    except ModuleNotFoundError as failure:
        raise MissingExtraError(f"bench needs '{failure.name}'; install it: pip install 'autosplit[serve]'") from None

    target = find_target(given.url, given.model, read_token(given.token_file))
    added_s = measure_http_s(target, rates[0]) if given.plan is not None and rates[0] is not None else 0.0
    rows = []
    with bars(err) as progress:
        for number, rate in enumerate(rates):
            progress("load", number / len(rates), f"{rate:g} requests/s" if rate else f"{given.in_flight} in flight")
            found = load_in_flight(target, given.in_flight or 1, limit_s) if rate is None else load_at_rate(target, rate, limit_s)
            failed = sum(count for status, count in found.statuses.items() if status not in (200, 429))
            row = {"rate_per_s": rate, "in_flight": given.in_flight, "answered_per_s": found.answered_per_s}
            row |= {"refused": found.statuses.get(429, 0), "failed": failed}
            row |= {"p50_s": found.latency.p50_s, "p90_s": found.latency.p90_s, "p99_s": found.latency.p99_s}
            rows.append(row | _predicted(given.plan, rate, added_s))
    show(
        given,
        {"url": target.url, "http_s": added_s, "loads": rows},
        table(rows, hide=["in_flight" if given.rate else "rate_per_s"]),
    )
    write(given.picture, lambda: _drawn(rows))


def _rates(text: str) -> list[float | None]:
    """Rates with commas between. Raises: UsageError: one is no number above 0."""
    try:
        rates = [float(word) for word in text.split(",")]
    except ValueError:
        rates = [0.0]
    if not all(0 < rate <= 1e6 for rate in rates):
        raise UsageError(f"--rate is '{text}'; write requests a second above 0, such as 100 or 50,100,200")
    return list(rates)


def _predicted(path: Path | None, rate: float | None, http_s: float) -> dict[str, Any]:
    """Latencies for requests at a rate: the plan's stages in a row, with their loads as predicted or measured, behind HTTP."""
    if path is None or rate is None:
        return {}
    from autosplit.costs.schedule import poisson_arrivals, simulate
    from autosplit.costs.simulation import SimStage
    from autosplit.values.machine import HOST

    file = read_plan(path)
    before, stages = HOST, []
    for stage in file.stages:
        stages.append(SimStage(stage.name, tuple(stage.devices), (stage.load_s,) * len(stage.devices), {before: ()}))
        before = stage.name
    stages[-1] = SimStage(stages[-1].name, stages[-1].devices, stages[-1].seconds, stages[-1].sources, ())
    bottleneck_s = max(stage.load_s / len(stage.devices) for stage in file.stages)
    if not 0 < rate * bottleneck_s < 1:  # beyond it the queue grows without end, and no latency can be predicted
        return {"predicted_p50_s": None, "predicted_p99_s": None}
    found = simulate(stages, NUM_SIMULATED, slots=NUM_SIMULATED, arrivals_s=poisson_arrivals(rate, NUM_SIMULATED))
    return {f"predicted_p{percent}_s": http_s + found.latency_s(percent / 100) for percent in (50, 99)}


def _drawn(rows: list[dict[str, Any]]) -> str:
    """Latency against answered requests a second, beside the prediction, as SVG."""
    from autosplit.figures.picture import bare, colour, sheet

    figure, axes = sheet(7.0, 4.0)
    for number, quantile in enumerate(("p50", "p99")):
        axes.plot(
            [row["answered_per_s"] for row in rows],
            [1e3 * row[f"{quantile}_s"] for row in rows],
            marker="o",
            color=colour(number),
            label=f"{quantile}, measured",
        )
        told = [row for row in rows if row.get(f"predicted_{quantile}_s")]
        if told:
            times_ms = [1e3 * row[f"predicted_{quantile}_s"] for row in told]
            axes.plot([row["rate_per_s"] for row in told], times_ms, "--", color=colour(number), label=f"{quantile}, predicted")
    axes.set_xlabel("requests/s")
    axes.set_ylabel("latency [ms]")
    axes.set_ylim(bottom=0)
    figure.legend(loc="outside upper left", ncols=4, frameon=False, fontsize=9)
    bare(axes)
    return figure.svg()

"""The options of the commands that run plans: run and auto."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autosplit.commands.options import GENERATE_HELP, Devices, Dot, PlansModel, Profiles, Search
from autosplit.values.samples import Precision

if TYPE_CHECKING:
    from autosplit.deploying.setup import Budget


@dataclass(frozen=True, kw_only=True)
class Running:
    """Run and report."""

    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests of the plan in all rounds; baselines get as long. Default: 2 s a round."),
    ] = None
    rounds: Annotated[int, typer.Option(min=1, help="Interleaved rounds of the plan and the baselines.")] = 5
    trace: Annotated[Path | None, typer.Option(help="Write a Chrome trace of the run, predicted beside measured.")] = None
    peers: Annotated[
        bool, typer.Option("--peers", help="Show how vLLM, accelerate, exo and ollama would split the model, as predicted.")
    ] = False
    picture: Annotated[Path | None, typer.Option(help="Draw the plan and its baselines as an SVG file.")] = None
    report: Annotated[
        Path | None,
        typer.Option(help="Write the report as a page (.html), or as a run file for 'autosplit report' (.json)."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class Auto(Running, Search):
    """Everything: measure, search, run."""

    def spending(self) -> "Budget":
        """Limits for the search and the report."""
        return dataclasses.replace(super().spending(), num_rounds=self.rounds, num_requests=self.requests)


@dataclass(frozen=True, kw_only=True)
class Run(Running, Devices):
    """Plan to run."""

    plan: Annotated[Path, typer.Argument(help="A plan.yaml.")] = Path("plan.yaml")
    model: PlansModel = None
    generate: Annotated[str | None, typer.Option(help=GENERATE_HELP)] = None
    traffic: Annotated[Path | None, typer.Option(help="For a plan of several sizes: file of the sizes that come.")] = None
    dot: Dot = None
    baselines: Annotated[bool, typer.Option(help="Run the baselines beside the plan.")] = True
    watch: Annotated[bool, typer.Option(help="Show on stderr the state of every stage while it runs.")] = False
    precision: Annotated[Precision | None, typer.Option(help="f32 or bf16; default: that of the plan.")] = None
    profiles: Profiles = None

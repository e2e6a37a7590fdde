"""The options of the commands that exchange splits with other tools: evaluate and export."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from autosplit.commands.options import PLANNER_TIME, Assumed, Devices, Output, PlansModel, ProfileOf, Profiles, Simulated


@dataclass(frozen=True, kw_only=True)
class Evaluate(Simulated, Assumed, Devices):
    """Split to judge."""

    subject: Annotated[str, typer.Argument(help="A model as for profile, a plan.yaml, or a planner's workload file.")]
    split: Annotated[
        str | None,
        typer.Option(
            help="For a model: device_map.json, split_spec.yaml, stages.txt (last op of each stage), a folder of ONNX stages, or "
            "numbers of layers such as 16,32. For a workload: JSON from node id to device name."
        ),
    ] = None
    run: Annotated[bool, typer.Option("--run", help="For a model: also measure the split, the best one and other tools'.")] = (
        False
    )
    rounds: Annotated[int, typer.Option(min=1, help="For --run: interleaved rounds.")] = 3
    model: PlansModel = None
    batch: Annotated[int, typer.Option(min=1, help="For a model: items in one request.")] = 1
    seq_len: Annotated[int | None, typer.Option(min=1, help="For a model: tokens in one item.")] = None
    trust: Annotated[bool, typer.Option("--trust", help="Read a .pt2 file, which can run code of its maker.")] = False
    backend: Annotated[str, typer.Option(help="For a model: the backend that runs every stage.")] = "eager"
    profiles: Profiles = None
    profile_of: ProfileOf = ""
    time_limit: Annotated[str, typer.Option(help="For a model: most time for the planner.")] = PLANNER_TIME
    format: Annotated[str, typer.Option(help="dnn-partitioning or pipedream.")] = "dnn-partitioning"
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 0


@dataclass(frozen=True, kw_only=True)
class Export(Output):
    """Export."""

    plan: Annotated[Path | None, typer.Argument(help="A plan.yaml.")] = None
    folder: Annotated[Path | None, typer.Argument(help="The folder to make.")] = None
    to: Annotated[str, typer.Option(help="The runtime; 'list' shows all, with their files and their limits.")] = "onnxruntime"
    model: PlansModel = None
    profiles: Profiles = None

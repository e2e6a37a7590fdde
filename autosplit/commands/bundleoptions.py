"""The options of ``autosplit bundle``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from autosplit.commands.options import Output, PlansModel


@dataclass(frozen=True, kw_only=True)
class Bundle(Output):
    """Bundle."""

    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN... BUNDLE | show|verify|run BUNDLE | compare DUMP DUMP",
            help="Plans, and the bundle to make of them (NAME=PLAN names an entry point); or what to do with a bundle.",
        ),
    ]
    zip: Annotated[bool, typer.Option("--zip", help="Write one file in place of a folder.")] = False
    trust: Annotated[
        bool, typer.Option("--trust", help="Trust the maker of the bundle: run its native code and every operator, as you.")
    ] = False
    network: Annotated[str | None, typer.Option(help="For run: the entry point, if there are several.")] = None
    policy: Annotated[str, typer.Option(help="For run: serial, threads or processes.")] = "serial"
    devices: Annotated[str | None, typer.Option(help="For run: devices, as for the other commands; default: the plan's.")] = None
    inputs: Annotated[Path | None, typer.Option(help="For run: a dump with the inputs; default: random ones, seed 0.")] = None
    dump: Annotated[Path | None, typer.Option(help="For run: a new folder for every tensor on a cut.")] = None
    model: PlansModel = None

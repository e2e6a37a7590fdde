"""The options of commands that show what is there: running hosts, devices, the report of a run."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from autosplit.commands.options import Clustered, Output


@dataclass(frozen=True, kw_only=True)
class Status(Output):
    """How to look at running hosts."""

    watch: Annotated[bool, typer.Option(help="Look again every second, until Ctrl-C.")] = False


@dataclass(frozen=True, kw_only=True)
class Shown(Clustered):
    """Devices and backends."""

    conformance: Annotated[bool, typer.Option("--conformance", help="List what backends compute otherwise than eager.")] = False


@dataclass(frozen=True, kw_only=True)
class Report(Output):
    """What to draw a page of."""

    run: Annotated[Path, typer.Argument(help="A run file, written with --report RUN.json.")]
    page: Annotated[Path, typer.Argument(help="The HTML file to write.")] = Path("report.html")

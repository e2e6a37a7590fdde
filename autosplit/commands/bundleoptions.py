"""The options of ``autosplit bundle``."""

from dataclasses import dataclass
from typing import Annotated

import typer

from autosplit.commands.options import Output, PlansModel


@dataclass(frozen=True, kw_only=True)
class Bundle(Output):
    """Bundle."""

    words: Annotated[
        list[str],
        typer.Argument(
            metavar="PLAN... BUNDLE | show BUNDLE | verify BUNDLE",
            help="Plans and the bundle to make of them, NAME=PLAN to name an entry point; or what to do with a bundle.",
        ),
    ]
    zip: Annotated[bool, typer.Option("--zip", help="Write one file in place of a folder.")] = False
    allow_native: Annotated[
        bool, typer.Option("--allow-native", help="Run native code (AOTInductor libraries) of the bundle, as you.")
    ] = False
    model: PlansModel = None

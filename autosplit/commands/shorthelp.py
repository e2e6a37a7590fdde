"""Help that fits a screen: the flags that most calls need, a line for each. ``--help-all`` shows all, in groups."""

import re
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand

from autosplit.commands.flaglists import JOINED, join_parts

FIRST = (
    "devices machine memory batch seq_len generate backend profiles output objective stages max_latency budget explain report "
    "split run rounds place default fallback accuracy simulate host port prompt prompt_ids max_new_tokens temperature "
    "max_sequences max_length json help help_all"
)
"""Flags that the short help of a command with more than ``MOST_FLAGS`` shows."""

MOST_FLAGS = 14

ALL = "autosplit.all"
"""Set in a context's ``meta`` if ``--help-all`` was given."""


class Command(TyperCommand):
    """A command with a short and a long help, whose lists may be given in parts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line."""
        return super().parse_args(ctx, join_parts(args, {*JOINED} & {one.name for one in self.get_params(ctx)}))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the long help if ``--help-all`` was given, else the short one."""
        if ctx.meta.get(ALL):
            super().format_help(ctx, formatter)
            return
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        found = self.get_params(ctx)
        arguments = [one for one in found if isinstance(one, TyperArgument)]
        flags = [one for one in found if one not in arguments]
        shown = [one for one in flags if one.name in FIRST.split()] if len(flags) > MOST_FLAGS else flags
        formatter.write_paragraph()
        formatter.write_dl([_row(one) for one in (*arguments, *shown)])
        if len(shown) < len(flags):
            formatter.write_paragraph()
            formatter.write_text(f"{len(flags) - len(shown)} more flags: {ctx.command_path} --help-all")


def write_commands(group: Any, ctx: Any, formatter: Any) -> None:
    """The help of the program: its commands, a clause for each, and its own flags."""
    group.format_usage(ctx, formatter)
    group.format_help_text(ctx, formatter)
    commands = [(name, re.split("[,;:]", group.get_command(ctx, name).help or "")[0]) for name in group.list_commands(ctx)]
    formatter.write_paragraph()
    flags = [one for one in group.get_params(ctx) if one.name != "show_completion"]  # for those who install none
    formatter.write_dl([*commands, *map(_row, flags)])


def _row(parameter: Any) -> tuple[str, str]:
    """The names of a parameter, and the first clause of its help with its default."""
    names = ", ".join(parameter.opts[::-1]) if isinstance(parameter, typer.core.TyperOption) else parameter.name.upper()
    text = (parameter.help or "").partition("; ")[0].partition(". ")[0].rstrip(".")
    value = parameter.default
    is_told = isinstance(value, str | int | float | Path) and not isinstance(value, bool) and value != ""
    return names, f"{text} ({value})" if is_told else text


def show_all(ctx: typer.Context, asked: bool) -> None:
    """The callback of ``--help-all``."""
    if asked:
        ctx.meta[ALL] = True
        typer.echo(ctx.get_help())
        raise typer.Exit

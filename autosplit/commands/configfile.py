"""The options file: flags of a command by their names in YAML; every fault of it is named at once."""

from pathlib import Path
from typing import Any

import typer

from autosplit.commands.flaglists import joined
from autosplit.errors import SHOWN_FAULTS, UsageError, close_names, raise_faults
from autosplit.files import read_data
from autosplit.parsing import shown

COMMAND_LINE_ONLY = ("model", "trust")
"""Flags that say whose code may run. An options file may be another person's, so it must not set them."""


def read_config(ctx: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: the values of the file become the defaults of the command's flags.

    Raises: UsageError: the file cannot be read, or with every fault: a flag that the command does not have, or a wrong value.
    """
    if path is None:
        return None
    content = read_data(path, "options", UsageError)
    if not isinstance(content, dict | None):
        raise UsageError(f"options file '{path}' holds {type(content).__name__}, not a mapping of flags to values")
    flags = {parameter.name or "": parameter for parameter in ctx.command.params}
    del flags["config"]
    values: dict[str, Any] = {}
    faults: list[str] = []
    for key, value in (content or {}).items():
        name = str(key).replace("-", "_")
        if name not in flags:
            hint = (close_names(name, flags) or f"; it has {', '.join(flags)}") if len(faults) < SHOWN_FAULTS else ""
            faults.append(f"{shown(str(key))} is not a flag of '{ctx.command.name}'{hint}")
        elif name in COMMAND_LINE_ONLY:
            faults.append(f"'{name}' names code that may run, so give it on the command line")
        elif name in values:
            faults.append(f"'{name}' is given twice, with '-' and with '_'")
        else:
            value = joined(flags[name], value)
            if fault := _fault(ctx, flags[name], value):
                faults.append(f"'{key}': {fault}")
        values[name] = value
    raise_faults(UsageError, f"options file '{path}' does not fit", faults)
    ctx.default_map = {**(ctx.default_map or {}), **values}
    return path


def _fault(ctx: typer.Context, flag: Any, value: Any) -> str:
    """The fault of a flag's value, '' if there is none. Typer would turn a list into its Python text if one value is due."""
    if value is None:
        return ""
    many = getattr(flag, "multiple", False)
    if isinstance(value, dict) or (isinstance(value, list) and not many):
        return f"takes one value, as on the command line, but is {shown(value)}"
    if many and not isinstance(value, list):
        return f"takes a list, so write [{str(value)[:60]}]"
    if many and any(isinstance(item, list | dict) for item in value):
        return f"takes a list of single values, but is {shown(value)}"
    if isinstance(value, bool) and not getattr(flag, "is_flag", False):
        return f"takes no true or false, but is {value}"
    try:
        flag.process_value(ctx, value)
    except typer.BadParameter as failure:
        return f"{failure.message.removeprefix('Value error, '):.300}, but is {shown(value)}"
    return ""

"""Flags: an options value becomes the parameters of a command, grouped in its help, the general ones last."""

import copy
import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

from autosplit.commands.options import Clustered, Output, flags_of
from autosplit.commands.shorthelp import show_all

T = TypeVar("T", bound=Output)

GENERAL = (Clustered, Output)
"""Options whose flags the help shows last, in this order: many commands have them, and few users need them."""


def command(function: Callable[[T], None]) -> Callable[..., None]:
    """A function whose parameters are the fields of the options value that ``function`` takes."""
    (options,) = (hint for name, hint in get_type_hints(function).items() if name != "return")
    # a copy, because commands share flags, and each command shows them in a group of its own
    hints: Mapping[str, Any] = copy.deepcopy(get_type_hints(options, include_extras=True))

    def run(ctx: typer.Context, help_all: bool = False, **values: Any) -> None:
        sources = {name: ctx.get_parameter_source(name) for name in values}
        given = frozenset(name for name, source in sources.items() if source is not None and source.name != "DEFAULT")
        function(options(**values, given=given))

    empty = inspect.Parameter.empty
    for kind in options.__mro__[:-1]:
        for name in vars(kind).get("__annotations__", {}):
            for info in (one for one in getattr(hints[name], "__metadata__", ()) if isinstance(one, OptionInfo)):
                info.rich_help_panel = (kind.__doc__ or "").partition(".")[0]  # the help shows flags by the class that has them
    places = {name: place for place, kind in enumerate(GENERAL, start=1) for name in flags_of(kind)}
    parameters = [inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)]
    parameters += [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in sorted(dataclasses.fields(options), key=lambda field: places.get(field.name, 0))
        if field.name != "given"
    ]
    asked = Annotated[bool, typer.Option("--help-all", is_eager=True, callback=show_all, help="Show all flags and exit.")]
    parameters.append(inspect.Parameter("help_all", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=asked))
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, "ctx": typer.Context, "help_all": asked}
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run

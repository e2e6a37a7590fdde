"""checked(): a function or class that says in one sentence which of its arguments is of the wrong type.

The types are those of the annotations. Only the argument itself is checked: the function checks the items of a sequence or a
mapping. A name that an annotation takes from ``TYPE_CHECKING`` stands for any type.
"""

import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from numbers import Integral, Real
from typing import Any, Literal, Protocol, TypeVar

from autosplit.errors import BRIEF, UsageError, raise_faults

T = TypeVar("T")

MADE_BY = {
    "Traced": "autosplit.trace makes one",
    "Profile": "autosplit.measure makes one",
    "Plan": "autosplit.search makes one, and autosplit.load reads one",
    "Machine": "autosplit.machine_for makes one",
    "Engine": "autosplit.open_pipeline(...).pipeline is one",
    "AutoResult": "autosplit.auto makes one",
}
"""Type name to the call that makes such a value."""

MAX_SHOWN = 60
WIDER: Mapping[type, type] = {int: Integral, float: Real, tuple: Sequence, list: Sequence}
"""Type to the wider type that is accepted for it: numpy's numbers, an integer for a float, any sequence for a tuple."""


def checked(made: T) -> T:
    """The function, or the class, with a check of its arguments before each call.

    >>> @checked
    ... def double(x: int) -> int:
    ...     return 2 * x
    >>> double("2")
    Traceback (most recent call last):
        ...
    autosplit.errors.UsageError: double() cannot be called like this (1 fault):
      * x must be int, but is '2' (str)

    Raises: UsageError: at each call with wrong types, with every fault.
    """
    if isinstance(made, type):
        setattr(made, "__init__", _checking(getattr(made, "__init__"), made.__name__))  # noqa: B009, B010 (mypy)
        return made
    return typing.cast(T, _checking(typing.cast(Callable[..., Any], made), getattr(made, "__name__", "")))


def _checking(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    parameters = list(inspect.signature(function).parameters.values())
    by_place = [one.name for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        expected = _expected(function)
        given = [*zip(by_place, args, strict=False), *kwargs.items()]
        wrong = [(key, value) for key, value in given if key in expected and not _fits(value, expected[key])]
        raise_faults(UsageError, f"{name}() cannot be called like this", [_fault(*one, expected[one[0]]) for one in wrong])
        return function(*args, **kwargs)

    return call


@lru_cache(maxsize=256)
def _expected(function: Callable[..., Any]) -> Mapping[str, tuple[type, ...]]:
    """Parameter to the types that it takes; a parameter of any type, and one whose type is not known, is left out."""
    found = {}
    for parameter in inspect.signature(function).parameters.values():
        if (
            parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            and parameter.annotation is not parameter.empty
        ):
            kinds = _types(parameter.annotation, function)
            if object not in kinds:
                found[parameter.name] = tuple(dict.fromkeys(kinds))
    return found


def _types(hint: Any, function: Callable[..., Any]) -> list[type]:
    """The classes that a value of this annotation may have; ``object`` for any."""
    if isinstance(hint, str):
        try:
            return _types(eval(hint, vars(sys.modules[function.__module__])), function)
        except NameError:
            return [object]
    origin = typing.get_origin(hint)
    if hint is None:
        return [type(None)]
    if origin is Literal:
        return [type(value) for value in typing.get_args(hint)]
    if origin in (typing.Union, types.UnionType):
        return [kind for one in typing.get_args(hint) for kind in _types(one, function)]
    if isinstance(hint, typing.NewType):
        return _types(hint.__supertype__, function)
    kind = origin or hint
    return [kind] if isinstance(kind, type) else [object]


_NOTHING = object()


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    return any(_is(value, kind) for kind in kinds)


def _is(value: Any, kind: type) -> bool:
    if kind is not Protocol and getattr(kind, "_is_protocol", False):
        members = [name for name in dir(kind) if not name.startswith("_")]
        return all(inspect.getattr_static(value, name, _NOTHING) is not _NOTHING for name in members)
    return isinstance(value, WIDER.get(kind, kind))


def _fault(name: str, value: Any, kinds: tuple[type, ...]) -> str:
    names = ["None" if kind is type(None) else kind.__name__ for kind in kinds]
    ways = [MADE_BY[kind] for kind in names if kind in MADE_BY]
    text = BRIEF.repr(value)
    shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    kind = "" if value is None else f" ({type(value).__name__})"
    return f"{name} must be {' or '.join(names)}, but is {shown}{kind}{'; ' * bool(ways)}{', '.join(ways)}"

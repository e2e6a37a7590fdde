"""checked(): a function or class that says in one sentence which of its arguments is of the wrong type.

The types are those of the annotations. Only the argument itself is checked: the function checks the items of a sequence or a
mapping. A parameter whose annotation is a text takes any type. A Protocol must be ``runtime_checkable``.
"""

import inspect
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from numbers import Integral, Real
from typing import Any, Literal, TypeVar

from autosplit.errors import BRIEF, UsageError, raise_faults

T = TypeVar("T")

MADE_BY = {
    "Module": "call a class or a function to get its module",
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
    expected = _expected(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = [*zip(by_place, args, strict=False), *kwargs.items()]
        wrong = [(key, value) for key, value in given if key in expected and not _fits(value, expected[key])]
        raise_faults(UsageError, f"{name}() cannot be called like this", [_fault(*one, expected[one[0]]) for one in wrong])
        return function(*args, **kwargs)

    return call


def _expected(function: Callable[..., Any]) -> Mapping[str, tuple[type, ...]]:
    """Parameter to the types that it takes; a parameter of any type is left out."""
    given = [
        one for one in inspect.signature(function).parameters.values() if one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD)
    ]
    kinds = {one.name: tuple(dict.fromkeys(_types(one.annotation))) for one in given if one.annotation is not one.empty}
    return {name: types for name, types in kinds.items() if object not in types}


def _types(hint: Any) -> list[type]:
    """The classes that a value of this annotation may have; ``object`` for any."""
    origin = typing.get_origin(hint)
    if hint is None:
        return [type(None)]
    if origin is Literal:
        return [type(value) for value in typing.get_args(hint)]
    if origin in (typing.Union, types.UnionType):
        return [kind for one in typing.get_args(hint) for kind in _types(one)]
    kind = origin or hint
    return [kind] if isinstance(kind, type) else [object]


def _fits(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, tuple(WIDER.get(kind, kind) for kind in kinds))


def _fault(name: str, value: Any, kinds: tuple[type, ...]) -> str:
    names = ["None" if kind is type(None) else kind.__name__ for kind in kinds]
    ways = [MADE_BY[kind] for kind in names if kind in MADE_BY]
    text = BRIEF.repr(value)
    shown = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
    kind = "" if value is None else f" ({type(value).__name__})"
    return f"{name} must be {' or '.join(names)}, but is {shown}{kind}{'; ' * bool(ways)}{', '.join(ways)}"

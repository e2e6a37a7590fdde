"""Every public call says in a sentence which argument is of the wrong type."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import autosplit
from autosplit.arguments import checked
from autosplit.errors import AutosplitError, UsageError
from autosplit.tracing.architectures import Given

MADE = (
    "AutoResult",
    "Family",
    "LoadedPlan",
    "OpenBundle",
    "Placed",
    "Profile",
    "RunReport",
    "SearchResult",
    "Service",
    "Shared",
    "Traced",
)
"""Classes of values that only calls make; whoever makes one by hand gets what he gave."""

CALLS = [
    name
    for name in autosplit.__all__
    if callable(made := getattr(autosplit, name)) and not (isinstance(made, type) and issubclass(made, BaseException))
    if name not in MADE
]


@pytest.mark.parametrize("name", CALLS)
def test_each_argument_of_each_public_call_is_refused_by_name(name: str) -> None:
    made = getattr(autosplit, name)
    for parameter in inspect.signature(made).parameters:
        with pytest.raises(UsageError, match=rf"{parameter} must be .*, but is <object object at"):
            made(**{parameter: object()})


@pytest.mark.parametrize("name", CALLS)
def test_no_wrong_argument_ends_in_a_plain_python_error(name: str) -> None:
    made = getattr(autosplit, name)
    needed = [one for one in inspect.signature(made).parameters.values() if one.default is one.empty]
    takes_3 = all(one.annotation is int for one in needed)
    for wrong in (None, -3 if takes_3 else 3, "x", [1], {"a": 1}) if needed else ():
        with pytest.raises(AutosplitError):
            made(**{one.name: wrong for one in needed})


def test_numbers_of_numpy_fit_and_the_message_says_what_makes_the_right_value() -> None:
    assert autosplit.Budget(search_s=np.float32(2), num_rounds=np.int64(3)).num_rounds == 3
    with pytest.raises(UsageError) as failure:
        autosplit.measure("x", 3)
    assert str(failure.value).splitlines() == [
        "measure() cannot be called like this (2 faults):",
        "  * traced must be Traced or Family, but is 'x' (str); autosplit.trace makes one",
        "  * devices must be Machine or str or Sequence or None, but is 3 (int); autosplit.machine_for makes one",
    ]


def test_an_annotation_that_is_a_text_takes_anything() -> None:
    @checked
    def call(any_one: "Nowhere", *rest: int, more: int | None = None) -> object:  # noqa: F821
        return any_one, rest, more

    assert call(3, "x") == (3, ("x",), None)
    with pytest.raises(UsageError, match="more must be int or None, but is 'x'"):
        call(3, more="x")


PRIVATE = torch.full((3,), 7.125)
SHOWN = ("7.125", "tensor(")


@pytest.mark.parametrize("wrong", [PRIVATE, [PRIVATE], {"x": PRIVATE}, Given((PRIVATE,), {}), PRIVATE.numpy()], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_no_message_holds_the_numbers_of_a_tensor(name: str, wrong: object) -> None:
    made = getattr(autosplit, name)
    for parameter in inspect.signature(made).parameters:
        try:
            made(**{parameter: wrong}, **_others(made, parameter))
        except AutosplitError as failure:
            assert not any(text in str(failure) for text in SHOWN)


def _others(made: Any, name: str) -> dict[str, object]:
    """A wrong value for each argument that must be given, so that no call begins."""
    needed = [one.name for one in inspect.signature(made).parameters.values() if one.default is one.empty]
    return {other: object() for other in needed if other != name}

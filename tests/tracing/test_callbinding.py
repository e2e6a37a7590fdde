"""A traced model is called as its module is: positional, by name, mixed, with defaults; a wrong call names the parameter."""

from typing import Any

import pytest
import torch

import autosplit
from autosplit.errors import UsageError
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model


class Scaled(torch.nn.Module):
    """Three parameters, one of them with a default, and named outputs in a container."""

    def forward(self, x: torch.Tensor, y: torch.Tensor, scale: float = 2.0, bias: torch.Tensor | None = None) -> dict[str, Any]:
        total = scale * x + y
        return {"total": total if bias is None else total + bias, "parts": (x * 1, y + 0)}


X, Y = torch.randn(2, 3), torch.randn(2, 3)


@pytest.fixture(scope="module")
def traced() -> Traced:
    return trace(load_model(Scaled().eval(), inputs=(X, Y)))


@pytest.mark.parametrize(
    "args,kwargs",
    [
        ((X, Y), {}),
        ((X,), {"y": Y}),
        ((), {"y": Y, "x": X}),
        ((X, Y, 2.0), {}),
        ((X, Y), {"bias": None, "scale": 2.0}),
    ],
)
def test_every_form_of_the_call_gives_the_modules_containers(traced: Traced, args: Any, kwargs: Any) -> None:
    answer, expected = traced.run(*args, **kwargs), Scaled()(*args, **kwargs)
    assert list(answer) == ["total", "parts"] and isinstance(answer["parts"], tuple)
    assert torch.equal(answer["total"], expected["total"]) and torch.equal(answer["parts"][1], expected["parts"][1])


def test_a_module_that_was_traced_by_name_may_be_called_by_position() -> None:
    named = trace(load_model(Scaled().eval(), inputs={"y": Y, "x": X}))
    assert torch.equal(named.run(X, Y)["total"], Scaled()(X, Y)["total"])


@pytest.mark.parametrize(
    "args,kwargs,words",
    [
        ((X,), {}, "missing a required argument: 'y'"),
        ((X, Y), {"z": Y}, "unexpected keyword argument 'z'"),
        ((X, Y), {"x": X}, "multiple values for argument 'x'"),
        ((X, Y), {"scale": 3.0}, "parameter 'scale' has its default in the trace"),
        ((X, Y), {"bias": X}, "parameter 'bias' has its default in the trace"),
        ((X, Y[:1]), {}, "y"),
    ],
)
def test_a_wrong_call_names_the_parameter(traced: Traced, args: Any, kwargs: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        traced.run(*args, **kwargs)


def test_a_constant_that_differs_is_named_as_the_caller_names_it() -> None:
    class Chosen(torch.nn.Module):
        def forward(self, x: torch.Tensor, sizes: list[int], flip: bool = False) -> torch.Tensor:
            return (-x if flip else x) * sizes[1]

    found = autosplit.trace(Chosen().eval(), (torch.ones(2), [1, 2]), {"flip": True})
    with pytest.raises(UsageError, match=r"'flip' was True in the trace and is False now\. Shapes"):
        found.run(torch.ones(2), [1, 2])
    with pytest.raises(UsageError, match=r"'sizes'\[1\] was 2 in the trace and is 3 now\. Shapes"):
        found.run(torch.ones(2), [1, 3], True)

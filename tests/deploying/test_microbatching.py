"""Which models may be run in microbatches, and which must see a whole request."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import autosplit
from autosplit.deploying.microbatching import require_independent
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.limits import affinity
from autosplit.errors import AutosplitError, ModelError
from autosplit.searching import loop
from autosplit.tracing.capturing import Traced
from autosplit.values.machine import Machine, parse_device


class Function(nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.function(*tensors)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "centred": lambda x: x - x.mean(0),
    "shares": lambda x: (2 * x, torch.softmax(x, 0)),
    "total": lambda x: x.sum(),
    "numbered": lambda x: x + torch.arange(len(x))[:, None],
    "averaged": lambda x: x / torch.tensor(float(len(x))),
    "pairs": lambda x: x @ x.T,
    # rows, items along the second axis, items in one axis, and a constant: none depends on another item
    "independent": lambda x: (x.softmax(1), x.argmax(1), x.T.contiguous() + 1, x.reshape(-1), torch.ones(3) * 2),
}


def made(kind: str, batch: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The items of the example are all the same: the inputs that are tried must not be."""
    return Function(FUNCTIONS[kind]).eval(), (torch.ones(batch, 5),)


def centred(batch: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return made("centred", batch)


def chosen(batch: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Each item names another one of its request, and takes a table that is the same for all."""
    module = Function(lambda x, rows, table: x[rows] + table)
    return module.eval(), (torch.randn(batch, 5), torch.arange(batch).flip(0), torch.randn(5))


class Drawn(nn.Module):
    """A layer with weights that no seed fixes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(5, 5), nn.BatchNorm1d(5)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.layer(x)) + table
        return out


def drawn(batch: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    return Drawn().eval(), (torch.randn(batch, 5), torch.randn(5))


@functools.cache
def traced(spec: str, batch: int) -> Traced:
    """A spec and a batch, traced once for all tests of this file."""
    return autosplit.trace(spec, batch=batch)


def tried(spec: str, batch: int, microbatch: int) -> None:
    require_independent(traced(spec, batch), traced(spec, microbatch))


@pytest.mark.parametrize("microbatch", [1, 2])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("centred", "output 'sub' is off by"),
        ("shares", "output 'softmax' is off by"),
        ("total", "output 'sum_1' is off by"),
        ("numbered", "output 'add' is off by"),
        ("averaged", "output 'div' is off by"),
        ("pairs", "does not say where items lie"),
    ],
)
def test_items_that_depend_on_each_other_are_found(kind: str, words: str, microbatch: int) -> None:
    with pytest.raises(ModelError, match=f"requests of 4 items .* microbatches of {microbatch}.*{words}"):
        tried(f"{__name__}:made?kind={kind}", 4, microbatch)


def test_a_microbatch_that_lacks_what_an_item_names_is_found() -> None:
    with pytest.raises(ModelError, match="trying it fails with IndexError"):
        tried(f"{__name__}:chosen", 4, 2)


@pytest.mark.parametrize(
    "spec",
    [
        f"{__name__}:made?kind=independent",
        f"{__name__}:drawn",
        "autosplit.examples.mlp:mlp?depth=3&width=32",
        "autosplit.examples.tied:tied?vocabulary=50&width=16",
        "autosplit.examples.unet:unet?channels=4&size=8&levels=1",
        "autosplit.examples.branches:branches?size=8&channels=4&depth=1",
    ],
)
@pytest.mark.parametrize("microbatch", [1, 2])
def test_other_models_may_run_in_microbatches(spec: str, microbatch: int) -> None:
    tried(spec, 4, microbatch)


@pytest.mark.parametrize(("spec", "is_cut"), [(f"{__name__}:centred", False), (f"{__name__}:drawn", True)])
def test_auto_cuts_no_request_whose_items_depend_on_each_other(monkeypatch: pytest.MonkeyPatch, spec: str, is_cut: bool) -> None:
    seen: list[int | str] = []
    search = loop.search

    def looked(question: Any, traced: Any, **settings: Any) -> Any:
        try:
            seen.append(settings["subject_for"](2)[0].source.batch)
        except AutosplitError as failure:
            seen.append(str(failure))
        return search(question, traced, **settings | {"budget": Budget(0.0)})

    monkeypatch.setattr(loop, "search", looked)
    one = Machine.of([parse_device(f"cpu:{affinity()[0]}")])
    budget = Budget(search_s=30, num_requests=4, num_rounds=1)
    found = autosplit.auto(autosplit.trace(spec, batch=4), one, setup=Setup(backends=["eager"]), budget=budget)
    assert found.plan.microbatch == 4 and found.report.best.outputs_equal
    assert seen == [2] if is_cut else "items of a request depend on each other" in str(seen[0])

"""Compare a traced graph with the user's module, on the example inputs and on fresh inputs of the same shapes.

A graph cannot hold a branch on values, Python state, random numbers, or the fact that two example inputs were one tensor.
If a model depends on these, its outputs differ from the graph's on one of the draws.
"""

import contextlib
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from autosplit.compat.models import attention_of
from autosplit.compat.torchparts import FakeTensor, pytree, stores_of
from autosplit.errors import BRIEF, TraceError
from autosplit.tracing.differing import NumericalError, difference, larger
from autosplit.tracing.tensorspec import copy_into, differences, empty_like_spec, laid_out, spec_of

NUM_DRAWS = 3
"""The example inputs and two fresh draws."""

SLOW_S = 5.0
"""A model whose pass takes longer runs twice only: on the example inputs and on one fresh draw."""

RELATIVE_TOLERANCE = 1e-3
REPEAT_TOLERANCE = 1e-5
"""Largest relative error of a module against itself on the same inputs: some kernels sum in any order."""

FAST_PATH = (
    "torch's fast path for nn.TransformerEncoder gives other outputs than the graph at padded positions (0, or none); "
    "the graph computes what the model does after torch.backends.mha.set_fastpath_enabled(False)"
)

Leaves = Sequence[torch.Tensor]
Function = Callable[..., Any]


def distinct_inputs(example: Leaves, count: int) -> list[tuple[torch.Tensor, ...]]:
    """The example and ``count - 1`` fresh inputs like it: floats get noise, integers and booleans change places."""
    generator = torch.Generator().manual_seed(0)
    return [tuple(example), *(tuple(_fresh(tensor, generator) for tensor in example) for _ in range(count - 1))]


def _fresh(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if tensor.is_floating_point():
        wide = tensor.double() if tensor.dtype == torch.float64 else tensor.float()  # torch adds nothing in 8 bits
        other = (wide + 0.1 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    else:
        other = tensor.reshape(-1)[torch.randperm(tensor.numel(), generator=generator)].reshape(tensor.shape)
    return laid_out(other, replace(spec_of("", tensor), offset_bytes=0))


def own_storage(inputs: Any) -> Any:
    """Copy nested inputs, each tensor with its strides in memory of its own."""

    def copied(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if isinstance(leaf, FakeTensor):
            return leaf.clone()
        copy = empty_like_spec(replace(spec_of("", leaf), offset_bytes=0))
        copy_into(copy, leaf.detach())
        return copy

    return pytree.tree_map(copied, inputs)


def verify(
    name: str,
    module: Function,
    run: Function,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    found: Any,
    num_draws: int = NUM_DRAWS,
) -> tuple[NumericalError, tuple[str, ...]]:
    """Compare a graph with its module.

    Args:
        module: the user's module; attributes that its calls assign are put back.
        run: the graph, called in the same way.
        found: the graph's outputs on the example inputs.
        num_draws: the example inputs, and fresh ones; with 1 the module is called once.
    Returns: the largest error over all draws, and sentences that the user should read.
    Raises: TraceError: the graph computes something else than the module. Also any exception of the module on its example inputs.
    """
    leaves, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    draws = distinct_inputs([leaves[place] for place in places], num_draws)

    def call(function: Function, draw: Leaves) -> Any:
        tensors = dict(zip(places, draw, strict=True))
        given = [tensors.get(place, leaf) for place, leaf in enumerate(leaves)]
        positional, named = own_storage(pytree.tree_unflatten(given, spec))
        return function(*positional, **named)

    compare = partial(_largest_error, name, module, run, call, found, draws)
    try:
        return compare(), ()
    except TraceError as failure:
        if not _has_fast_path(module):
            raise
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            return compare(), (FAST_PATH,)
        except TraceError:
            raise failure from None
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


def _largest_error(
    name: str, module: Function, run: Function, call: Function, found: Any, draws: Sequence[Leaves]
) -> NumericalError:
    """The largest error over all draws; ``call`` gives a function the inputs of a draw."""
    with torch.inference_mode(), _attributes_kept(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start = time.perf_counter()
        own = call(module, draws[0])
        is_slow = time.perf_counter() - start > SLOW_S
        if len(draws) > 1 and not is_slow and (fault := _compared(call(module, draws[0]), own, REPEAT_TOLERANCE)[0]):
            raise TraceError(
                f"model '{name}' gives other outputs when it is called again with the same inputs: {fault}. It keeps state or "
                "draws random numbers: take the state as an input and return it as an output, or make the noise an input."
            )
        fault, worst = _compared(found, own)
        if fault:
            raise TraceError(f"the graph of model '{name}' computes something else than the model: {fault}. {_why_other(module)}")
        for draw in draws[1 : 2 if is_slow else None]:
            try:
                own = call(module, draw)
            except Exception:  # integers may be valid in one order only, such as offsets
                continue
            fault, error = _compared(call(run, draw), own)
            if fault:
                raise TraceError(
                    f"on other inputs of the same shapes the graph of model '{name}' computes something else than the model: "
                    f"{fault}. A value of the example inputs became a constant of the graph, or the model keeps state: compute "
                    "with tensors instead of Python numbers and branches, and keep no tensors between calls."
                )
            worst = larger(worst, error)
    return worst


def _has_fast_path(module: Any) -> bool:
    kinds = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
    inside = module.modules() if isinstance(module, nn.Module) else ()
    return torch.backends.mha.get_fastpath_enabled() and any(isinstance(part, kinds) for part in inside)


@contextlib.contextmanager
def _attributes_kept(module: Any) -> Iterator[None]:
    """Undo assignments to attributes of the module and of its parts that calls of it make."""
    parts = list(module.modules()) if isinstance(module, nn.Module) else []
    stores = [store for part in parts for store in stores_of(part)]
    before = [dict(store) for store in stores]
    try:
        yield
    finally:
        for store, kept in zip(stores, before, strict=True):
            if store.keys() != kept.keys() or any(store[key] is not kept[key] for key in kept):
                store.clear()
                store.update(kept)


def _why_other(module: Any) -> str:
    """A cause that makes a graph compute something else than its module, and the way out."""
    if attention_of(module) == "sdpa":
        return (
            "Models of transformers may make other attention masks while they are traced: give '?attn_implementation=eager', "
            "or model.set_attn_implementation('eager')."
        )
    return "It may behave otherwise while it is traced, or depend on Python state; export it yourself and give the program."


def _compared(found: Any, own: Any, tolerance: float = RELATIVE_TOLERANCE) -> tuple[str, NumericalError]:
    """The first difference between two outputs of a model in words, or '', and the largest error before it.

    Integers and Python values must be equal.
    """
    leaves, worst = [pytree.tree_leaves(one) for one in (found, own)], NumericalError(0.0, 0.0, "")
    if len(leaves[0]) != len(leaves[1]):
        return f"it returns {len(leaves[0])} values in place of {len(leaves[1])}", worst
    for position, (ours, theirs) in enumerate(zip(*leaves, strict=True)):
        name = f"output {position}"
        if not isinstance(theirs, torch.Tensor):
            with suppress(Exception):  # equality of Python values may not be defined
                if ours is not theirs and not bool(ours == theirs):
                    return f"{name} is {BRIEF.repr(ours):.40} in place of {BRIEF.repr(theirs):.40}", worst
        elif unlike := differences([spec_of(name, theirs)], [ours]):
            return unlike[0], worst
        else:
            error = NumericalError(*difference(ours, theirs), name)
            limit = tolerance if theirs.is_floating_point() or theirs.is_complex() else 0.0
            if not error.relative <= limit:
                return f"{name} is {_words(error, limit)}", worst
            worst = larger(worst, error)
    return "", worst


def _words(error: NumericalError, limit: float) -> str:
    if math.isinf(error.relative):
        return "NaN or infinite in other places" if math.isinf(error.absolute) else "not 0 where the model gives 0 only"
    return f"off by {error.relative:.3g} of the largest value, and {limit:.3g} is allowed"

"""Calls of a model as flat tensors, and flat tensors as calls and answers.

``plain_call`` and ``plain_answer`` are fast ways for models without nested containers. ``as_call`` makes a call of tensors.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch

from autosplit.compat.torchparts import pytree
from autosplit.running.request import MatchingTensors
from autosplit.tracing.capturing import Traced
from autosplit.tracing.tensorspec import is_dense, is_laid_out

PlainCall = Callable[[Sequence[Any], Mapping[str, Any]], MatchingTensors | None]


def plain_call(traced: Traced) -> PlainCall:
    """A function that gives the tensors of a call as the trace was called, or None where ``flatten_inputs`` must look at it.

    The walk takes 40 us, as long as a small model. It is left out where every argument is a tensor with the layout of the trace.
    """
    positional, by_name = traced.in_spec.children()
    leaves = [*positional.children(), *by_name.children()]
    names, count = tuple(by_name.context or ()), positional.num_children
    named = [leaf for leaf in traced.in_leaves if isinstance(leaf, str)]
    if not all(leaf.num_children == 0 and leaf.num_leaves == 1 for leaf in leaves) or len(named) != len(traced.in_leaves):
        return lambda args, kwargs: None
    wanted = [(spec, spec.torch_dtype) for spec in (traced.specs[name] for name in traced.graph.inputs)]

    def tensors(args: Sequence[Any], kwargs: Mapping[str, Any]) -> MatchingTensors | None:
        if len(args) != count or len(kwargs) != len(names):
            return None
        values = (*args, *[kwargs.get(name) for name in names]) if names else tuple(args)
        for value, (spec, dtype) in zip(values, wanted, strict=True):
            if not (is_dense(value) and value.shape == spec.shape and value.dtype is dtype and is_laid_out(value, spec)):
                return None
        return MatchingTensors(values)

    return tensors


def plain_answer(traced: Traced) -> Callable[[Sequence[torch.Tensor]], Any]:
    """A function that makes what the model returns of the tensors of ``graph.outputs``.

    The walk through containers is left out where the model returns one tensor or a flat tuple or list of tensors.
    """
    leaves, names = list(traced.out_leaves), list(traced.graph.outputs)
    if leaves == names and traced.out_spec.is_leaf():
        return itemgetter(0)
    flat = all(child.is_leaf() for child in traced.out_spec.children())
    if leaves == names and flat and traced.out_spec.type in (tuple, list):
        return list if traced.out_spec.type is list else tuple
    return traced.unflatten_outputs


def as_call(traced: Traced, tensors: Sequence[torch.Tensor]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """The positional and the named arguments of the trace's own call, with these tensors for ``graph.inputs``."""
    values = iter(tensors)
    leaves = [next(values) if isinstance(leaf, str) else leaf.value for leaf in traced.in_leaves]
    args, kwargs = pytree.tree_unflatten(leaves, traced.in_spec)
    return args, kwargs

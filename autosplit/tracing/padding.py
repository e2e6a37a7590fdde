"""Check which dimensions of a model may be padded: a padded request must give the answer of the unpadded one.

A dimension is padded with zeros behind the request's own elements, and outputs are cut back along it. Attention masks then tell
the padding. The check runs a larger variant on padded inputs beside the user's module on the unpadded ones. It computes models in
bf16 and f16 in f32, because rounding would hide small differences, or be one.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod

import torch

from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import difference
from autosplit.tracing.family import At, Family
from autosplit.tracing.flattening import ancestors, is_pick
from autosplit.tracing.programs import user_line
from autosplit.tracing.verifying import distinct_inputs
from autosplit.tracing.widening import values_in_f32

TOLERANCE = 1e-4
"""Largest relative error of a padded request. Sums over other numbers of elements end in other bits, by about 1e-6."""

MOST_ELEMENTS, FEW_ELEMENTS = 1 << 25, 1 << 22
"""Elements of all values of a pass, up to which a variant is preferred for the check. Most of the check runs on one of few
elements, because larger ones say the same and take longer; one request is padded to a large one."""


def pad(tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The tensor with zeros behind it along each axis, up to this shape."""
    padded = tensor.new_zeros(tuple(shape))
    padded[tuple(map(slice, tensor.shape))] = tensor
    return padded


def cut(tensor: torch.Tensor, axes: Mapping[int, str], sizes: At) -> torch.Tensor:
    """The part of an output that belongs to a request of these sizes; a view. An axis of another size ('') is not padded."""
    for axis, dim in axes.items():
        tensor = tensor.narrow(axis, 0, sizes[dim]) if dim else tensor
    return tensor


def with_checked_padding(family: Family) -> Family:
    """The family with the reason for each dimension that may not be padded."""
    found = {dim: reason for dim in family.allowed if (reason := _refusal(family, dim))}
    return replace(family, unpaddable=found)


def _refusal(family: Family, dim: str) -> str:
    """Why a dimension may not be padded, or ''.

    The smallest size and a random one are padded to a quick variant, and another random one to a large variant.
    """
    sizes = family.allowed[dim]
    if len(sizes) < 2:
        return ""
    for name, axes in family.out_dims.items():
        if "" in axes.values():
            axis = next(axis for axis, found in axes.items() if not found)
            return f"axis {axis} of output '{name}' is not as long as an axis of the inputs, so padding cannot be cut off"
    draw = random.Random(0)
    quick, large = _checkable(family, dim, FEW_ELEMENTS), _checkable(family, dim, MOST_ELEMENTS)
    below, others = ([size for size in sizes if size < at[dim]] for at in (quick, large))
    for size in dict.fromkeys([below[0], draw.choice(below)]):
        if reason := _mixing(family, dim, {**quick, dim: size}, quick, 2):
            return reason
    return _mixing(family, dim, {**large, dim: draw.choice(others)}, large, 2 if large == quick else 1)


def _checkable(family: Family, dim: str, most_elements: int) -> At:
    """Sizes of a variant to pad to: all other dimensions small, this one the largest with no more elements in a pass."""
    lows = {other: sizes[0] if len(sizes) < 2 or sizes[0] > 1 else sizes[1] for other, sizes in family.allowed.items()}
    smallest = family.variants[-1].graph.values.values()
    rest = sum(prod(value.shape) for value in smallest) / family.sizes[-1][dim]
    quick = [size for size in family.allowed[dim][1:] if size * rest <= most_elements]
    return {**lows, dim: quick[-1] if quick else family.allowed[dim][1]}


def _mixing(family: Family, dim: str, small: At, large: At, num_draws: int) -> str:
    """The op that mixes padding into the answers of a request of these small sizes, in words; '' if none does.

    With several draws the exact trace is compared with the module too.
    """
    exact, padded = family.make(small, num_draws - 1), family.at(large)
    for inputs in distinct_inputs(exact.example_inputs, num_draws):
        wanted = values_in_f32(exact.program, inputs)
        specs = [padded.specs[name] for name in padded.graph.inputs]
        padded_inputs = [pad(tensor, spec.shape) for tensor, spec in zip(inputs, specs, strict=True)]
        found = values_in_f32(padded.program, padded_inputs)
        wrong = [
            name
            for name, axes in family.out_dims.items()
            if difference(cut(found[name], axes, small), wanted[name])[1] > _limit(wanted[name])
        ]
        if wrong:
            op, line = _first_other(exact, found, wanted, (small[dim], large[dim]), wrong)
            share = difference(cut(found[wrong[0]], family.out_dims[wrong[0]], small), wanted[wrong[0]])[1]
            return (
                f"padding '{dim}' from {small[dim]} to {large[dim]} changes output '{wrong[0]}' by {share:.2g} of its largest "
                f"value: op '{op}' mixes elements along it{f' ({line})' if line else ''}"
            )
    return ""


def _limit(tensor: torch.Tensor) -> float:
    return TOLERANCE if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _first_other(
    exact: Traced,
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    pair: tuple[int, int],
    wrong: Sequence[str],
) -> tuple[str, str]:
    """The first op before the wrong outputs with another value where the request's own elements are, and its line."""
    nodes = {node.name: node for node in exact.program.graph.nodes}
    before = ancestors(nodes[name] for name in wrong)
    for node in exact.program.graph.nodes:
        if node not in before or node.name not in wanted or node.op == "placeholder":
            continue
        ours, own = found[node.name], wanted[node.name]
        axes = [axis for axis in range(own.dim()) if ours.shape[axis] != own.shape[axis]]
        if any((own.shape[axis], ours.shape[axis]) != pair for axis in axes):
            continue  # an axis that joins several dimensions
        for axis in axes:
            ours = ours.narrow(axis, 0, pair[0])
        if difference(ours, own)[1] > _limit(own):
            made = node.all_input_nodes[0] if is_pick(node) else node
            return made.name, user_line(made)
    return wrong[0], user_line(nodes[wrong[0]])

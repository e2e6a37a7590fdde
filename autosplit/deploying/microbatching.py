"""Check whether a request may be cut into microbatches: its items must not depend on each other.

A trace does not tell, because its shapes are fixed. A net that subtracts the mean over its items runs in microbatches too, but
gives other numbers. The check of a plan does not find that, because its reference runs the same microbatches.
"""

from collections.abc import Sequence

import torch
from torch.func import functional_call

from autosplit.backends.checking import model_reference
from autosplit.backends.workspace import Microbatch
from autosplit.errors import ModelError
from autosplit.tracing.capturing import Traced
from autosplit.tracing.differing import compare
from autosplit.tracing.tensorspec import laid_out
from autosplit.tracing.verifying import distinct_inputs

LIFTED = "lifted_tensor"
"""Prefix of buffers that are constants which the model makes of numbers, and not weights."""


def require_independent(whole: Traced, part: Traced) -> None:
    """Run a request as it is and in microbatches, which must give the same numbers up to rounding.

    A tensor is cut where its shapes in the two traces differ. One whose shape is the same goes with each microbatch as it is; if
    it is an output, each microbatch must give it.

    Args:
        whole: the model, traced for a request.
        part: the same model, traced for a microbatch; it is run with the weights of ``whole``.
    Raises: ModelError: items depend on each other, or nothing says how to cut a request.
    """
    num_items, size = whole.source.batch, part.source.batch
    subject = f"requests of {num_items} items to model '{whole.graph.name}' cannot be cut into microbatches of {size}"
    in_dims = _cut_dims(subject, whole, part, whole.graph.inputs, part.graph.inputs)
    out_dims = _cut_dims(subject, whole, part, whole.graph.outputs, part.graph.outputs)
    request = distinct_inputs(whole.example_inputs, 2)[1]  # the example's items may be all the same
    with torch.inference_mode():
        try:
            reference, answers = model_reference(whole, request), _in_parts(whole, part, request, in_dims)
        except Exception as failure:  # an index counts the items of a request, and a microbatch has fewer
            raise ModelError(f"{subject}: trying it fails with {type(failure).__name__}: {failure}") from failure
        for name, dim, wanted, *found in zip(whole.graph.outputs, out_dims, reference.outputs[0], *answers, strict=True):
            for value in found if dim is None else [torch.cat(found, dim)]:
                error = compare([name], [value], [wanted])
                if not error.relative <= (limit := reference.tolerance("f32")):
                    off = f"off by {error.relative:.3g} of its largest value, and {limit:.3g} is allowed"
                    raise ModelError(f"{subject}: the items of a request depend on each other, output '{name}' is {off}")


def _cut_dims(subject: str, whole: Traced, part: Traced, names: Sequence[str], part_names: Sequence[str]) -> list[int | None]:
    """The dimension of each value in which the items of a request lie, None if its shape does not depend on their number.

    Raises: ModelError: its shapes do not say.
    """
    if len(names) != len(part_names):
        raise ModelError(f"{subject}: it has {len(names)} values ({', '.join(names)}) for a request and {len(part_names)} then")
    count = whole.source.batch // part.source.batch
    dims: list[int | None] = []
    for name, part_name in zip(names, part_names, strict=True):
        shape, part_shape = whole.specs[name].shape, part.specs[part_name].shape
        differ = [dim for dim, (size, of_part) in enumerate(zip(shape, part_shape, strict=False)) if size != of_part]
        if shape == part_shape:
            dims.append(None)
        elif len(shape) == len(part_shape) and len(differ) == 1 and shape[differ[0]] == count * part_shape[differ[0]]:
            dims.append(differ[0])
        else:
            raise ModelError(f"{subject}: '{name}' has shape {shape} and then {part_shape}, which does not say where items lie")
    return dims


def _in_parts(whole: Traced, part: Traced, request: Microbatch, dims: Sequence[int | None]) -> list[Microbatch]:
    """The outputs of each microbatch of a request.

    The weights come from the request's trace: a spec may draw others, or calibrate them with as many items as it is asked for.
    """
    count = whole.source.batch // part.source.batch
    own = {name: tensor for name, tensor in part.program.named_buffers() if not name.startswith(LIFTED)}
    weights = {n: tensor for n, tensor in whole.program.named_buffers() if n in own and tensor.shape == own[n].shape}
    specs = [part.specs[name] for name in part.graph.inputs]
    answers = []
    for number in range(count):
        pieces = [
            value if dim is None else value.narrow(dim, number * spec.shape[dim], spec.shape[dim])
            for value, dim, spec in zip(request, dims, specs, strict=True)
        ]
        inputs = tuple(laid_out(piece, spec) for piece, spec in zip(pieces, specs, strict=True))
        answers.append(tuple(functional_call(part.program, weights, inputs)))
    return answers

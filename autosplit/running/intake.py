"""Requests are taken in: Intake makes them of tensors that fit the network, InputCopies hold their inputs while they wait."""

import time
from collections.abc import Sequence

import torch

from autosplit.errors import SHOWN_FAULTS, UsageError, raise_faults
from autosplit.running.copying import CopyPool
from autosplit.running.request import MatchingTensors, Request
from autosplit.running.wiring import Wiring
from autosplit.tracing.tensorspec import differences, is_dense, kind_of


class Intake:
    """Makes requests of tensors that fit the inputs of a network."""

    def __init__(self, wiring: Wiring) -> None:
        self._names, self._specs = wiring.inputs, wiring.input_specs
        named = list(enumerate(wiring.inputs))
        self._checks = [(at, self._specs[name].shape, self._specs[name].torch_dtype) for at, name in named if name in self._specs]
        self._unread = [(at, name) for at, name in named if name not in self._specs]
        read = [wiring.inputs[at] for at, _, _ in self._checks]
        self._layouts = [[specs[name] for name in read] for specs in wiring.input_layouts]
        shapes = [tuple(spec.shape for spec in specs) for specs in self._layouts]
        self._variants = {shape: variant for variant, shape in reversed(list(enumerate(shapes)))}

    def __call__(
        self,
        inputs: Sequence[torch.Tensor],
        deadline_ns: int = 0,
        *,
        caller_keeps_inputs: bool = False,
        variant: int = 0,
    ) -> Request:
        """The request; ``variant`` is that of MatchingTensors.

        Raises: UsageError: the number, a shape, a dtype or the kind of a tensor does not fit.
        """
        if inputs.__class__ is MatchingTensors:
            return Request(inputs, deadline_ns, time.monotonic_ns(), caller_keeps_inputs=caller_keeps_inputs, variant=variant)
        names = self._names
        if not isinstance(inputs, Sequence):
            raise UsageError(f"a request is a list of tensors, one for each input, but is {kind_of(inputs) or 'one tensor'}")
        if len(inputs) != len(names):
            raise UsageError(f"{len(inputs)} inputs were given, and the pipeline takes {len(names)}: {', '.join(names)}")
        for position, shape, dtype in self._checks:
            value = inputs[position]
            if not is_dense(value) or value.shape != shape or value.dtype != dtype:
                variant = self._variant_of([inputs[at] for at, _, _ in self._checks])
                break
        for position, name in self._unread:
            if not is_dense(inputs[position]):
                raise UsageError(f"input '{name}' is {kind_of(inputs[position])}, and a dense tensor is expected")
        return Request(tuple(inputs), deadline_ns, time.monotonic_ns(), caller_keeps_inputs=caller_keeps_inputs, variant=variant)

    def _variant_of(self, inputs: Sequence[torch.Tensor]) -> int:
        """The variant that takes tensors of these shapes. Raises: UsageError: there is none, or a dtype or kind does not fit."""
        dense = all(map(is_dense, inputs))
        variant = self._variants.get(tuple(tuple(value.shape) for value in inputs)) if dense else None
        if variant is None or any(value.dtype != dtype for value, (_, _, dtype) in zip(inputs, self._checks, strict=True)):
            faults = differences(self._layouts[variant or 0], inputs)
            if len(self._layouts) > 1 and variant is None:
                shown = self._layouts[:SHOWN_FAULTS]
                sizes = "; ".join(", ".join(f"'{spec.name}' {list(spec.shape)}" for spec in specs) for specs in shown)
                rest = " and smaller ones" * (len(shown) < len(self._layouts))
                faults.append(f"requests must have exactly the shapes of one of {len(self._layouts)} variants: {sizes}{rest}")
            raise_faults(UsageError, "the inputs do not fit the pipeline", faults)
        return variant or 0


class InputCopies:
    """Copies inputs for one network.

    Args:
        most: requests whose inputs are copied at one time, at most.
    """

    def __init__(self, wiring: Wiring, most: int) -> None:
        layouts = wiring.input_layouts
        self._pools = [
            CopyPool([specs[name] for specs in layouts], most) if name in wiring.input_specs else None for name in wiring.inputs
        ]

    def hold(self, request: Request) -> None:
        """Copy the inputs of a request, unless its caller keeps them or they were copied. Not for several threads at once."""
        if request.caller_keeps_inputs or request.holds_inputs:
            return
        pairs = zip(self._pools, request.inputs, strict=True)
        copies = [pool.copy(value, request.variant) if pool is not None else value.clone() for pool, value in pairs]
        request.inputs = MatchingTensors(copies) if request.inputs.__class__ is MatchingTensors else tuple(copies)
        request.holds_inputs = True

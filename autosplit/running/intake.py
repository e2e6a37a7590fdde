"""Intake: checks the tensors of a request against the network and makes a Request of them."""

import time
from collections.abc import Sequence

import torch

from autosplit.errors import UsageError, raise_faults
from autosplit.running.request import Checked, Request
from autosplit.running.wiring import Wiring
from autosplit.tracing.tensorspec import differences, is_dense, kind_of


class Intake:
    """Makes requests of tensors that fit the inputs of a network."""

    def __init__(self, wiring: Wiring) -> None:
        self._names, self._specs = wiring.inputs, wiring.input_specs
        named = list(enumerate(wiring.inputs))
        self._checks = [(at, self._specs[name].shape, self._specs[name].torch_dtype) for at, name in named if name in self._specs]
        self._unread = [(at, name) for at, name in named if name not in self._specs]

    def __call__(self, inputs: Sequence[torch.Tensor], deadline_ns: int = 0, *, borrowed: bool = False) -> Request:
        """The request. Raises: UsageError: the number, a shape, a dtype or the kind of a tensor does not fit."""
        if inputs.__class__ is Checked:
            return Request(inputs, deadline_ns, time.monotonic_ns(), borrowed=borrowed)
        names = self._names
        if not isinstance(inputs, Sequence):
            raise UsageError(f"a request is a list of tensors, one for each input, but is {kind_of(inputs) or 'one tensor'}")
        if len(inputs) != len(names):
            raise UsageError(f"{len(inputs)} inputs were given, and the pipeline takes {len(names)}: {', '.join(names)}")
        for position, shape, dtype in self._checks:
            value = inputs[position]
            if not is_dense(value) or value.shape != shape or value.dtype != dtype:
                specs = [self._specs[names[at]] for at, _, _ in self._checks]
                faults = differences(specs, [inputs[at] for at, _, _ in self._checks])
                raise_faults(UsageError, "the inputs do not fit the pipeline", faults)
        for position, name in self._unread:
            if not is_dense(inputs[position]):
                raise UsageError(f"input '{name}' is {kind_of(inputs[position])}, and a dense tensor is expected")
        return Request(tuple(inputs), deadline_ns, time.monotonic_ns(), borrowed=borrowed)

"""Copies of the inputs of requests that wait, in memory that is used again."""

from autosplit.running.copying import CopyPool
from autosplit.running.request import MatchingTensors, Request
from autosplit.running.wiring import Wiring


class InputCopies:
    """Copies inputs for one network.

    Args:
        wiring: the network.
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

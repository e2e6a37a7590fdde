"""Feeds: the rings that the host writes requests into."""

from autosplit.running.copying import Copies
from autosplit.running.provisioner import Deployment, host_channels
from autosplit.running.request import Request
from autosplit.running.ring import RingEnd

FULL_S = 60.0
"""A ring that has no free slot for so long is one that the window should have kept from being full."""


class Feeds:
    """The host's ends of the rings that begin at it.

    Args:
        deployment: the rings.
        room: requests that may wait at the door, whose inputs are copied.
    """

    def __init__(self, deployment: Deployment, room: int) -> None:
        wiring = deployment.wiring
        self._ends = [
            ([RingEnd(ring, sends=True) for ring in deployment.rings[number]], wiring.channels[number].source_index)
            for number in host_channels(wiring)[0]
        ]
        self._passed = [(name, wiring.inputs.index(name)) for name in wiring.outputs if name in wiring.inputs]
        self._copies = [
            Copies(wiring.input_specs[name], room) if name in wiring.input_specs and name not in wiring.outputs else None
            for name in wiring.inputs
        ]

    def keep(self, request: Request) -> None:
        """Copy the inputs of a request that has to wait: its caller may write into its tensors once submit returns."""
        request.inputs = tuple(
            copies.copy(value) if copies else value.clone() for copies, value in zip(self._copies, request.inputs, strict=True)
        )

    def write(self, request: Request) -> None:
        """Hand the inputs of a request to the first stages, and those that are outputs as they are to itself."""
        for name, position in self._passed:
            request.values[name] = request.inputs[position].clone()
        for ends, index in self._ends:
            end = ends[request.sequence % len(ends)]
            end.acquire(request.sequence, timeout_s=FULL_S).write([request.inputs[position] for position in index])
            end.release(request.sequence)
        request.inputs = ()

"""Feeds: the rings that the host writes requests into."""

from autosplit.running.copying import Copies
from autosplit.running.provisioner import Deployment, host_channels
from autosplit.running.request import Request
from autosplit.running.ring import SKIPPED, RingEnd


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
        """Hand the inputs of a request to the first stages, and those that are outputs as they are to itself.

        Never waits: a worker frees the slots of its inputs before it hands over its last output, so a request that is done left
        free slots behind. Raises: TimeoutError: a slot is not free all the same.
        """
        try:
            for name, position in self._passed:
                request.values[name] = request.inputs[position].clone()
            for ends, index in self._ends:
                end = ends[request.sequence % len(ends)]
                end.acquire(request.sequence, timeout_s=0.0).write([request.inputs[position] for position in index])
                end.release(request.sequence)
        except BaseException:  # Ctrl-C in a caller's thread, say
            self._void(request.sequence)
            raise
        request.inputs = ()

    def _void(self, sequence: int) -> None:
        """Hand over a request whose inputs were not all written as one to skip, so that it holds up none behind it."""
        for ends, _ in self._ends:
            end = ends[sequence % len(ends)]
            if end.ready(sequence):
                end.acquire(sequence).write_text(SKIPPED)
                end.release(sequence)

"""Residency: which weights of a stage stay on an accelerator, and which are streamed to it from the host for each request.

A streamed stage has two buffers on its device. A part is an op and the weights that no other op reads. While one part computes,
the weights of the next one are copied into the other buffer::

    copies    part 1        | part 2        | part 3 ...
    computes  part 0, kept  | part 1, kept  | part 2, kept ...

The ops whose weights stay compute between two parts. Parts are spread evenly over the ops, so that the link is never idle for
long. FlexGen (Sheng et al., 2023) also keeps a share of each layer on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from autosplit.tables import bytes_text
from autosplit.values.machine import HOST_KINDS, kind_of
from autosplit.values.samples import STREAMING

Residency = Literal["resident", "streamed"]
"""``resident``: all weights of a stage stay on its device. ``streamed``: those beyond its ``resident_bytes`` do not."""

NUM_BUFFERS = 2
SMALLEST_PART = 1 / 8
"""Least weights of a part as a share of the buffer: each part costs two waits and the start of a copy."""

SMALLEST_BUFFER = 1 / 64
"""Least size of a buffer as a share of the weights of the largest op."""


@dataclass(frozen=True, slots=True)
class Parts:
    """The ops of a stage whose weights are streamed, by their places in the stage, and the bytes of each of the two buffers."""

    streamed: tuple[int, ...] = ()
    buffer_bytes: int = 0

    def next_in_buffer(self, part: int) -> int:
        """The next part that is copied into the buffer of this part."""
        return part + NUM_BUFFERS if part + NUM_BUFFERS < len(self.streamed) else part % NUM_BUFFERS


def parts_of(own_bytes: Sequence[int], shared_bytes: int, resident_bytes: float) -> Parts | None:
    """The parts of a stage; None if its device must hold more bytes.

    Args:
        own_bytes: bytes of the weights that only this op reads, for each op of the stage in order.
        shared_bytes: bytes of the weights that several ops read. They stay.
        resident_bytes: bytes that the weights may take on the device, buffers included.

    >>> parts_of([4, 4, 4, 4, 4, 4], 1, 17)
    Parts(streamed=(0, 1, 3, 4), buffer_bytes=4)
    """
    total = sum(own_bytes) + shared_bytes
    if total <= resident_bytes:
        return Parts()
    for buffer_bytes in _buffers(own_bytes):
        there = _candidates(own_bytes, buffer_bytes)
        streamed_bytes = total + NUM_BUFFERS * buffer_bytes - resident_bytes
        all_bytes = sum(own_bytes[place] for place in there)
        if streamed_bytes <= all_bytes:
            chosen, passed, taken = list[int](), 0, 0
            for place in there:
                passed += own_bytes[place]
                if taken * all_bytes < streamed_bytes * passed:
                    chosen.append(place)
                    taken += own_bytes[place]
            return Parts(tuple(chosen), buffer_bytes)
    return None


def least_bytes(own_bytes: Sequence[int], shared_bytes: int) -> int:
    """The least bytes that the weights of a stage take on its device: kept ones, and two buffers.

    >>> least_bytes([4, 4, 4, 4, 4, 4], 1)
    9
    """
    total = sum(own_bytes) + shared_bytes
    saved = (sum(own_bytes[place] for place in _candidates(own_bytes, size)) - NUM_BUFFERS * size for size in _buffers(own_bytes))
    return total - max(0, max(saved, default=0))


def fewest_bytes(own_bytes: Sequence[int], shared_bytes: int) -> int:
    """A bound on the bytes of weights on devices that hold these ops, in any stages: they stay, or two buffers take them.

    Arguments as for ``parts_of``.

    >>> fewest_bytes([4, 9, 4], 1)
    18
    """
    largest = sorted(own_bytes, reverse=True)
    kept = accumulate(largest, initial=0)
    return shared_bytes + min(staying + NUM_BUFFERS * size for staying, size in zip(kept, [*largest, 0], strict=True))


def streaming_faults(
    devices: Sequence[str], backend: str, resident_bytes: int, own_bytes: Sequence[int], shared_bytes: int
) -> list[str]:
    """Why the weights of a stage cannot be streamed, as predicates of the stage; bytes as for ``parts_of``."""
    least = least_bytes(own_bytes, shared_bytes)
    faults = [
        f"is streamed, and '{name}' computes in the memory of the host, where its weights are; leave out 'residency'"
        for name in devices
        if kind_of(name) in HOST_KINDS
    ]
    if backend not in STREAMING:
        faults.append(f"is streamed on {backend}, and only {', '.join(STREAMING)} streams weights")
    if resident_bytes < least:
        faults.append(
            f"has resident_bytes={resident_bytes}; weights that stay and two buffers for the others take at least {least} "
            f"({bytes_text(least)})"
        )
    if resident_bytes >= (total := sum(own_bytes) + shared_bytes):
        faults.append(
            f"is streamed with resident_bytes={resident_bytes}, and all its weights take {total} ({bytes_text(total)}): "
            "they stay; leave out 'residency' and 'resident_bytes'"
        )
    return faults


def _buffers(own_bytes: Sequence[int]) -> list[int]:
    """The sizes that buffers may have, the smallest first: a smaller one leaves more room for weights that stay."""
    least = SMALLEST_BUFFER * max(own_bytes, default=0)
    return sorted({size for size in own_bytes if size and size >= least})


def _candidates(own_bytes: Sequence[int], buffer_bytes: int) -> list[int]:
    """The places of the ops that may be parts."""
    return [place for place, size in enumerate(own_bytes) if SMALLEST_PART * buffer_bytes <= size <= buffer_bytes]

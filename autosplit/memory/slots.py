"""How many slots the rings between stages have, and how many requests are in flight."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autosplit.values.machine import HOST_KINDS

BURST, BURST_DEPTH = 16, 4
"""The most requests in flight if they are small and answers come fast, so that the host wakes once for several answers; and the
least queue depth for as many. At a smaller depth they are fewer in proportion."""

BURST_BYTES = 512 * 1024
"""The most bytes of these requests in the host's slots: half of a core's second-level cache."""

NUM_CONTEXTS = 3
"""Requests in progress on an accelerator: one arrives, one computes, one leaves."""

HOST = -1
"""The host's number among the stages; a stage's number is its position."""


@dataclass(frozen=True, slots=True)
class Workers:
    """The replicas of a stage, the requests that each works on at once, and the slots of a ring that leads to the stage."""

    replicas: int
    streams: int
    queue_depth: int


def at_once(kinds: Iterable[str], streams: int) -> int:
    """Requests that a replica of a stage on devices of these kinds works on at once."""
    return streams if set(kinds) <= set(HOST_KINDS) else NUM_CONTEXTS


def in_flight(stages: Sequence[Workers], host_bytes: int) -> tuple[int, int]:
    """The most requests in flight, and the most while small ones come fast.

    Every replica has work and every ring is half full then.

    Args:
        host_bytes: bytes that the host writes and reads for one request.
    """
    window = sum(stage.replicas * (stage.streams + max(1, stage.queue_depth // 2)) for stage in stages)
    burst = BURST * min(BURST_DEPTH, *(stage.queue_depth for stage in stages)) // BURST_DEPTH
    return window, max(window, min(burst, BURST_BYTES // max(1, host_bytes)))


def num_slots(stages: Sequence[Workers], source: int, target: int, levels: Sequence[int], most: int) -> int:
    """Slots of each ring from one stage to another, where a ring carries each ``lcm``-th request of the replicas of both.

    Args:
        source: the number of the stage that sends, or HOST.
        target: the number of the stage that receives, or HOST.
        levels: for each stage up to the target, the most stages before it on a path from the host.
        most: the most requests in flight.
    """
    replicas = [1 if number == HOST else stages[number].replicas for number in (source, target)]
    share = -(-most // math.lcm(*replicas))
    if source == HOST:
        # The host never waits for a slot, and a slot keeps its request for a replay until the answer is delivered.
        return share + 1
    if target == HOST:
        return share
    # A value that skips stages waits for them: one more slot for each.
    return min(share, stages[target].queue_depth + levels[target] - levels[source] - 1)

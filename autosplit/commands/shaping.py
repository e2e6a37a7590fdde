"""Requests of several sizes, and sequences of a generator, in the commands search, auto and run."""

from collections.abc import Mapping
from typing import Any

from autosplit.commands import options
from autosplit.errors import UsageError
from autosplit.values.sequences import Sequences, parse_sequences
from autosplit.values.shapes import Sizes, Traffic, read_traffic

ONE_SIZE = ("explain", "front", "peers", "pick", "picture", "simulate", "arrival_rate", "trace", "watch")
"""Flags whose output is for plans of one size."""

NO_SEQUENCES = (
    *(flag for flag in ONE_SIZE if flag != "explain"),
    *("cluster", "batch", "seq_len", "values", "traffic", "max_latency", "requests", "report"),
)
"""Flags that a generator does not have. Limits on its tokens are given with its sequences."""


def traffic_of(given: Any, allowed: Mapping[str, Sizes], sequences: Sequences | None = None) -> Traffic | None:
    """The traffic in the file of ``--traffic``, checked against the sizes; None without it.

    Raises: UsageError: the traffic does not fit, or flags are given that the plan does not have.
    """
    if sequences is not None:
        given.require_default([flag for flag in NO_SEQUENCES if hasattr(given, flag)], "a model that generates has none of this")
        if getattr(given, "objective", "") == "pareto":
            raise UsageError("a generator has no front of plans; give --objective throughput or latency")
        return None
    if not allowed:
        given.require_default(["traffic"], "traffic is for requests of several sizes, such as --seq-len 16..512")
    else:
        given.require_default([flag for flag in ONE_SIZE if hasattr(given, flag)], "requests of several sizes have none of this")
    return None if given.traffic is None else read_traffic(given.traffic, tuple(allowed)).verify(allowed)


def sequences_of(given: options.Search) -> Sequences | None:
    """The sequences of ``--generate``; None without it. Raises: UsageError: as ``parse_sequences``."""
    return None if given.generate is None else parse_sequences(given.generate)

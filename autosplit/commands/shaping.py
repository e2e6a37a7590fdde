"""Requests of several sizes in the commands search, auto and run: their traffic, and the flags for plans of one size."""

from collections.abc import Mapping

from autosplit.commands import options, runoptions
from autosplit.values.shapes import Sizes, Traffic, read_traffic

ONE_SIZE = ("cluster", "explain", "front", "peers", "pick", "picture", "simulate", "arrival_rate", "trace", "watch")
"""Flags whose output is for plans of one size."""


def traffic_of(given: options.Search | runoptions.Run, allowed: Mapping[str, Sizes]) -> Traffic | None:
    """The traffic in a file, checked against the sizes; or None.

    Raises: UsageError: the traffic does not fit, or flags are given that the plan does not have.
    """
    if not allowed:
        given.require_default(["traffic"], "traffic is for requests of several sizes, such as --seq-len 16..512")
    else:
        given.require_default([flag for flag in ONE_SIZE if hasattr(given, flag)], "requests of several sizes have none of this")
    return None if given.traffic is None else read_traffic(given.traffic, tuple(allowed)).verify(allowed)

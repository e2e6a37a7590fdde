"""Find flags that cannot be used before a command does any work."""

import math
from collections.abc import Callable, Mapping

from autosplit.commands.options import Output, flag_name, seconds
from autosplit.errors import UsageError, raise_faults
from autosplit.files import unwritable
from autosplit.values.machine import parse_bytes

TIMES = ("budget", "time_limit", "max_latency", "min_stage", "time", "queue_time", "request_time", "drain_time")
READ: Mapping[str, Callable[[str], float]] = {**dict.fromkeys(TIMES, seconds), "max_body": parse_bytes}
"""Flags with units to the function that reads them."""

WRITTEN = ("output", "trace", "picture", "dot", "report", "page", "profiles", "front")
"""Flags that name a file or folder to write."""


def verify(given: Output) -> None:
    """Raises: UsageError, with every fault: values that cannot be used, and paths that could not be written in the end."""
    faults: list[str] = []
    for flag, parse in READ.items():
        text = getattr(given, flag, None)
        try:
            if text is not None and parse(text) == 0 and flag in ("max_latency", "min_stage"):
                faults.append(f"{flag_name(flag)} must be above 0 s, but is '{text}'")
        except UsageError as failure:
            faults.append(f"{flag_name(flag)}: {failure}")
    for flag, unit in (("arrival_rate", "requests a second"), ("bandwidth", "bytes a second")):
        rate = getattr(given, flag, None)
        if rate is not None and not 0 < rate < math.inf:
            faults.append(f"{flag_name(flag)} must be a number above 0 {unit}, but is {rate}")
    for flag, path in [(flag, getattr(given, flag, None)) for flag in WRITTEN]:
        if path is not None and path.exists() and path.is_dir() != (flag in ("profiles", "front")):
            is_a, name_a = ("folder", "file") if path.is_dir() else ("file", "folder")
            faults.append(f"{flag_name(flag)} '{path}' is a {is_a}; name a {name_a}")
        elif path is not None and flag != "profiles" and (why := unwritable(path)):  # a store that keeps nothing is only noted
            faults.append(f"{flag_name(flag)} '{path}' cannot be written: {why}; name another place")
    stages, most = getattr(given, "stages", None), getattr(given, "max_stages", None)
    if stages and most and stages > most:
        faults.append(f"--stages {stages} is above --max-stages {most}; leave one of them out")
    picture = getattr(given, "picture", None)
    if picture is not None and picture.suffix != ".svg":
        faults.append(f"--picture writes SVG, not '{picture}'; name a file such as plans.svg")
    report = getattr(given, "report", None)
    if report is not None and report.suffix not in (".html", ".json"):
        faults.append(f"--report writes a page (.html) or a run file (.json), not '{report}'; name a file such as report.html")
    raise_faults(UsageError, "these flags cannot be used", faults)

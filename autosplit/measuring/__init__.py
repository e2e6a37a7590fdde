"""Measure a model on the devices of a machine and keep the results. ``measure`` loads torch on first use.

::

    profiler          measure(), the conductor: look up known times, measure the missing ones in rounds of one or several models
    measurement       one model in it: its files, its first and its later rounds, what is kept
    settings          backends, devices and thread counts to measure, in groups, and which are left out
    store             profiles on disk; cache_lookup: stored measurements that still hold here
    calibration       a fixed kernel that shows whether a core is as fast as before
    rounds            rounds of timing over all devices; attribution: a runtime's node times become op times
    measuring_worker  the pinned workers, one for each device, and the host's end of them
    stage_timer       timing on CPU cores; accelerator_timer: timing by events
    model_files       the model as workers load it; cut_cost: stages around a typical cut
    links             transfers between devices; request_overhead: processor time of a request
"""

from typing import Any

from autosplit.measuring.store import Store, stored_models

__all__ = ["Store", "measure", "shortest_measurement_s", "stored_models"]


def __getattr__(name: str) -> Any:
    if name in ("measure", "shortest_measurement_s"):
        from autosplit.measuring import profiler

        return getattr(profiler, name)
    raise AttributeError(f"module 'autosplit.measuring' has no attribute {name!r}")

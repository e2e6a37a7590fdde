"""Measure a model on the devices of a machine, and keep what was measured. Torch is loaded on first use of ``measure``."""

from typing import Any

from autosplit.measuring.store import Store, stored_models

__all__ = ["Progress", "Store", "least_s", "measure", "stored_models"]


def __getattr__(name: str) -> Any:
    if name in ("measure", "Progress", "least_s"):
        from autosplit.measuring import host

        return getattr(host, name)
    raise AttributeError(f"module 'autosplit.measuring' has no attribute {name!r}")

"""Calibrate the batch norms of a random net on their own inputs, so that its outputs are not almost zero."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def tracking_norms(module: nn.Module) -> list[BatchNorm]:
    """The batch norms of a module that keep running statistics."""
    return [child for child in module.modules() if isinstance(child, BatchNorm) and child.track_running_stats]


def calibrate_batch_norm(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> nn.Module:
    """Set the running statistics of every batch norm to those of its inputs, and leave the module in eval mode.

    An untrained batch norm divides by 1, so the activations of a deep random net shrink to 1e-15. Two such outputs are close
    even if one of them is wrong.

    Args:
        module: changed in place; without batch norms nothing is run.
        args: positional inputs.
        kwargs: keyword inputs.
    Returns: the module.
    """
    module.eval()
    norms = tracking_norms(module)
    if not norms:
        return module
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    try:
        with torch.no_grad():
            module(*args, **(kwargs or {}))
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        module.eval()
    return module

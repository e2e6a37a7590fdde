"""A deep multilayer perceptron: it reads each weight once, so memory bandwidth and caches limit its speed."""

import torch
from torch import nn


def mlp(batch: int = 1, width: int = 1024, depth: int = 24) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """``depth`` linear layers of ``width`` with a ReLU after each but the last.

    Args:
        batch: rows of the input, shape (batch, width).
        width: features of every layer. 24 x 1024 holds 96 MiB of weights, 24 x 512 holds 24 MiB.
        depth: number of linear layers.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for layer in range(depth):
            linear = nn.Linear(width, width)
            nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
            layers += [linear, nn.ReLU()] if layer < depth - 1 else [linear]
        return nn.Sequential(*layers).eval(), (torch.randn(batch, width),)


def mlp_512(batch: int = 1) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """24 layers of 512: 24 MiB of weights, which a cache of 32 MiB holds once and not twice."""
    return mlp(batch, width=512)

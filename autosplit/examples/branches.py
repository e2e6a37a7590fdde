"""Two branches that meet at the end: a chain of stages leaves one of two devices idle, a parallel plan uses both."""

import torch
from torch import nn

from autosplit.examples.batch_norm import calibrate_batch_norm


def tower(channels: int, depth: int) -> nn.Sequential:
    """A 1x1 convolution from 3 channels, then ``depth`` 3x3 convolutions with batch norm and ReLU."""
    layers: list[nn.Module] = [nn.Conv2d(3, channels, 1)]
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers)


class Branches(nn.Module):
    """One tower reads the image, the other one the image at half size, and a linear layer joins them."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        self.fine = tower(channels, depth)
        self.coarse = tower(2 * channels, depth)
        self.head = nn.Linear(3 * channels, 10)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 3, size, size) to (batch, 10)."""
        fine = self.fine(image).mean(dim=(2, 3))
        coarse = self.coarse(nn.functional.avg_pool2d(image, 2)).mean(dim=(2, 3))
        out: torch.Tensor = self.head(torch.cat([fine, coarse], dim=1))
        return out


def branches(batch: int = 1, size: int = 64, channels: int = 32, depth: int = 4) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """Two towers of equal work: the coarse one has a quarter of the pixels and twice the channels.

    Args:
        batch: images, shape (batch, 3, size, size).
        size: pixels a side, even.
        channels: channels of the fine tower.
        depth: convolutions a tower.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = Branches(channels, depth)
        calibrate_batch_norm(module, (torch.randn(4, 3, size, size),))
        return module, (torch.randn(batch, 3, size, size),)

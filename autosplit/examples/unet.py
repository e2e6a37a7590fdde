"""A U-Net: its skip connections carry large tensors past the middle, so every cut crosses several of them."""

import torch
from torch import nn

from autosplit.examples.batch_norm import calibrate_batch_norm


class Block(nn.Module):
    """Two 3x3 convolutions, each with a batch norm and a ReLU in place."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(channels_in, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels_out),
            nn.ReLU(inplace=True),
        )

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Shape (batch, channels_in, height, width) to (batch, channels_out, height, width)."""
        out: torch.Tensor = self.layers(image)
        return out


class UNet(nn.Module):
    """``levels`` halvings and as many doublings, joined at each resolution."""

    def __init__(self, channels: int, levels: int, classes: int) -> None:
        super().__init__()
        widths = [channels * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(Block(before, after) for before, after in zip([3, *widths[:-2]], widths[:-1], strict=True))
        self.middle = Block(widths[-2], widths[-1])
        self.grow = nn.ModuleList(nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1]))
        self.up = nn.ModuleList(Block(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(channels, classes, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 3, size, size) to (batch, classes, size, size)."""
        skips = []
        for block in self.down:
            image = block(image)
            skips.append(image)
            image = nn.functional.max_pool2d(image, 2)
        image = self.middle(image)
        for grow, block, skip in zip(self.grow, self.up, reversed(skips), strict=True):
            image = block(torch.cat([skip, grow(image)], dim=1))
        out: torch.Tensor = self.head(image)
        return out


def unet(batch: int = 1, size: int = 128, channels: int = 32, levels: int = 3) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A U-Net with four classes.

    Args:
        batch: images, shape (batch, 3, size, size).
        size: pixels a side, a multiple of 2**levels.
        channels: channels at full resolution; they double at each level.
        levels: halvings.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = UNet(channels, levels, classes=4)
        calibrate_batch_norm(module, (torch.randn(2, 3, size, size),))
        return module, (torch.randn(batch, 3, size, size),)

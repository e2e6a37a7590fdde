"""Filters of the frequencies of an image, between layers for its pixels: few runtimes compute the Fourier transforms."""

import torch
from torch import nn


class Pixels(nn.Module):
    """Mixes the channels of each pixel: a 1x1 convolution and elementwise ops."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        self.mix = nn.Conv2d(channels_in, channels_out, 1)
        self.scale = nn.Parameter(torch.rand(channels_out, 1, 1) + 0.5)
        self.shift = nn.Parameter(torch.rand(channels_out, 1, 1))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Shape (batch, channels_in, height, width) to (batch, channels_out, height, width)."""
        mixed = nn.functional.gelu(self.mix(image)) * self.scale + self.shift
        return mixed * torch.sigmoid(mixed)


class Spectral(nn.Module):
    """``depth`` layers for pixels, twice as many filters with residual connections, and ``depth`` layers for pixels."""

    def __init__(self, size: int, channels: int, depth: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(*(Pixels(channels if number else 3, channels) for number in range(depth)))
        shape = channels, size, size // 2 + 1
        self.filters = nn.ParameterList(nn.Parameter(0.02 * torch.randn(shape)) for _ in range(2 * depth))
        self.decoder = nn.Sequential(*(Pixels(channels, channels) for _ in range(depth)))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Shape (batch, 3, size, size) to (batch, channels, size, size)."""
        out = self.encoder(image)
        for factors in self.filters:
            out = out + torch.fft.irfft2(torch.fft.rfft2(out) * factors, s=out.shape[-2:])
        decoded: torch.Tensor = self.decoder(out)
        return decoded


def spectral(batch: int = 1, size: int = 96, channels: int = 16, depth: int = 3) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """A network whose two ends suit other devices than its middle.

    Args:
        batch: images, shape (batch, 3, size, size).
        size: pixels a side.
        channels: channels of each layer.
        depth: layers before the filters, and after them.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Spectral(size, channels, depth).eval(), (torch.randn(batch, 3, size, size),)

"""The sign of a zero counts where an op after it makes another number of -0 than of 0."""

import torch
from torch import nn

import autosplit
from autosplit.tracing.zerosigns import observed_zeros


class Signs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (
            *(1 / (x.ceil() * y.floor()), torch.atan2(x.trunc(), y.round()), torch.copysign(x.sin(), y.tan())),
            *(x.neg() ** -1, x.relu()[0].expand(3, 4).rsqrt()),
            *(1 / (x.asin() + 1), 1 / x.atan().exp(), y / x.asinh().clamp(min=0.5), 1 / x.tanh().long(), x.erf() ** 2),
            *(x.expm1() / 8, x.log1p()),
        )


def test_signs_are_followed_back_from_the_ops_that_observe_them() -> None:
    traced = autosplit.trace(Signs().eval(), (torch.rand(2, 4) + 1, torch.rand(2, 4)))
    found = {node.name for node in observed_zeros(traced.program.graph) if node.op == "call_function"}
    makers = {"ceil", "floor", "trunc", "round_1", "tan", "neg", "relu"}
    free = {"sin", "asin", "atan", "asinh", "tanh", "erf", "expm1", "log1p"}
    assert makers < found and not free & found

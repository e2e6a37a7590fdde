from collections.abc import Callable

import pytest
import torch
from torch import nn

from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import StageProgram, split


class Layouts(nn.Module):
    """Values of every kind that may cross a cut: channels_last, transposed, expanded, boolean, integer, a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(8, 4)

    def forward(self, image: torch.Tensor, mask: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.conv(image).relu()
        rows = self.linear(features.permute(0, 2, 3, 1))
        turned = rows.flatten(1, 2).transpose(1, 2)
        chosen = mask.logical_not().unsqueeze(1).expand(2, 4)
        return features + 1, turned * 2, chosen, index + 1, turned.sum()


@pytest.fixture(scope="session")
def layouts() -> Traced:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 10, 10).contiguous(memory_format=torch.channels_last)
    return trace(load_model(Layouts().eval(), inputs=(image, torch.tensor([True, False]), torch.arange(5))))


@pytest.fixture(scope="session")
def halves() -> Callable[[Traced], list[StageProgram]]:
    """The model cut in the middle, where it may be an odd place."""

    def cut(traced: Traced) -> list[StageProgram]:
        ops = [op.name for op in traced.graph.ops]
        return split(traced, [ops[: len(ops) // 2], ops[len(ops) // 2 :]])

    return cut


@pytest.fixture(scope="session")
def whole() -> Callable[[Traced], StageProgram]:
    def one(traced: Traced) -> StageProgram:
        return split(traced, [[op.name for op in traced.graph.ops]])[0]

    return one


@pytest.fixture(scope="session")
def mlp() -> Traced:
    torch.manual_seed(0)
    return trace(load_model("autosplit.examples.mlp:mlp?depth=3&width=32", batch=4))


@pytest.fixture(scope="session")
def after_attention() -> StageProgram:
    """A stage that looks at its input, which lies heads last, through a transpose and a view: dense zeros have no such view."""

    class Heads(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.view(2, 4, 2, 8).transpose(1, 2)
            return nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).view(2, 4, 16).relu()

    traced = trace(load_model(Heads().eval(), inputs=(torch.randn(2, 4, 16),)))
    ops = [op.name for op in traced.graph.ops]
    cut = ops.index("scaled_dot_product_attention") + 1
    return split(traced, [ops[:cut], ops[cut:]])[1]


@pytest.fixture(scope="session")
def odd() -> Traced:
    """A model with an op that ONNX cannot express."""

    class Odd(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.special.bessel_j0(x @ x.T).relu() + 1

    return trace(load_model(Odd().eval(), inputs=(torch.randn(4, 4),)))

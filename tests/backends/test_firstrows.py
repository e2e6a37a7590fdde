"""Ops whose first rows alone are read compute no others, and those rows stay what they were."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from autosplit.backends.simplifying import simplified, specs_of
from autosplit.generating.attention import KVCache
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import unsplit

READ, HEADS, DIM = 9, 2, 8
COUNT = 2 * READ
SIZE = HEADS * DIM
PRODUCTS = (torch.ops.aten.linear.default, torch.ops.aten.addmm.default)


class Columns(nn.Linear):
    """A product with a weight by columns, of rows without a batch, as GPT-2 has them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight.T.contiguous()).view(*x.shape[:-1], -1)


class Layer(nn.Module):
    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o, self.up, self.down = (kind(SIZE, SIZE) for _ in range(6))
        self.norm, self.cache = nn.LayerNorm(SIZE), KVCache(2, COUNT, HEADS, DIM)

    def forward(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        q, k, v = (part(normed).view(1, -1, HEADS, DIM).transpose(1, 2) for part in (self.q, self.k, self.v))
        angles = (positions[:, None] * torch.ones(1, DIM))[None, None]
        q, k = (self.turned(part, angles) for part in (q, k))
        x = x + self.o(self.cache(q, k, v, slots, positions).flatten(2))
        return x + self.down(functional.silu(self.up(self.norm(x))))

    def turned(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        first, second = x[..., : DIM // 2], x[..., DIM // 2 :]
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Decoder(nn.Module):
    """Two layers and a head, which reads the first rows."""

    def __init__(self, kind: type[nn.Linear]) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Layer(kind) for _ in range(2)]), nn.Linear(SIZE, 5)

    def forward(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, slots, positions)
        return self.head(x.squeeze(0).index_select(0, torch.arange(READ)))


def programs(module: nn.Module, inputs: tuple[torch.Tensor, ...]):
    """The stage, and the one with fewer ops and rows."""
    program = unsplit(trace(load_model(module.eval(), inputs=inputs)))
    return program, simplified(program, as_stored=False)


def from_empty_caches(program, given: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """The answer of a stage, and all that it keeps."""
    states = [program.weights[name] for name in program.states]
    for state in states:
        state.zero_()
    with torch.no_grad():
        return [*program.module(*given), *(state.clone() for state in states)]


def rows_of(program) -> list[int]:
    """The rows of each product."""
    shapes = {name: spec.shape for name, spec in specs_of(program).items()}
    products = [node for node in program.module.graph.nodes if node.target in PRODUCTS]
    return [max(shapes[node.name][:-1]) for node in products]


@pytest.mark.parametrize("kind", [nn.Linear, Columns])
def test_the_last_layer_computes_keys_and_values_of_all_tokens_and_all_else_of_those_that_are_read(kind):
    torch.manual_seed(0)
    order = torch.arange(COUNT)
    mixed = torch.tensor([1, 2, 1, 1, 1, 2, 2] + [2] * (COUNT - 8) + [0])
    inputs = torch.randn(1, COUNT, SIZE), mixed, torch.where(mixed > 0, order, 0)
    program, found = programs(Decoder(kind), inputs)
    assert rows_of(program) == [COUNT] * 12 + [READ]
    last = [READ, COUNT, COUNT, READ, READ, READ, READ]
    assert rows_of(found) == [COUNT] * 6 + last
    for slots in (inputs[1], 1 + (order >= READ).long()):
        given = inputs[0], slots, inputs[2]
        for one, other in zip(*(from_empty_caches(some, given) for some in (found, program)), strict=True):
            torch.testing.assert_close(one, other)


class Mixing(nn.Module):
    """Rows that mix, rows of which all are an output, and a table with a row for each."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second, self.cache = kind, nn.Linear(4, 4), nn.Linear(4, 4), KVCache(2, COUNT, 1, 4)
        self.register_buffer("table", torch.randn(COUNT, 4))

    def forward(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.cache(*[x.view(1, 1, -1, 4)] * 3, slots, positions).view(-1, 4)
        x = self.first(x)
        x = x.cumsum(0) if self.kind == "sum" else x + self.table if self.kind == "table" else x
        read = self.second(x).index_select(0, torch.arange(READ))
        return (read, x) if self.kind == "output" else (read,)


@pytest.mark.parametrize(("kind", "rows"), [("sum", COUNT), ("output", COUNT), ("table", READ), ("", READ)])
def test_rows_that_others_need_are_computed(kind, rows):
    inputs = torch.randn(COUNT, 4), torch.ones(COUNT, dtype=torch.int64), torch.arange(COUNT)
    program, found = programs(Mixing(kind), inputs)
    assert rows_of(found) == [rows, READ]
    torch.testing.assert_close(found.module(*inputs), program.module(*inputs))

"""Small models after public reports of faults in runtimes. ``inputs(0)`` is a usual request, other seeds make hard ones."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from autosplit.tracing.capturing import Traced
from benchmarks.conformance import answer, compiled

Inputs = tuple[torch.Tensor, ...]


class Hashes(nn.Module):
    """Feature hashing in int64: the products exceed 32 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lin = nn.Embedding(97, 16), nn.Linear(16, 4)

    def forward(self, ids: torch.Tensor) -> Inputs:
        slots = (ids * 2654435761 + 12345) % 97
        return self.lin(self.table(slots).relu()), slots


def hashes(seed: int) -> Inputs:
    return (torch.randint(0, 2**31 if seed else 1, (2, 6)),)


class Masked(nn.Module):
    """Attention with a mask that may leave a row nothing to look at; the right answer there is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.o(scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None]).transpose(1, 2).flatten(2))


def masked(seed: int) -> Inputs:
    mask = torch.rand(2, 5, 5) > (0.4 if seed else -1.0)
    mask[1, 3] = mask[1, 3] & (seed == 0)
    return torch.randn(2, 5, 16), mask


class Buckets(nn.Module):
    """Floor division of floats (1.0 // 0.1 is 9) and remainders of negative numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lin = nn.Embedding(40, 8), nn.Linear(8, 2)

    def forward(self, t: torch.Tensor, n: torch.Tensor) -> Inputs:
        slot = (t // 0.1).long().clamp(0, 39)
        rest = torch.div(n, 4, rounding_mode="floor") * 10 + n % -7 + torch.fmod(n, 5) + torch.remainder(n, 3)
        return self.lin(self.table(slot)), slot, rest, torch.remainder(t, 0.3)


def buckets(seed: int) -> Inputs:
    if not seed:
        return torch.rand(3, 4), torch.randint(0, 20, (3, 4))
    hard = [[1.0, 0.5, 0.3, 0.7], [0.6, 0.9, 2.0, 3.0], [0.1, 0.2, 1.1, 1.7]]
    return torch.tensor(hard), torch.randint(-(1 << 29), 1 << 29, (3, 4))


class Norms(nn.Module):
    """Norms written out, one with a scale that makes its value wider, and sums that are answers too."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)
        self.gamma, self.beta = nn.Parameter(torch.rand(1, 1, 8)), nn.Parameter(torch.rand(1, 3, 8))
        self.wide = nn.Parameter(torch.rand(2))

    def forward(self, x: torch.Tensor, thin: torch.Tensor) -> Inputs:
        s = x + self.lin(x)
        c = s - s.mean(-1, keepdim=True)
        y = c / torch.sqrt(c.pow(2).mean(-1, keepdim=True) + 1e-5) * self.gamma + self.beta
        r = thin / torch.sqrt(thin.pow(2).mean(-1, keepdim=True) + 1e-6) * self.wide
        return y, r, s, self.norm(x + y), x + y


def norms(seed: int) -> Inputs:
    return torch.randn(2, 3, 8), torch.randn(4, 1)


class Table(nn.Module):
    """An id beyond the table, or a negative one, fails; nothing may be made up."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.body = nn.Embedding(10, 8), nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(self.emb(ids)).sum(1)


def table(seed: int) -> Inputs:
    ids = torch.randint(0, 10, (2, 4))
    ids[0, 1] = {2: 10, 4: -1}.get(seed, 9)
    return (ids,)


class Stamps(nn.Module):
    """Time stamps in float64: large, with small differences."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 3)

    def forward(self, t: torch.Tensor, start: torch.Tensor) -> Inputs:
        gap = (t - start[:, None]).to(torch.float32)
        return self.lin(torch.log1p(gap.clamp(min=0))), t * 2 - t


def stamps(seed: int) -> Inputs:
    start = (1.75e9 if seed else 0.0) + torch.rand(2, dtype=torch.float64)
    return start[:, None] + torch.rand(2, 4, dtype=torch.float64) * 5, start


class Rows(nn.Module):
    """A scale that depends on the whole batch: rows may not be gathered with others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        step = h.abs().amax() / 7
        return self.b(torch.clamp(torch.round(h / step), -8, 7).to(torch.int8).to(h.dtype) * step)


def rows(seed: int) -> Inputs:
    return (torch.randn(4, 16),)


class Complex(nn.Module):
    """An op on a complex value beside one that reads the same memory as real numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.view_as_complex(x).unsqueeze(0)
        return torch.view_as_real(z * z) + x


def pairs(seed: int) -> Inputs:
    return (torch.randn(3, 2),)


class Crashing(nn.Module):
    """OpenVINO 2026.4.1 ends the process that compiles this."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x)) - y


def two(seed: int) -> Inputs:
    return torch.randn(2, 6), torch.randn(2, 6)


class Turned(nn.Module):
    """A transposed value, which may lie on the border of two stages."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + 1).transpose(1, 2).relu()


def cube(seed: int) -> Inputs:
    return (torch.randn(2, 3, 4),)


@dataclass(frozen=True)
class Report:
    build: Callable[[], nn.Module]
    make: Callable[[int], Inputs]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().eval()

    def inputs(self, seed: int) -> Inputs:
        torch.manual_seed(seed)
        return self.make(seed)


REPORTS: Mapping[str, Report] = {
    "hashes": Report(Hashes, hashes),
    "masked": Report(Masked, masked),
    "buckets": Report(Buckets, buckets),
    "norms": Report(Norms, norms),
    "table": Report(Table, table),
    "stamps": Report(Stamps, stamps),
    "rows": Report(Rows, rows),
    "complex": Report(Complex, pairs),
    "crashing": Report(Crashing, two),
    "turned": Report(Turned, cube),
}


def answers(traced: Traced, backend: str, requests: Sequence[tuple[torch.Tensor, ...]]) -> tuple[set[str], list]:
    """The ops that run in eager, and the answers or failures of a model whose other ops run on a backend."""
    eager, parts = compiled(traced, backend)
    found: list = []
    for inputs in requests:
        try:
            found.append(answer(traced, parts, inputs))
        except Exception as failure:
            found.append(failure)
    return eager, found

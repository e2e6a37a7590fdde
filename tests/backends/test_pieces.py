"""A stage with a custom operator runs in pieces, and keeps what the operator keeps."""

from pathlib import Path

import pytest
import torch
from torch import nn

from autosplit.backends.base import get_backend, require_streams
from autosplit.backends.instructions import Instruction
from autosplit.backends.pieces import in_pieces, pieces
from autosplit.backends.profiling import probe
from autosplit.backends.rowops import PRODUCT
from autosplit.backends.simplifying import simplified
from autosplit.errors import BackendError
from autosplit.generating.attention import KVCache
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import save_stage, unsplit

RUNTIMES = ("onnxruntime", "openvino")


class TwoLayers(nn.Module):
    """Two layers of attention with caches; both read values from before the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.projections = nn.Embedding(20, 16), nn.ModuleList([nn.Linear(16, 48) for _ in range(2)])
        self.caches = nn.ModuleList([KVCache(2, 16, 2, 8) for _ in range(2)])

    def forward(self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x, angle = self.embed(ids), positions[:, None].float().cos()
        for projection, cache in zip(self.projections, self.caches, strict=True):
            q, k, v = projection(x * angle).view(1, -1, 6, 8).transpose(1, 2).chunk(3, 1)
            x = x + cache(q, k, v, slots, positions)[0].flatten(1)
        return x


def step(*positions: int) -> list[torch.Tensor]:
    """A token of each of two sequences at these positions."""
    return [torch.tensor(positions) + 3, torch.tensor([1, 2]), torch.tensor(positions)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The stage, and the folder where it is prepared."""
    torch.manual_seed(0)
    program = unsplit(trace(load_model(TwoLayers().eval(), inputs=tuple(step(0, 0)))))
    folder = tmp_path_factory.mktemp("stages") / "stage"
    save_stage(program, folder)
    for name in RUNTIMES:
        get_backend(name).prepare(program, folder)
    return program, folder


def test_pieces_alternate_are_few_and_find_their_inputs(saved):
    program, _ = saved
    found = pieces(program.module.graph)
    assert [piece.custom for piece in found] == [False, True, False, True, False]
    assert sorted(node.name for piece in found for node in piece.nodes) == sorted(program.ops + tuple(
        node.name for node in program.module.graph.nodes if node.name not in program.ops and node.op == "call_function"
    ))  # fmt: skip
    known = {spec.name for spec in program.inputs}
    for piece in found:
        assert known >= set(piece.inputs)
        known |= set(piece.outputs)


class Norms(nn.Module):
    """Three norms of one value, and no operator of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) for _ in range(2))
        return first + second * second


def test_repeated_ops_are_merged_and_norms_divide():
    program = unsplit(trace(load_model(Norms().eval(), inputs=(torch.rand(2, 4),))))
    found, x = simplified(program), torch.rand(2, 4)
    names = [str(node.target) for node in found.module.graph.nodes if node.op == "call_function"]
    assert (names.count("aten.pow.Tensor_Scalar"), names.count("aten.div.Tensor"), "aten.rsqrt.default" in names) == (1, 1, False)
    torch.testing.assert_close(found.module(x), program.module(x))


class Rotated(nn.Module):
    """Attention whose queries and keys are rotated: whole, or their first elements alone, or in a way of its own."""

    def __init__(self, rotary_dim: int, sign: int, rows: int, columns: int) -> None:
        super().__init__()
        self.rotary_dim, self.sign, self.rows, self.columns = rotary_dim, sign, rows, columns
        self.cache = KVCache(2, 16, 2, 8)

    def rotated(self, x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        part, rest = x[..., : self.rotary_dim], x[..., self.rotary_dim :]
        first, second = part[..., : self.rotary_dim // 2], part[..., self.rotary_dim // 2 :]
        turned = torch.cat((-second, first) if self.sign < 0 else (second, first), -1)
        part = part * angles.cos() + turned * angles.sin()
        return part if self.rotary_dim == x.shape[-1] else torch.cat([part, rest], -1)

    def forward(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angles = positions[: self.rows, None] * torch.ones(1, self.columns)
        heads = x.view(1, -1, 2, 8).transpose(1, 2)
        return self.cache(self.rotated(heads, angles), self.rotated(heads * 2, angles), heads, slots, positions)


@pytest.mark.parametrize(
    ("rotary_dim", "sign", "rows", "columns", "num_left"),
    [(8, -1, 2, 8, 0), (4, -1, 2, 4, 0), (8, 1, 2, 8, 2), (8, -1, 1, 8, 2), (8, -1, 2, 1, 2)],
)
def test_rotations_become_a_part_of_attention(rotary_dim, sign, rows, columns, num_left):
    """Others stay: of another sign, with a table of one row or of one column."""
    inputs = (torch.rand(2, 16), torch.tensor([1, 2]), torch.tensor([3, 4]))
    program = unsplit(trace(load_model(Rotated(rotary_dim, sign, rows, columns).eval(), inputs=inputs)))
    found = simplified(program)
    assert sum(node.target is torch.ops.aten.cat.default for node in found.module.graph.nodes) == num_left
    torch.testing.assert_close(found.module(*inputs), program.module(*inputs))
    assert [piece.custom for piece in pieces(found.module.graph)] == [False, True]  # with views of x in the second


@pytest.mark.parametrize("name", RUNTIMES)
def test_steps_in_pieces_equal_eager_and_read_what_earlier_steps_kept(saved, name):
    _, folder = saved
    run, eager = (get_backend(one).load(folder, 1) for one in (name, "eager"))
    for positions in ((0, 0), (1, 1), (2, 1)):
        [made], [expected] = run(step(*positions)), eager(step(*positions))
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    [alone] = get_backend(name).load(folder, 1)(step(2, 1))
    assert not torch.allclose(alone, made)  # caches are in use: without earlier steps the answer differs


@pytest.mark.parametrize("name", RUNTIMES)
def test_a_stage_in_pieces_computes_in_memory_that_stays(saved, name):
    """A worker writes its inputs and reads its outputs there; a call has copies of both."""
    run = get_backend(name).load(saved[1], 1)
    [first], [second] = run(step(0, 0)), run(step(1, 1))
    [output] = run.outputs
    assert torch.equal(output, second) and output.data_ptr() not in (first.data_ptr(), second.data_ptr())
    for own, value in zip(run.inputs, step(0, 0), strict=True):
        own.copy_(value)
    run.compute()
    assert torch.equal(output, first)


@pytest.mark.parametrize("name", RUNTIMES)
def test_files_and_the_operators_between_them_are_timed_by_their_ops(saved, name):
    folder = saved[1]
    profiled, eager = probe(name, folder, 1), get_backend("eager").load(folder, 1)
    for positions in ((0, 0), (1, 1)):
        [made], [expected] = profiled.sample(step(*positions)), eager(step(*positions))
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    nodes = profiled.nodes()
    custom = [number for number, node in enumerate(nodes) if "attend" in " ".join(node.origins)]
    assert len(custom) == 2
    assert 0 < custom[0] < custom[1] - 1 < len(nodes) - 2
    assert all(len(nodes[number].samples_s) == 2 and min(nodes[number].samples_s) > 0 for number in custom)
    places = [number for number, node in enumerate(nodes) for op in node.origins if op in ("linear", "linear_1")]
    assert len(places) == 2
    assert places[0] < custom[0] < places[1] < custom[1]  # each in its own file, in both of which it is the first one


def test_files_whose_outputs_have_gaps_write_to_memory_that_stays(saved, monkeypatch):
    """Queries, keys and values are parts of one product. Their file was opened like a whole stage, with an own arena."""
    monkeypatch.setattr("autosplit.backends.onnxruntime.session_runnable", None)
    get_backend("onnxruntime").load(saved[1], 1)


class Decoder(nn.Module):
    """The ops of a layer of GPT-2: lookups, layer norms, products, parts of a split, GELU and the first rows.

    Places of OPT and angles of Llama go with them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places, self.norm, self.cache = (
            nn.Embedding(16, 16),
            nn.Embedding(18, 16),
            nn.LayerNorm(16),
            KVCache(2, 16, 2, 8),
        )
        self.frequencies = nn.Buffer(torch.rand(8))
        self.into, self.out = (nn.Linear(16, size) for size in (48, 16))

    def forward(self, ids: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + self.places(positions + 2)
        angles = positions[:, None].float() * self.frequencies
        x = x * torch.cat([angles.cos(), angles.sin()], -1)
        parts = self.into(self.norm(x)).split(16, -1)
        q, k, v = (part.view(1, -1, 2, 8).transpose(1, 2) for part in parts)
        x = x + self.out(self.cache(q, k, v, slots, positions).view(-1, 16))
        return nn.functional.gelu(self.norm(x.index_select(0, torch.arange(2)))) * 2


@pytest.mark.parametrize("num_rows", [2, 32])
def test_a_step_needs_no_file(num_rows, tmp_path, monkeypatch):
    inputs = [torch.arange(num_rows) * 2 % 16, *rows_of(num_rows)[1:]]
    program = unsplit(trace(load_model(Decoder().eval(), inputs=tuple(inputs))))
    assert [piece.custom for piece in pieces(simplified(program).module.graph)] == [True]
    save_stage(program, tmp_path / "stage")
    get_backend("onnxruntime").prepare(program, tmp_path / "stage")
    assert not list(tmp_path.rglob("*.onnx"))
    monkeypatch.setattr("autosplit.backends.onnxruntime._open_session", None)
    [made], [expected] = (get_backend(name).load(tmp_path / "stage", 1)(inputs) for name in ("onnxruntime", "eager"))
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    timed = list[object]()
    [made] = in_pieces(tmp_path / "stage", Path, 1, "f32", True, watch=lambda ops, call: timed.append(call) or call)(inputs)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)
    assert timed and not any(isinstance(call, Instruction) for call in timed)  # which is written down at each call


class WithExperts(nn.Module):
    """A product beside attention and one that is not, with a matrix of another operator if ``has_experts``."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.projection, self.far, self.cache = nn.Linear(16, 48), nn.Linear(16, 16), KVCache(2, 16, 2, 8)
        self.experts = nn.Parameter(torch.rand(16, 32)) if has_experts else None

    def forward(self, x: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        q, k, v = self.projection(x * 2).view(1, -1, 6, 8).transpose(1, 2).chunk(3, 1)
        x = self.far(self.cache(q, k, v, slots, positions)[0].flatten(1).sin()).cos()
        return x if self.experts is None else x @ self.experts


def rows_of(num_rows: int) -> list[torch.Tensor]:
    """Tokens of two sequences."""
    return [torch.rand(num_rows, 16), torch.arange(num_rows) % 2 + 1, torch.arange(num_rows) // 2]


@pytest.mark.parametrize(("num_rows", "as_stored", "num_stored"), [(2, True, 2), (40, True, 2), (2, False, 0)])
def test_products_read_weights_as_they_are_stored(num_rows, as_stored, num_stored):
    inputs = rows_of(num_rows)
    program = unsplit(trace(load_model(WithExperts(has_experts=False).eval(), inputs=tuple(inputs))))
    found = simplified(program, as_stored)
    assert sum(node.target is PRODUCT for node in found.module.graph.nodes) == num_stored
    torch.testing.assert_close(found.module(*inputs), program.module(*inputs))


def test_a_variant_shares_packed_weights(tmp_path):
    """Products read weights as they are stored; a matrix of another operator is packed."""
    module = WithExperts(has_experts=True).eval()
    folders, links = dict[str, Path](), dict[str, dict[str, int]]()
    for name, num_rows in (("first", 10), ("same", 10), ("fewer", 2)):
        program = unsplit(trace(load_model(module, inputs=tuple(rows_of(num_rows)))))
        folders[name] = tmp_path / name
        save_stage(program, folders[name])
        get_backend("onnxruntime").prepare(program, folders[name], first=folders["first"] if links else None)
        kind = "*.shared.data" if links else "model.onnx.data"
        links[name] = {path.parents[1].name: path.stat().st_ino for path in folders[name].rglob(kind)}
    first = links["first"]
    assert len(first) == 1 and links["same"] == first and [*links["fewer"].values()] == [*first.values()]
    inputs = rows_of(2)
    [made], [expected] = (get_backend(name).load(folders["fewer"], 1)(inputs) for name in ("onnxruntime", "eager"))
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


def test_streams_are_refused(saved):
    with pytest.raises(BackendError, match="a stage with custom operators has no streams"):
        require_streams(get_backend("openvino")).load_streams(saved[1], 1, 2)

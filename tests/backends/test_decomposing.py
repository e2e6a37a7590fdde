"""Programs for converters: only what the table names is decomposed, and the outputs keep their names."""

import pytest
import torch

from autosplit.backends.decomposing import FlatProgram

aten = torch.ops.aten
POOL, AND, TOP = aten.adaptive_avg_pool1d.default, aten.__and__.Tensor, aten.max_pool2d_with_indices.default


class Ops(torch.nn.Module):
    def forward(self, x, flags):
        return POOL(x, [1]), AND(flags, flags), TOP(x[None], [2, 2])[0], torch.relu(x)


class Same(torch.nn.Module):
    def forward(self, x):
        return (aten.dropout.default(x, 0.5, False),)


def exported(module, *examples):
    return FlatProgram.export(module, examples)


def targets(program):
    return [node.target for node in program.graph.nodes if node.op == "call_function"]


@pytest.fixture
def given():
    return torch.randn(1, 8, 48), torch.tensor([True, False])


def test_only_the_ops_of_the_table_are_decomposed(given):
    program = exported(Ops(), *given)
    outputs = program.graph_signature.user_outputs
    found = program.run_decompositions({POOL: None, AND: lambda one, other: aten.bitwise_and.Tensor(one, other)})
    assert found is program
    assert not {POOL, AND} & set(targets(found))
    assert {TOP, aten.relu.default, aten.bitwise_and.Tensor} <= set(targets(found))
    assert tuple(node.name for node in found.graph.output_node().args[0]) == outputs
    for made, expected in zip(found.module()(*given), Ops()(*given), strict=True):
        assert torch.equal(made, expected)


def test_an_op_that_gives_a_tuple_is_replaced_pick_by_pick(given):
    found = exported(Ops(), *given).run_decompositions({TOP: lambda x, size: (x.sin(), x.cos())})
    assert TOP not in targets(found)
    assert torch.equal(found.module()(*given)[2], given[0][None].sin())


def test_an_op_that_comes_to_nothing_leaves_an_output_of_its_name():
    x = torch.randn(3)
    found = exported(Same(), x).run_decompositions({aten.dropout.default: lambda x, p, train: x})
    assert targets(found) == [aten.clone.default]
    assert torch.equal(found.module()(x)[0], x)


def test_a_decomposition_that_writes_takes_the_way_of_every_exported_program():
    class Pool(torch.nn.Module):
        def forward(self, x):
            return POOL(x.transpose(1, 2), [1])

    x = torch.randn(1, 8, 48)
    program = exported(Pool(), x)
    found = program.run_decompositions()
    assert found is not program
    assert POOL not in targets(found)
    torch.testing.assert_close(found.module()(x), Pool()(x))


class Creates(torch.nn.Module):
    def forward(self, x):
        return aten.mul.Tensor(x, aten.eye.default(3)), aten.cumsum.default(x, 0)


def test_a_decomposition_that_creates_tensors_makes_them_as_fake_as_its_inputs():
    table = {
        aten.eye.default: lambda size: torch.arange(size)[:, None].eq(torch.arange(size)).float(),
        aten.cumsum.default: lambda x, dim: torch.ones(3, 3).tril() @ x,
    }
    x = torch.randn(3, 3)
    found = exported(Creates(), x).run_decompositions(table)
    assert not set(table) & set(targets(found))
    assert len({node.meta["val"].fake_mode for node in found.graph.nodes if node.op == "call_function"}) == 1
    for made, expected in zip(found.module()(x), Creates()(x), strict=True):
        torch.testing.assert_close(made, expected)  # a sum near zero has a large relative error

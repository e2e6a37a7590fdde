"""Subgraphs without the ops that a backend refuses: their own inputs, and their measurements added up."""

import torch

from autosplit.backends.workspace import Workspace
from autosplit.errors import BackendError
from autosplit.measuring.model_files import ModelFiles, merged
from autosplit.measuring.stage_timer import INPUTS
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import load_stage
from autosplit.values.samples import Measured, Samples


class Unread(torch.nn.Module):
    """Reads its second input only."""

    def forward(self, length, x, width):
        return x + 1


def test_parts_run_on_the_values_that_reach_them_in_the_model() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=3&width=8"))
    names = [op.name for op in traced.graph.ops]
    with Workspace() as workspace:
        files = ModelFiles.save(traced, None, "f32", workspace)
        divided = files.divide("eager", BackendError("", {names[2]: "no rule"}))
        parts = divided.subgraphs
        assert [[op.name for op in part.graph.ops] for part in parts] == [names[:2], names[3:]]
        outputs = [load_stage(part.folder).module(*torch.load(part.folder / INPUTS)) for part in parts]
    assert torch.equal(outputs[1][0], traced.program(*traced.example_inputs)[0])
    assert divided.refused == {names[2]: "no rule"}


def test_inputs_that_no_op_reads_are_not_given_to_the_stage() -> None:
    model = trace(load_model(Unread().eval(), inputs=(torch.ones(3), torch.zeros(2, 2), torch.ones(1))))
    with Workspace() as workspace:
        [x] = torch.load(ModelFiles.save(model, None, "f32", workspace).folder / INPUTS)
    assert torch.equal(x, torch.zeros(2, 2))


def test_parts_add_up_pass_by_pass() -> None:
    one = Measured({"a": Samples((1.0,))}, "op", "profiler", Samples((1.0, 2.0, 3.0)), Samples((1.0,)), error=0.1)
    other = Measured({"c": Samples((2.0,))}, "op", "proportional", Samples((10.0, 20.0)), None, error=0.2)
    both = merged([one, other], {"b": "no rule"})
    assert set(both.ops) == {"a", "c"} and both.refused == {"b": "no rule"}
    assert both.whole == Samples((12.0, 23.0)) and both.alone is None
    assert (both.source, both.error) == ("profiler and proportional", 0.2)
    assert merged([one], {}) is one

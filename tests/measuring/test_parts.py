"""A model without the ops that a backend refuses: parts with their own inputs, and what was measured of them added up."""

import torch

from autosplit.deploying.workspace import Workspace
from autosplit.measuring.parts import graph_of, joined, save_parts
from autosplit.measuring.worker import INPUTS
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import load_stage
from autosplit.values.samples import Measured, Samples


def test_parts_run_on_the_values_that_reach_them_in_the_model() -> None:
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=3&width=8"))
    names = [op.name for op in traced.graph.ops]
    refused = names[2]
    with Workspace() as workspace:
        parts = save_parts(traced, [refused], "eager", "f32", workspace)
        assert [part.ops for part in parts] == [tuple(names[:2]), tuple(names[3:])]
        outputs = [load_stage(part.folder).module(*torch.load(part.folder / INPUTS)) for part in parts]
    assert torch.equal(outputs[1][0], traced.program(*traced.example_inputs)[0])
    assert [op.name for op in graph_of(traced.graph, parts[1]).ops] == names[3:]


def test_parts_add_up_pass_by_pass() -> None:
    one = Measured({"a": Samples((1.0,))}, "op", "profiler", Samples((1.0, 2.0, 3.0)), Samples((1.0,)), error=0.1)
    other = Measured({"c": Samples((2.0,))}, "op", "proportional", Samples((10.0, 20.0)), None, error=0.2)
    both = joined([one, other], {"b": "no rule"})
    assert set(both.ops) == {"a", "c"} and both.refused == {"b": "no rule"}
    assert both.whole == Samples((12.0, 23.0)) and both.alone is None
    assert (both.source, both.error) == ("profiler and proportional", 0.2)
    assert joined([one], {}) is one

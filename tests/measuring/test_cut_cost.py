"""What a cut costs: where it is looked for, the stages that are timed, and what is made of their times."""

import pytest
import torch

from autosplit.backends.workspace import Workspace
from autosplit.measuring import stage_timer
from autosplit.measuring.cut_cost import NUM_OPS, save_cut, typical_cut
from autosplit.measuring.stage_timer import PassBudget, cut_s
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import load_stage


def traced(spec: str) -> Traced:
    return trace(load_model(spec))


@pytest.mark.parametrize("spec", ["branches:branches", "unet:unet"])
def test_of_the_cuts_that_the_fewest_values_pass_the_one_with_the_most_bytes_is_taken(spec: str) -> None:
    graph = traced(f"autosplit.examples.{spec}?size=16&channels=4").graph
    names = [op.name for op in graph.ops]
    cut = typical_cut(graph)
    assert cut is not None
    place = names.index(cut.behind[0])
    assert names[place - NUM_OPS : place + NUM_OPS] == [*cut.before, *cut.behind]

    def handed_bytes(where: int) -> int:
        before, behind = set(names[where - NUM_OPS : where]), set(names[where : where + NUM_OPS])
        handed = [value for value, maker in graph.producer.items() if maker in before and behind & set(graph.consumers[value])]
        return sum(graph.values[value].num_bytes for value in handed)

    def alive(where: int) -> int:
        made = {value for op in graph.ops[:where] for value in op.outputs}
        return sum(any(op in names[where:] for op in graph.consumers[value]) for value in made)

    edge = max(NUM_OPS, len(names) // 8)
    others = [where for where in range(edge, len(names) - edge + 1) if handed_bytes(where)]
    assert alive(place) == min(map(alive, others)) < max(map(alive, others))
    assert cut.num_bytes == handed_bytes(place) == max(handed_bytes(where) for where in others if alive(where) == alive(place))


@pytest.mark.parametrize(("depth", "num_ops"), [(1, 1), (2, 3), (3, 5)])
def test_only_a_model_of_one_op_has_no_cut(depth: int, num_ops: int) -> None:
    graph = traced(f"autosplit.examples.mlp:mlp?depth={depth}&width=8").graph
    assert len(graph.ops) == num_ops
    assert (typical_cut(graph) is None) == (num_ops == 1)


def test_both_sides_one_after_the_other_are_what_both_as_one_are() -> None:
    model = traced("autosplit.examples.mlp:mlp?depth=12&width=8")
    cut = typical_cut(model.graph)
    assert cut is not None
    with Workspace() as workspace:
        before, behind, both = (load_stage(folder) for folder in save_cut(model, cut, "eager", "f32", workspace))
        assert (before.ops, behind.ops, both.ops) == (cut.before, cut.behind, (*cut.before, *cut.behind))
        given = [torch.randn(spec.shape) for spec in both.inputs]
        assert all(map(torch.equal, behind.module(*before.module(*given)), both.module(*given)))


def test_the_cost_is_the_median_over_rounds_of_what_two_stages_take_more(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(stage_timer.time, "perf_counter", lambda: clock[0])

    def taking(*seconds: float):
        passes = iter((0.0, *seconds))  # the first pass is not timed

        def run(inputs: object) -> list[torch.Tensor]:
            clock[0] += next(passes) * 1e-3
            return []

        return run, []

    three = PassBudget(0.0, least=3, most=3)
    assert cut_s([taking(1, 9, 1), taking(2, 2, 2), taking(2.5, 2.5, 2.75)], three) == pytest.approx(0.5e-3)
    assert cut_s([taking(1, 1, 1), taking(2, 2, 2), taking(4, 4, 4)], three) == 0

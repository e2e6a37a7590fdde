"""Export for vLLM: the number of layers of each pipeline stage, as the environment variable that vLLM reads."""

from pathlib import Path

from autosplit.errors import PlanError, raise_faults
from autosplit.exporting.base import Job, Target, loss_note, relabelled
from autosplit.planning.moduleunits import labels, layer_lists, layer_units, named_list, named_lists, snapped

VARIABLE = "VLLM_PP_LAYER_PARTITION"


def write(job: Job, folder: Path) -> list[str]:
    """Write the number of layers of each stage; a layer goes where most of it is."""
    graph, stages = job.traced.graph, job.plan.stages
    lists = layer_lists(graph)
    names = job.own_names(lists)
    if len(lists) != 1:
        raise PlanError(f"vllm splits one list of layers, and '{graph.name}' has: {named_lists(names)}; export to another target")
    [path], [name] = lists, names
    units = layer_units(graph, path)
    places = sorted(snapped(graph, units, [stage.ops for stage in stages]))
    counts = [places.count(number) for number in range(len(stages))]
    empty = [f"stage '{stage.name}' has most of no layer" for stage, count in zip(stages, counts, strict=True) if not count]
    raise_faults(PlanError, f"vllm needs a layer of {named_list(name)} on each rank; plan again with fewer stages", empty)
    text = ",".join(map(str, counts))
    (folder / "vllm.env").write_text(f"# vllm serve MODEL --pipeline-parallel-size {len(counts)}\n{VARIABLE}={text}\n")
    note = loss_note(job, relabelled(job, labels(units, places)), "vllm cuts only between layers")
    return [f"layers of {named_list(name)} on each rank: {text}", note]


TARGET = Target(
    name="vllm",
    writes=f"vllm.env: {VARIABLE}, the number of layers on each pipeline rank, and the flag of the number of ranks",
    lacks="cuts inside a layer (moved, with what that costs), models with several lists of layers, replicas, streams, bf16",
    checked="its length is the number of ranks and its sum the number of layers, as vLLM demands",
    write=write,
    chain=True,
    needs_weights=False,
)

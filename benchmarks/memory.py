"""The memory plan of each model on one device, beside the bound, torch's own allocator and plans without reuse.

    python -m benchmarks.memory [--models NAME,...] [--time-limit 20]

Each model is traced for one item. ``torch`` is the peak of torch's CPU allocator in one eager pass, its inputs added, by the
memory events of ``torch.profiler``; it has the scratch memory of kernels and no result that overwrites an input. Every run is
kept in benchmarks/memory.json, and benchmarks/memory.md is made of the newest run of each model.
"""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from autosplit import api
from autosplit.memory.lives import ALIGNMENT, Life, Step, lives_of
from autosplit.memory.offsets import plan_memory
from autosplit.tables import bytes_text
from autosplit.tracing.aliasing import aliases_of
from autosplit.tracing.capturing import Traced
from benchmarks.models import MODELS

RESULTS, TABLE = Path("benchmarks/memory.json"), Path("benchmarks/memory.md")
HEAD = """# Memory plans

`python -m benchmarks.memory` traces each model for one item and places it on one device (two cores of an AMD EPYC, Zen 3).
An arena holds all values, also inputs and outputs, but no weights. *Sum* gives every value memory of its own; views own none.
*torch* is the peak of torch's allocator in an eager pass. *Bound* is the largest sum of live bytes at any op: no plan of these
storages is smaller. *ExecuTorch* is the greedy planner of ExecuTorch 1.5.1 on the storages of *autosplit*. *Of bound* is
autosplit by bound. *Proved* names the method whose plan meets the bound. The order of swin's row was removed: CP-SAT proves that
plan from the one by size, in 0.3 s of processor time.

| model | ops | sum | torch | greedy by size | ExecuTorch | autosplit | bound | of bound | proved |
|---|---|---|---|---|---|---|---|---|---|
"""

FOOT = """
[stage_memory.md](stage_memory.md) compares the memory that stages hold while they run with its prediction.
"""


def lives_of_model(traced: Traced, *, overwriting: bool = True) -> list[Life]:
    """The storages of a whole model on one device."""
    aliases, graph = aliases_of(traced), traced.graph
    return lives_of(
        [Step(op.inputs, op.outputs) for op in graph.ops],
        aliases.num_bytes,
        given=graph.inputs,
        kept=graph.outputs,
        views=aliases.views,
        overwrites=aliases.overwrites if overwriting else None,
    )


def torch_peak_bytes(traced: Traced) -> int:
    """Most bytes that torch's CPU allocator holds at once during one pass, with the inputs."""
    with torch.inference_mode():
        traced.program(*traced.example_inputs)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            traced.program(*traced.example_inputs)
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + sum(tensor.nbytes for tensor in traced.example_inputs)


def executorch_peak_bytes(lives: Sequence[Life]) -> int | None:
    """The arena of ExecuTorch's greedy planner for these storages; None where its package is not installed."""
    try:
        from executorch.exir.memory_planning import greedy
        from executorch.exir.tensor import TensorSpec
    except ImportError:
        return None
    specs = set()
    for life in lives:
        spec = TensorSpec(torch.uint8, torch.Size([life.num_bytes]))
        spec.lifetime = [life.first, life.last]
        specs.add(spec)
    module = torch.fx.GraphModule(torch.nn.Module(), torch.fx.Graph())
    return sum(greedy(ALIGNMENT, specs, module, None).bufsizes)


def measure(name: str, time_limit_s: float) -> dict[str, Any]:
    """One row."""
    traced = api.trace(MODELS[name])
    lives = lives_of_model(traced)
    greedy = plan_memory(lives, time_limit_s=0)
    begun_s = time.perf_counter()
    plan = plan_memory(lives, time_limit_s=time_limit_s)
    plan_s = time.perf_counter() - begun_s
    return {
        "model": name,
        "num_ops": len(traced.graph.ops),
        "plan_s": plan_s,
        "sum_bytes": sum(life.num_bytes for life in lives_of_model(traced, overwriting=False)),
        "torch_bytes": torch_peak_bytes(traced),
        "greedy_bytes": greedy.peak_bytes,
        "executorch_bytes": executorch_peak_bytes(lives),
        "plan_bytes": plan.peak_bytes,
        "bound_bytes": plan.bound_bytes,
        "method": plan.method,
        "proved": plan.proved,
    }


def write_table(rows: list[dict[str, Any]]) -> None:
    """Write the newest row of each model."""
    newest = {row["model"]: row for row in rows}
    lines = [
        f"| {row['model']} | {row['num_ops']} | "
        + " | ".join(
            "-" if row[f"{name}_bytes"] is None else bytes_text(row[f"{name}_bytes"])
            for name in ("sum", "torch", "greedy", "executorch", "plan", "bound")
        )
        + f" | {row['plan_bytes'] / row['bound_bytes']:.3f} | {row['method'] if row['proved'] else 'no'} |"
        for row in (newest[name] for name in MODELS if name in newest)
    ]
    TABLE.write_text(HEAD + "\n".join(lines) + "\n" + FOOT, encoding="utf-8")


def main() -> None:
    """Measure the models that are asked for, and write the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--time-limit", type=float, default=20.0)
    given = parser.parse_args()
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for name in given.models.split(","):
        rows.append(measure(name, given.time_limit))
        print(rows[-1], flush=True)
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        write_table(rows)


if __name__ == "__main__":
    main()

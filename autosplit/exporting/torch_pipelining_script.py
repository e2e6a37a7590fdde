"""Runs a model that was split into ranks, with torch.distributed.pipelining. Needs torch, nothing else.

    torchrun --nproc-per-node 2 run.py --inputs inputs.pt --outputs outputs.pt

``inputs.pt`` maps each input's name to a tensor. Several requests lie behind each other along the first dimension; each is
one microbatch. The last rank writes ``outputs.pt``: each output's name to a tensor. Loading a .pt2 file can run code of its
maker: run only files that you trust.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe


def _empty(entry: dict[str, Any], device: torch.device) -> torch.Tensor:
    return torch.empty_strided(entry["shape"], entry["stride"], dtype=getattr(torch, entry["dtype"]), device=device)


def main() -> None:
    """Run this process's rank on all microbatches."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--outputs", type=Path, required=True)
    parser.add_argument("--folder", type=Path, default=Path(__file__).resolve().parent)
    given = parser.parse_args()
    ranks = json.loads((given.folder / "ranks.json").read_text())["ranks"]
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if count != len(ranks):
        raise SystemExit(f"the model has {len(ranks)} ranks, and {count} processes were started: --nproc-per-node {len(ranks)}")
    mine = ranks[rank]
    device = torch.device(mine["device"])
    torch.set_num_threads(mine["threads"])
    if mine["cores"] and set(mine["cores"]) <= os.sched_getaffinity(0):
        os.sched_setaffinity(0, mine["cores"])
    inputs = torch.load(given.inputs, weights_only=True)
    first = ranks[0]["inputs"]
    sizes = {inputs[entry["name"]].shape[0] / entry["shape"][0] for entry in first}
    if len(sizes) != 1 or not (num_microbatches := sizes.pop()).is_integer():
        raise SystemExit("each input must hold the same whole number of requests along its first dimension")
    module = torch.export.load(given.folder / mine["file"]).module().to(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        examples = [tuple(_empty(entry, device) for entry in mine[side]) for side in ("inputs", "outputs")]
        stage = PipelineStage(module, rank, count, device, input_args=examples[0], output_args=examples[1])
        schedule = ScheduleGPipe(stage, int(num_microbatches))
        with torch.no_grad():
            tensors = [inputs[entry["name"]].to(device) for entry in first] if rank == 0 else []
            found = schedule.eval(*tensors)
        if rank == count - 1:
            outputs = found if isinstance(found, list | tuple) else (found,)
            named = {entry["name"]: value.cpu() for entry, value in zip(mine["outputs"], outputs, strict=True)}
            torch.save(named, given.outputs)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

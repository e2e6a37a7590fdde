"""autosplit as a program of ``benchmarks.generation``: a generator of one stage on one backend, in a worker or in the caller.

python -m benchmarks.generation_ours BACKEND/PROCESS FOLDER THREADS
"""

import sys
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM

from autosplit.devices.limits import affinity
from autosplit.generating.opening import open_generator
from autosplit.generating.steps import step_family
from autosplit.preloading import settle
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Process, Stage
from benchmarks.generation_peers import Generate, Mark, Prompts, serve

MAX_SEQUENCES, MAX_LENGTH = 16, 256


def start(way: str, folder: Path, threads: int) -> Generate:
    """Open the generator on the first cores."""
    backend, _, process = way.partition("/")
    module: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    family = step_family(module, MAX_SEQUENCES, MAX_LENGTH)
    traced, device = family.variants[0], "cpu:" + "+".join(map(str, affinity()[:threads]))
    stage = Stage("all", tuple(op.name for op in traced.graph.ops), (device,), backend)
    plan = Plan(traced.source, traced.graph.hash, "", (stage,), UNKNOWN, process=cast(Process, process))
    generator = open_generator(family, plan, Machine.of([parse_device(device)]))
    del module, family, traced
    settle()  # as autosplit.generator does

    def generate(prompts: Prompts, new: int, mark: Mark) -> list[int]:
        return generator.generate(prompts, on_token=lambda number, _: mark(number), max_new_tokens=new)[0]

    return generate


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(partial(start, sys.argv[1]), "autosplit", sys.argv[2:])

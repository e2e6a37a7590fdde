"""Memory of the workers of generators, as plans count it before anything ran, beside what they hold; and of the host.

    python -m benchmarks.generation_memory [MODEL/BACKEND/STAGES/SEQUENCES/LENGTH ...]

Two stages are cut behind the attention of the middle layer. Prints a line for each worker, and the error in the median.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from autosplit.devices.discovering import as_machine
from autosplit.devices.limits import affinity
from autosplit.generating.generators import Generator
from autosplit.generating.opening import open_generator
from autosplit.generating.steps import step_family
from autosplit.generating.trials import random_prompts, stats_of
from autosplit.memory.stages import count
from autosplit.preloading import settle
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Stage
from benchmarks.generation import MODELS

CASES = (
    "25M/eager/1/16/256",
    "25M/eager/2/4/512",
    "25M/eager/1/1/256",
    "25M/onnxruntime/1/16/256",
    "25M/onnxruntime/2/8/256",
    "25M/onnxruntime/2/4/512",
    "gpt2/eager/1/4/256",
    "gpt2/onnxruntime/1/4/256",
    "gpt2/onnxruntime/2/16/256",
)


def host_bytes() -> int:
    """The host's share of physical memory (PSS)."""
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def errors_of(case: str) -> tuple[Generator, Iterator[float]]:
    """The generator of a case, and the error of each worker's account as a share."""
    name, backend, *numbers = case.split("/")
    num_stages, num_sequences, length = map(int, numbers)
    module = load_model(MODELS[name]).module
    family = step_family(module, num_sequences, length)
    graph, cores = family.graph, affinity()[:num_stages]
    ops = [op.name for op in graph.ops]
    attends = [number for number, op in enumerate(graph.ops) if op.operator.startswith("autosplit.attend")]
    cuts = [0, *([attends[len(attends) // 2] + 1] if num_stages == 2 else []), len(ops)]
    stages = tuple(
        Stage(f"stage{number}", tuple(ops[start:end]), (f"cpu:{core}",), backend)
        for number, (core, start, end) in enumerate(zip(cores, cuts[:-1], cuts[1:], strict=True))
    )
    plan = Plan(family.variants[0].source, graph.hash, "", stages, UNKNOWN)
    counted = count(graph, plan, values_of(family.variants[0], family.variants[1:]))
    generator = open_generator(family, plan, as_machine([f"cpu:{core}" for core in cores]))
    for seed in range(2):
        generator.generate(random_prompts(family, seed), max_new_tokens=8)

    def errors() -> Iterator[float]:
        for stage, worker in zip(counted.stages, stats_of(generator).stages, strict=True):
            assert stage.memory is not None
            told, held = stage.memory.held_bytes, worker.held_bytes
            print(f"{case} {stage.name}: {held / 1e6:.1f} MB held, {told / 1e6:.1f} counted ({told / held - 1:+.1%})", flush=True)
            yield abs(told / held - 1)

    return generator, errors()


def main() -> None:
    found = list[float]()
    for case in sys.argv[1:] or CASES:
        generator, errors = errors_of(case)
        found += errors
        before = host_bytes()
        settle()
        print(f"{case} host: {before / 1e6:.0f} MB, {host_bytes() / 1e6:.0f} after its model is let go", flush=True)
        generator.close()
    print(f"{len(found)} workers: off by {median(found):.1%} in the median, {max(found):.1%} at most")


if __name__ == "__main__":
    main()

"""Start a plan from its model and from its bundle: ``python -m benchmarks.bundles [MODEL ...]``.

Each way is a new process. Its seconds run from the start of the process to the first answer, and its memory is the sum of the
proportional set sizes of the process and its children at that moment. The ways run in interleaved rounds. A figure is the median,
and behind it stand the lowest and the highest round. Processor seconds are those of the process and of all its children.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import psutil

from autosplit.bundling.bundler import write_bundle
from autosplit.bundling.manifest import WEIGHTS, Manifest
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from autosplit.values.planfile import write_plan

MODELS = {
    "MLP (8 layers of 512)": "autosplit.examples.mlp:mlp?depth=8&width=512",
    "ResNet-50": "transformers:ResNetForImageClassification",
    "BERT base": "transformers:BertModel",
    "T5 small": "transformers:T5Model",
}

FROM_MODEL = """
import sys, autosplit
if __name__ == "__main__":
    loaded = autosplit.load(sys.argv[1] + "/plan.yaml")
    with loaded.open() as service:
        service.pipeline.run(loaded.traced.example_inputs)
        print("ready", flush=True)
        sys.stdin.read()
"""

FROM_BUNDLE = """
import sys
from autosplit.bundling.dumps import example_inputs
from autosplit.bundling.openbundle import load_bundle
if __name__ == "__main__":
    with load_bundle(sys.argv[1] + "/app.asb", policy=sys.argv[2], trust=True) as bundle:
        bundle.run(example_inputs(bundle.network))
        print("ready", flush=True)
        sys.stdin.read()
"""

DRIVER = """
import sys
sys.path.insert(0, sys.argv[1] + "/app.asb")
import numpy
from driver import Bundle
bundle = Bundle()
specs = {spec["name"]: spec for part in bundle.network["parts"] for spec in part["inputs"]}
bundle.run([numpy.zeros(specs[name]["shape"], specs[name]["dtype"]) for name in bundle.network["inputs"]])
print("ready", flush=True)
sys.stdin.read()
"""

WAYS = {
    "the model": (FROM_MODEL, "-"),
    "bundle, processes": (FROM_BUNDLE, "processes"),
    "bundle, threads": (FROM_BUNDLE, "threads"),
    "bundle, serial": (FROM_BUNDLE, "serial"),
    "bundle, driver without torch": (DRIVER, "-"),
}


def make(spec: str, backend: str, folder: Path) -> tuple[Manifest, int]:
    """Write ``plan.yaml`` of two stages and its bundle; return the manifest and the bytes of the model's weights."""
    traced = trace(load_model(spec))
    ops = [op.name for op in traced.graph.ops]
    halves = ops[: len(ops) // 2], ops[len(ops) // 2 :]
    stages = tuple(Stage(f"stage{k}", tuple(half), (f"cpu:{k}",), backend) for k, half in enumerate(halves))
    plan = Plan(Source(spec), traced.graph.hash, "", stages, UNKNOWN)
    write_plan(plan, traced.graph, folder / "plan.yaml")
    return write_bundle({traced.graph.name: (traced, plan)}, folder / "app.asb"), sum(
        weight.num_bytes for weight in traced.graph.weights.values()
    )


class Start(NamedTuple):
    """A start: seconds to the first answer, processor seconds until then, and MB at that moment."""

    seconds: float
    processor_s: float
    mb: float


def start(program: str, folder: Path, policy: str) -> Start:
    """Start a process and wait for its first answer."""
    began = time.perf_counter()
    command = [sys.executable, "-c", program, str(folder), policy]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        line = process.stdout.readline()
        seconds = time.perf_counter() - began
        if line != "ready\n":
            raise RuntimeError(f"the process ended before its first answer: {line!r}")
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        mb = sum(one.memory_full_info().pss for one in family) / 1e6
        processor_s = sum(sum(one.cpu_times()[:4]) for one in family)  # children that have ended count for their parents
        process.stdin.close()
    return Start(seconds, processor_s, mb)


def spread(figures: Sequence[float], digits: int) -> str:
    """The median, and the lowest and highest figure: ``2.1 (1.9 to 2.4)``."""
    low, high = min(figures), max(figures)
    return f"{median(figures):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def main() -> None:
    """Print a table of Markdown for each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    for name in given.models:
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            manifest, weight_bytes = make(MODELS[name], given.backend, folder)
            total = sum(file.num_bytes for file in manifest.files.values())
            stored = manifest.files[WEIGHTS].num_bytes
            print(
                f"\n## {name}, {given.backend}\n\nModel's weights {weight_bytes / 1e6:.1f} MB; bundle {total / 1e6:.1f} MB "
                f"({total / weight_bytes:.3f} of the weights), of which weights {stored / 1e6:.1f} MB.\n\n"
                "| started from | s to the first answer | processor s | MB |\n|---|---|---|---|"
            )
            found: dict[str, list[Start]] = {way: [] for way in WAYS}
            for number in range(given.rounds):
                for way in list(WAYS)[:: 1 if number % 2 == 0 else -1]:
                    program, policy = WAYS[way]
                    if program != DRIVER or given.backend in ("onnxruntime", "openvino"):
                        found[way].append(start(program, folder, policy))
            for way, runs in found.items():
                if runs:
                    seconds, processor_s, mb = zip(*runs, strict=True)
                    print(f"| {way} | {spread(seconds, 1)} | {spread(processor_s, 1)} | {spread(mb, 0)} |")
            sys.stdout.flush()


if __name__ == "__main__":
    main()

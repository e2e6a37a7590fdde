"""What each backend makes of whole models: items per second in interleaved rounds, and the largest error against f32 eager.

    python -m benchmarks.backends [--models NAME ...] [--cores 0] [--rounds 5] [--seconds 1.0] [--bf16] [--json FILE]

Every backend has a worker process of its own, pinned to the same cores; only one works at a time, and the order turns
round in every round, so that drift of the machine hits all alike. The figure is the median over rounds, the spread is
(largest - smallest) / median.
"""

import argparse
import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch

from autosplit.backends.base import Precision, get_backend, installed
from autosplit.devices.processes import Worker, receive, spawn_worker
from autosplit.tracing.capturing import trace
from autosplit.tracing.differing import compare
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import StageProgram, save_stage, split

MODELS = {
    "resnet50": "transformers:ResNetForImageClassification",
    "bert": "transformers:BertModel",
    "mobilenet": "transformers:MobileNetV2Model",
    "vit": "transformers:ViTModel",
    "gpt2": "transformers:GPT2Model",
    "unet": "autosplit.examples.unet:unet",
    "mlp512": "autosplit.examples.mlp:mlp_512",
}
START_S = 180.0


def serve(connection: Any) -> None:
    """A worker: load the stage, send the load time and the outputs, then count calls for as long as asked."""
    name, folder, threads, precision, arrays = connection.recv()
    torch.set_num_threads(threads)
    started = time.perf_counter()
    run = get_backend(name).load(Path(folder), threads, precision, trust=True)
    load_s = time.perf_counter() - started
    inputs = [torch.from_numpy(array) for array in arrays]
    outputs = [run(inputs) for _ in range(3)][-1]
    connection.send((load_s, [value.contiguous().numpy() for value in outputs]))
    while True:
        seconds = connection.recv()
        num_calls, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            run(inputs)
            num_calls += 1
        connection.send(num_calls / elapsed)


def measure(spec: str, batch: int, cores: list[int], rounds: int, seconds: float, bf16: bool) -> list[dict[str, Any]]:
    """One row for each backend and precision that takes the model."""
    traced = trace(load_model(spec, batch=batch))
    program = split(traced, [[op.name for op in traced.graph.ops]])[0]
    with torch.inference_mode():
        expected = [value.clone() for value in program.module(*traced.example_inputs)]
    rows = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autosplit-bench-"))) / "stage0"
        save_stage(program, folder)
        workers: list[tuple[Worker, list[float]]] = []
        for name in installed():
            for precision in ("f32", "bf16") if bf16 else ("f32",):
                if precision in get_backend(name).lacks:
                    continue
                row, worker = start(name, precision, program, folder, traced.example_inputs, cores, stack)
                load_s, outputs = receive(worker, START_S, "during start")
                error = compare([s.name for s in program.outputs], [torch.from_numpy(o) for o in outputs], expected)
                rows.append({**row, "load_s": load_s, "max_abs_error": error.absolute, "relative_error": error.relative})
                workers.append((worker, []))
        for turn in range(rounds):
            for worker, rates in workers[:: -1 if turn % 2 else 1]:
                worker.connection.send(seconds)
                rates.append(receive(worker, START_S, "during a round"))
        for row, (_, rates) in zip(rows, workers, strict=True):
            middle = median(rates)
            row |= {"items_per_s": batch * middle, "spread": (max(rates) - min(rates)) / middle, "samples": rates}
    return rows


def start(
    name: str,
    precision: Precision,
    program: StageProgram,
    folder: Path,
    inputs: tuple[torch.Tensor, ...],
    cores: list[int],
    stack: ExitStack,
) -> tuple[dict[str, Any], Worker]:
    """Prepare the stage for a backend and start its worker."""
    started = time.perf_counter()
    get_backend(name).prepare(program, folder, precision)
    row = {"backend": name if precision == "f32" else f"{name} {precision}", "prepare_s": time.perf_counter() - started}
    worker = spawn_worker("benchmarks.backends:serve", name=name, cores=cores)
    stack.callback(worker.close)
    worker.connection.send((name, str(folder), len(cores), precision, [value.numpy() for value in inputs]))
    return row, worker


def show(model: str, rows: list[dict[str, Any]]) -> None:
    """One table."""
    print(f"\n{model}")
    titles = f"{'items/s':>10}{'spread':>8}{'x eager':>9}{'prepare s':>11}{'load s':>8}{'max abs err':>13}{'relative':>10}"
    print(f"{'backend':18}{titles}")
    for row in rows:
        print(
            f"{row['backend']:18}{row['items_per_s']:10.1f}{row['spread']:8.0%}{row['items_per_s'] / rows[0]['items_per_s']:9.2f}"
            f"{row['prepare_s']:11.1f}{row['load_s']:8.2f}{row['max_abs_error']:13.2g}{row['relative_error']:10.2g}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="names from the list, or specs")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--cores", default="0", help="cores of every worker, as in 0,1; one thread each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--bf16", action="store_true", help="also each backend's bf16")
    parser.add_argument("--json", type=Path, help="write all samples there")
    options = parser.parse_args()
    cores = [int(core) for core in options.cores.split(",")]
    torch.set_num_threads(len(cores))
    found = {}
    print(f"cores {options.cores}, batch {options.batch}, {options.rounds} rounds of {options.seconds:g} s")
    for model in options.models:
        spec = MODELS.get(model, model)
        found[model] = measure(spec, options.batch, cores, options.rounds, options.seconds, options.bf16)
        show(model, found[model])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

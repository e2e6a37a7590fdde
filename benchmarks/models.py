"""The best way to run each model here: the searched plan beside every backend with all cores and with one process a core.

All ways of a model run in the same interleaved rounds, in float32. A row gives the plan, its items per second (median of the
rounds), the fastest other way, and the median over rounds of the ratio of the two.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from autosplit import api
from autosplit.alternatives import ALL_CORES, REPLICAS, simple_plans
from autosplit.backends.base import installed
from autosplit.comparing import run_report
from autosplit.discovering import machine_for
from autosplit.progress import bars
from autosplit.report import baselines_table, table
from autosplit.runreport import PLAN, RunReport

MODELS = {
    "resnet50": "transformers:ResNetForImageClassification",
    "mobilenet": "transformers:MobileNetV2Model",
    "convnext": "transformers:ConvNextModel",
    "vit": "transformers:ViTModel",
    "swin": "transformers:SwinModel",
    "bert": "transformers:BertModel",
    "gpt2": "transformers:GPT2Model",
    "t5": "transformers:T5Model",
    "whisper": "transformers:WhisperEncoder",
    "unet": "autosplit.examples.unet:unet",
    "mlp1024": "autosplit.examples.mlp:mlp?depth=24&width=1024",
    "mlp512": "autosplit.examples.mlp:mlp?depth=24&width=512",
}


def best_way(name: str, batch: int, backends: list[str], budget_s: float, console: Console) -> RunReport:
    """Search with the backends, then run the plan beside the simple ways of each of them."""
    machine = machine_for()
    traced = api.trace(MODELS[name], batch)
    with bars(console) as start:
        profile = api.measure(traced, machine, backends, profiles=Path("autosplit-run/profiles"), progress=start(name))
        found = api.search(traced, profile, machine, budget_s=budget_s, progress=start(name))
        ways = {
            f"{way} ({backend})": replace(plan, microbatch=batch)
            for backend in backends
            for way, plan in simple_plans(traced.graph, machine, traced.source, backend, machine.devices[0].name).items()
            if way in (ALL_CORES, REPLICAS)
        }
        return run_report(traced, found.plan, ways, machine, num_requests=100, progress=start(name))


def row(name: str, batch: int, report: RunReport) -> dict[str, object]:
    others = {way: outcome for way, outcome in report.outcomes.items() if way != PLAN}
    best = max(others, key=lambda way: others[way].throughput_per_s)
    stages = " | ".join(f"{len(s.ops)} on {'+'.join(s.devices)} ({s.backend})" for s in report.plan.plan.stages)
    return {
        "model": name,
        "batch": batch,
        "plan": stages,
        "items_per_s": report.plan.throughput_per_s,
        "predicted_per_s": report.plan.plan.prediction.throughput_per_s,
        "best_other": best,
        "other_per_s": others[best].throughput_per_s,
        "ratio": report.plan.faster_than(others[best], "throughput"),
        "max_abs_error": report.plan.max_abs_error,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--backends", nargs="+", choices=installed(), default=["eager", "onnxruntime", "openvino"])
    parser.add_argument("--budget", type=float, default=40.0, help="seconds for candidate plans")
    given = parser.parse_args()
    console, err, rows = Console(width=180), Console(stderr=True), []
    for name in given.models:
        for batch in given.batch:
            report = best_way(name, batch, given.backends, given.budget, err)
            console.print(baselines_table(report))
            rows.append(row(name, batch, report))
    console.print(table(rows, "the plan beside the fastest other way"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

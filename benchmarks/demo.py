"""The main job on the devices found: a small model first, then two real ones, each with its plan, picture and report page."""

import sys
import time
from pathlib import Path

from rich.console import Console

import autosplit
from autosplit import Budget, Setup
from autosplit.backends.base import usual
from autosplit.commands.report import baselines_table, plan_table, run_table
from autosplit.figures import plot_run
from autosplit.files import write_atomic
from autosplit.progress import bars

FOLDER = Path("autosplit-run")
STORE = FOLDER / "profiles"
QUICK = tuple(name for name in ("eager", "onnxruntime") if name in usual())
"""Backends of the small model, so that its table is there within 90 s."""

MODELS = {
    "unet": ("autosplit.examples.unet:unet?levels=3&size=64", None, QUICK, Budget(search_s=5, num_rounds=3)),
    "resnet50": ("transformers:ResNetForImageClassification", None, None, Budget(search_s=20)),
    "bert": ("transformers:BertModel", 128, None, Budget(search_s=20)),
}


def main() -> int:
    err, out = Console(stderr=True), Console()
    equal = True
    for name, (spec, seq_len, backends, budget) in MODELS.items():
        start_s = time.monotonic()
        with bars(err) as progress:
            progress("trace", 0.0, f"loading {spec}")
            setup = Setup(backends=backends, store=STORE, progress=progress)
            result = autosplit.auto(autosplit.trace(spec, seq_len=seq_len), setup=setup, budget=budget)
        out.rule(f"{spec}, {time.monotonic() - start_s:.0f} s")
        for view in (baselines_table(result.report), plan_table(result.plan), run_table(result.report)):
            out.print(view)
        autosplit.write_plan(result.plan, result.traced.graph, FOLDER / f"{name}.yaml")
        write_atomic(FOLDER / f"{name}.svg", plot_run(result.report, result.traced.graph).svg())
        autosplit.write_report(result, FOLDER / f"{name}.html", store=STORE)
        out.print(f"plan, picture and report page: {FOLDER}/{name}.yaml, .svg, .html")
        equal = equal and result.report.best.outputs_equal
    out.print(f"run a plan again with: {Path(sys.executable).parent}/autosplit run {FOLDER}/bert.yaml")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

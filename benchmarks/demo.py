"""The main job on two real models and the devices found: predicted beside measured, and every baseline."""

import sys
import time
from pathlib import Path

from rich.console import Console

from autosplit import api
from autosplit.commands.report import baselines_table, plan_table, run_table
from autosplit.deploying.setup import Budget, Setup
from autosplit.figures import plot_baselines
from autosplit.files import write_atomic
from autosplit.progress import bars
from autosplit.values.planfile import write_plan

MODELS = {"resnet50": ("transformers:ResNetForImageClassification", None), "bert": ("transformers:BertModel", 128)}
FOLDER = Path("autosplit-run")


def main() -> int:
    err, out = Console(stderr=True), Console(width=None if sys.stdout.isatty() else 140)
    equal = True
    for name, (spec, seq_len) in MODELS.items():
        start_s = time.monotonic()
        with bars(err) as progress:
            progress("trace", 0.0, f"loading {spec}")
            setup = Setup(store=FOLDER / "profiles", progress=progress)
            result = api.auto(api.trace(spec, seq_len=seq_len), setup=setup, budget=Budget(search_s=20))
        write_plan(result.plan, result.traced.graph, FOLDER / f"{name}.yaml")
        out.rule(f"{spec}, {time.monotonic() - start_s:.0f} s")
        for view in (plan_table(result.plan), run_table(result.report), baselines_table(result.report)):
            out.print(view)
        write_atomic(FOLDER / f"{name}.svg", plot_baselines(result.report).svg())
        equal = equal and result.report.best.outputs_equal
    again = f"{Path(sys.executable).parent}/autosplit run {FOLDER}/bert.yaml"
    out.print(f"plans and pictures are in {FOLDER}/; run one again with: {again}")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())

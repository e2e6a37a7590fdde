"""The best way to run each model here: what ``autosplit auto`` chooses, beside each runtime used without autosplit.

    python -m benchmarks.models [--models NAME,...] [--batch 1 8] [--budget 5] [--rounds 3] [--note quiet] [--missing HOURS]
        [--minutes 25]
    python -m benchmarks.models --prepare [--models NAME,...] [--batch 1 8]
    python -m benchmarks.models --write-table

The runtimes are torch eager, torch.compile (inductor), ONNX Runtime, and OpenVINO with its latency and its throughput
hint, each in one process with every core and in a pinned process on each core. A short run of each says which are near the
front; these and autosplit's way then run in the same rounds, order turning, all in f32. The ratio is the median over
rounds of autosplit's items per second, through ``submit`` with 12 requests in flight, over those of the fastest runtime.
Then ``submit`` is called from one thread, from eight and from asyncio, with 1 to 64 requests in flight (``submitting``).
Every run is appended to benchmarks/models.json, so the table can be made in pieces. ``--missing 2`` goes on where a run of the
last 2 hours was stopped, and ``--minutes`` begins no row that may end later. ``--write-table`` makes benchmarks/models.md from
the newest run of each model and batch. ``--prepare`` only writes the files that the runtimes load, torch.compile's above all,
which takes up to a minute a model and no quiet machine; the run that measures finds them, autosplit the ONNX file of the whole
model among them, and removes them unless it is told to ``--keep`` them. All 26 rows in one go on a quiet machine::

    python -m benchmarks.models --prepare
    python -m benchmarks.models --note quiet --minutes 34 --missing 3      # again for what the 34 minutes left
"""

import argparse
import json
import math
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from autosplit import api
from autosplit.backends.workspace import Workspace
from autosplit.deploying.bench import SETTLE_S, Bench, Contender
from autosplit.deploying.service import Service
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.discovering import describe, machine_for
from autosplit.devices.limits import usable_cores
from autosplit.devices.processes import prepare_to_spawn
from autosplit.keeping import keep_search
from autosplit.progress import bars
from autosplit.reports.runreport import RunReport
from autosplit.searching.candidates import SearchResult
from autosplit.tracing.capturing import Traced
from autosplit.tracing.splitting import StageProgram, split
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from benchmarks import natives, submitting

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
    "mlp256": "autosplit.examples.mlp:mlp?depth=6&width=256",
    "regnet": "transformers:RegNetModel",
}
SINGLE = ("mlp256", "regnet")
"""Models that are measured for single items only: they stand for requests of 70 us and of 40 ms."""

RESULTS, TABLE = Path("benchmarks/models.json"), Path("benchmarks/models.md")
PROFILES, STAGES = Path("autosplit-run/profiles"), Path("autosplit-run/stages")
NEAR, MOST_NEAR = 0.7, 2
"""A runtime at less than this share of the fastest one's short run is not run again, nor are more than so many."""

ROUND_S, NUM_ROUNDS = 1.0, 3
"""Seconds of a round here, and most rounds of ``auto``, which may run twice as many of the fastest ways."""

LEAST_REQUESTS, MOST_ROUND_S = 8, 3.0
"""Of a round here, which lasts longer where they do, but at most so many seconds: of few, the last of a slower core counts."""

COMPILE_S = 240.0
"""For what the baselines run on; after ``--prepare`` it takes a second."""

SUBMIT_ROUNDS = 3
"""Rounds of each load of ``submitting.LOADS``."""

MOST_S = 20.0
"""Of rounds; where they take longer, as those of a model of seconds a request, there are three."""

SHOWN = (
    "model",
    "batch",
    "way",
    "items_per_s",
    "best_runtime",
    "runtime_per_s",
    "ratio",
    "ready_s",
    "profile_s",
    "report_s",
    "auto_s",
    "runtimes_s",
    "row_s",
)


def measure(name: str, batch: int, given: argparse.Namespace, console: Console) -> dict[str, Any]:
    """One row: let autosplit choose, then run its choice beside the runtimes."""
    begun_s = time.monotonic()
    prepare_to_spawn()
    whole, machine = api.trace(MODELS[name], batch=batch), machine_for(None)
    program, folder = _stage(whole)
    with ExitStack() as stack:
        if not given.keep:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        failures = natives.prepare_all(given.runtimes, program, folder)
        workspace = stack.enter_context(Workspace())
        workspace.save(program, there=folder)
        ready_s = time.monotonic() - begun_s
        with bars(console) as progress:
            setup = Setup(store=PROFILES, remeasure=given.remeasure, workspace=workspace, progress=progress)
            profile = api.measure(whole, machine, setup=setup)
            profile_s = time.monotonic() - begun_s - ready_s
            found, report, report_s = _choose(whole, profile, machine, given, replace(setup, remeasure=False))
        plan = report.best.plan
        auto_s = time.monotonic() - begun_s - ready_s
        loaded, refused = natives.start_all(given.runtimes, folder, whole.example_inputs, usable_cores(), stack, failures)
        load_s = time.monotonic() - begun_s - ready_s - auto_s
        short = {native.name: batch * native.tried_per_s for native in loaded}
        near = sorted(loaded, key=lambda native: -short[native.name])[:MOST_NEAR]
        near = [native for native in near if short[native.name] > NEAR * max(short.values())]
        bench = stack.enter_context(Bench(machine, Setup(workspace=workspace)))
        ours = bench.load("ours", plan, found.traced)
        _run_rounds(ours, near, batch, given.rounds)
        error = ours.error
        service = Service(found.traced, ours.pipeline)
        submitted = submitting.rates(service, found.traced, ours.latency.p50_s, SUBMIT_ROUNDS)
    best = max(near, key=lambda native: native.throughput_per_s)
    rates = ours.rounds_per_s
    return {
        "model": name,
        "batch": batch,
        "way": report.chosen,
        "plan": [asdict(stage) | {"ops": len(stage.ops)} for stage in plan.stages],
        "microbatch": plan.microbatch,
        "process": plan.process,
        "submit_per_s": {load: plan.microbatch * per_s for load, per_s in submitted.items()},
        "items_per_s": median(rates),
        "spread": (max(rates) - min(rates)) / median(rates),
        "predicted_per_s": plan.prediction.throughput_per_s or None,
        "best_runtime": best.name,
        "runtime_per_s": best.throughput_per_s,
        "ratio": median(a / b for a, b in zip(rates, best.rounds_per_s, strict=True)),
        "max_relative_error": error.relative,
        "rounds": {"autosplit": rates} | {native.name: native.rounds_per_s for native in near},
        "short_runs": short,
        "failures": refused,
        "notes": list(profile.notes),
        "ways": {row["plan"]: row["items_per_s"] for row in report.rows()} | dict(report.left_out),
        "ready_s": round(ready_s, 1),
        "profile_s": round(profile_s, 1),
        "report_s": round(report_s, 1),
        "auto_s": round(auto_s, 1),
        "runtimes_s": round(load_s, 1),
        "row_s": round(time.monotonic() - begun_s, 1),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "note": given.note,
        "cpu": dict(describe().facts),
        "versions": {package: version(package) for package in ("torch", "onnxruntime", "openvino")},
    }


def _choose(
    whole: Traced, profile: Profile, machine: Machine, given: argparse.Namespace, setup: Setup
) -> tuple[SearchResult, RunReport, float]:
    """What ``auto`` does once it has a profile; and the seconds of the report."""
    budget = Budget(search_s=given.budget, compile_s=COMPILE_S, num_rounds=NUM_ROUNDS)
    found = api.search(whole, profile, machine, setup=setup, budget=budget)
    begun_s = time.monotonic()
    subjects = {whole.source.batch: (whole, profile), found.plan.microbatch: (found.traced, found.profile)}
    report = api.run_subjects(subjects, found.plan, machine, Constraints(), setup=setup, budget=budget)
    keep_search(found, setup)
    return found, report, time.monotonic() - begun_s


def _run_rounds(ours: Contender, near: Sequence[natives.Native], batch: int, num_rounds: int) -> None:
    """autosplit's way and the runtimes near the front in the same rounds, order turning."""
    round_s = min(MOST_ROUND_S, max(ROUND_S, LEAST_REQUESTS * batch / ours.pace_per_s))
    num_items = max(batch, round(round_s * ours.pace_per_s))
    begun_s = time.monotonic()
    for number in range(num_rounds):
        turns = [lambda: ours.run(num_items), *(lambda native=native: _round(native, batch, round_s) for native in near)]
        for turn in turns if number % 2 == 0 else reversed(turns):
            turn()
            time.sleep(SETTLE_S)
        if number >= 2 and time.monotonic() - begun_s > MOST_S:
            return


def _stage(traced: Traced) -> tuple[StageProgram, Path]:
    """The whole model as one stage, and the folder of its files."""
    [program] = split(traced, [[op.name for op in traced.graph.ops]])
    return program, STAGES / f"{traced.graph.name}-{traced.graph.hash}"


def prepare(name: str, batch: int, given: argparse.Namespace) -> None:
    """Write the files that the runtimes load."""
    begun_s = time.monotonic()
    failures = natives.prepare_all(given.runtimes, *_stage(api.trace(MODELS[name], batch=batch)))
    print(f"{name}, batch {batch}: prepared in {time.monotonic() - begun_s:.0f} s {failures or ''}", flush=True)


def _round(native: natives.Native, batch: int, seconds: float) -> None:
    native.rounds_per_s.append(batch * native.run(seconds))


def write_table() -> None:
    """benchmarks/models.md from the newest run of each model and batch."""
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for row in json.loads(RESULTS.read_text(encoding="utf-8")):
        newest[row["model"], row["batch"]] = row
    rows = sorted(newest.values(), key=lambda row: (list(MODELS).index(row["model"]), row["batch"]))
    loads = [f"{who}, {count}" for who, count in submitting.LOADS]
    lines = [
        "| model | batch | autosplit's way | items/s | spread | best runtime alone | items/s | ratio "
        f"| {' | '.join(loads)} | error |",
        "|---" * (9 + len(loads)) + "|",
    ]
    for row in rows:
        stages = " → ".join(_shown(stage) for stage in row["plan"])
        where = " in the caller's process" if row.get("process") == "caller" else ""
        cells = [row["model"], row["batch"], stages + where, f"{row['items_per_s']:.4g}", f"{row['spread']:.0%}"]
        cells += [row["best_runtime"], f"{row['runtime_per_s']:.4g}", f"{row['ratio']:.2f}"]
        submitted = row.get("submit_per_s", {})
        cells += [f"{submitted[load]:.4g}" if load in submitted else "-" for load in loads]
        cells += [f"{row['max_relative_error']:.1g}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    if submitting.CHANGES.exists():
        head = "| model | change | requests/s without | with | ratio | host's us a request without | with |"
        lines += ["", "## What each change brings", "", head, "|---" * 7 + "|"]
        for row in json.loads(submitting.CHANGES.read_text(encoding="utf-8")):
            ratio = f"{row['ratio']:.2f} ({row['low']:.2f} to {row['high']:.2f})"
            cells = [row["model"], row["change"], f"{row['without_per_s']:.4g}", f"{row['with_per_s']:.4g}", ratio]
            cells += [f"{row[key]:.0f}" if key in row else "-" for key in ("without_us", "with_us")]
            lines.append(f"| {' | '.join(cells)} |")
    text = TABLE.read_text(encoding="utf-8") if TABLE.exists() else "# The best way to run each model\n\n<!-- table -->\n"
    head = text.split("<!-- table -->")[0]
    TABLE.write_text(head + "<!-- table -->\n" + "\n".join(lines) + "\n", encoding="utf-8")


def _shown(stage: dict[str, Any]) -> str:
    streams = f" in {stage['streams']} streams" if stage.get("streams", 1) > 1 else ""
    return f"{stage['backend']} on {' + '.join(stage['devices'])}{streams}"


def rows_since(date: datetime) -> set[tuple[str, int]]:
    """Model and batch of the rows that were measured since then."""
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    return {(row["model"], row["batch"]) for row in rows if datetime.fromisoformat(row["date"]) >= date}


def keep_in(path: Path, row: dict[str, Any]) -> None:
    """Append a row to a file of results; a run that is stopped loses at most the model under way."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps([*rows, row], indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="names with commas between")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--runtimes", type=lambda text: text.split(","), default=list(natives.RUNTIMES))
    parser.add_argument("--budget", type=float, default=5.0, help="seconds for candidate plans")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no row that may end later than this")
    parser.add_argument("--note", default="not known to be quiet", help="what a reader should know of the machine meanwhile")
    parser.add_argument("--missing", type=float, default=0.0, metavar="HOURS", help="leave out rows measured in the last HOURS")
    parser.add_argument("--remeasure", action="store_true", help="measure stored profiles again, as when they were not quiet")
    parser.add_argument("--keep", action="store_true", help="keep the files that the runtimes load")
    parser.add_argument("--prepare", action="store_true", help="only write the files that the runtimes load")
    parser.add_argument("--write-table", action="store_true", help="only write the table from the results")
    given = parser.parse_args()
    failed, begun_s, longest_s = 0, time.monotonic(), 0.0
    done = rows_since(datetime.now(UTC) - timedelta(hours=given.missing))
    for name in [] if given.write_table else given.models:
        for batch in given.batch:
            if (name, batch) in done or (batch > 1 and name in SINGLE):
                continue
            if (spent_s := time.monotonic() - begun_s) + longest_s > 60 * given.minutes:
                print(f"{name}, batch {batch}: left for the next run, after {spent_s / 60:.0f} minutes", flush=True)
                continue
            try:
                if given.prepare:
                    prepare(name, batch, given)
                    continue
                row = measure(name, batch, given, Console(stderr=True))
            except Exception:  # one model may not cost the table the others
                failed += 1
                print(f"{name}, batch {batch}, failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
                continue
            longest_s = max(longest_s, row["row_s"])
            keep_in(RESULTS, row)
            print(*(f"{key}={row[key]}" for key in SHOWN), flush=True)
    if not given.prepare:
        write_table()
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())

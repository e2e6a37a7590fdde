"""How good the predictions are: predicted against measured throughput of plans of three shapes with each backend.

    python -m benchmarks.accuracy [--models resnet50,unet] [--backends eager,onnxruntime,openvino] [--note quiet]
    python -m benchmarks.accuracy --write-table

The shapes are the whole model on each of two cores, two stages, and three stages, of which two share a core. The three plans
of a backend are loaded side by side and run in interleaved rounds; every other round is judged. Two predictions of each plan
are compared with the median of the judged rounds. ``planned`` is made from a profile of ops that was measured just before.
``corrected`` is made after the other rounds went into the profile, as the rounds of a candidate do in a search. The two kinds of
rounds alternate, because the clock of a machine drifts by more within a minute than a prediction may be off. A slow model runs
fewer rounds. ``repeated`` takes the other rounds in place of a prediction, and so says how well the machine agrees with itself.
Each model is added to benchmarks/accuracy.json as it is done; benchmarks/accuracy.md is made from the newest run of each.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from autosplit import api
from autosplit.deploying.bench import Bench
from autosplit.deploying.setup import Budget, Setup
from autosplit.devices.discovering import describe, machine_for, versions
from autosplit.devices.limits import usable_cores
from autosplit.errors import AutosplitError
from autosplit.planning.predicting import moved_s, predict
from autosplit.reports.accuracy import Run, run_of
from autosplit.searching.correcting import Span, corrected, spans_of, taken_s
from autosplit.tracing.capturing import Traced
from autosplit.values.constraints import Constraints
from autosplit.values.profile import Profile
from benchmarks.models import MODELS as ALL_MODELS
from benchmarks.models import keep_in

MODELS = ("mobilenet", "resnet50", "convnext", "bert", "whisper", "unet", "mlp1024", "mlp512")
SHAPES = {
    "replicas": Constraints(num_stages=1),
    "2 stages": Constraints(num_stages=2, max_replicas=1),
    "3 stages": Constraints(num_stages=3, max_replicas=1),
}
RESULTS, TABLE = Path("benchmarks/accuracy.json"), Path("benchmarks/accuracy.md")
PROFILES = Path("autosplit-run/profiles")
ROUNDS, ROUND_S = 5, 0.5
LEAST_ITEMS = 6
"""Least number of items in a round. While a pipeline fills and drains, workers have no neighbours."""
LEAST_ROUNDS, MOST_S = 3, 24.0
"""Least number of rounds; and the seconds after which no further round of a backend begins, once it has that number."""
KINDS = PLANNED, CORRECTED, REPEATED = "planned", "corrected", "repeated"
GOAL = 0.03, 0.10
"""Median and worst error that are wished for on a quiet machine."""


def judge(name: str, backends: Sequence[str]) -> dict[str, Any]:
    """All shapes and backends of one model: the runs, and what was left out, with the reason."""
    start_s = time.monotonic()
    machine = machine_for(",".join(f"cpu:{core}" for core in usable_cores()[:2]))
    traced = api.trace(ALL_MODELS[name])
    profile = api.measure(traced, machine, setup=Setup(backends=backends, store=PROFILES, remeasure=True))
    left_out = dict(enumerate(profile.notes))
    runs: list[Run] = []
    with Bench(machine) as bench:
        for backend in api.measured_backends(profile, machine):
            if backend in backends:
                runs += _shapes(name, traced, profile, backend, bench, left_out)
    return {
        "model": name,
        "runs": [asdict(run) for run in runs],
        "left_out": list(left_out.values()),
        "seconds": round(time.monotonic() - start_s, 1),
        "cpu": dict(describe().facts),
        "versions": versions(backends),
    }


def _shapes(name: str, traced: Traced, profile: Profile, backend: str, bench: Bench, left_out: dict[Any, str]) -> Iterable[Run]:
    """The three plans of a backend, beside each other."""
    plans = {}
    for shape, constraints in SHAPES.items():
        try:
            setup, budget = Setup(backends=[backend]), Budget(search_s=0, explain_s=0)
            plan = api.search(traced, profile, bench.machine, constraints, setup=setup, budget=budget).plan
            bench.load(shape, plan, traced)
        except AutosplitError as failure:
            left_out[f"{backend}, {shape}"] = f"{backend}, {shape}: {str(failure).splitlines()[0]}"
            continue
        plans[shape] = plan
    times = _rounds(bench)
    now = datetime.now(UTC).isoformat(timespec="seconds")
    for shape, plan in plans.items():
        spans = [spans_of(events) for events in bench.loaded[shape].pipeline.events()]
        seen, held = ([[span for span in one if _within(span, chosen)] for one in spans] for chosen in times[shape])
        if not all(map(all, zip(seen, held, strict=True))):
            left_out[f"{backend}, {shape}"] = f"{backend}, {shape}: a worker had nothing to tell of its rounds"
            bench.unload(shape)
            continue
        moves_s = moved_s(plan, traced.graph, bench.machine, profile)
        told = predict(plan, traced.graph, bench.machine, corrected(profile, plan, taken_s(plan, seen), moves_s))
        outcome = bench.loaded[shape].outcome()
        others_per_s = median(outcome.rounds_per_s[::2])
        outcome = replace(outcome, rounds_per_s=outcome.rounds_per_s[1::2])
        for kind, judged in ((PLANNED, plan), (CORRECTED, told)):
            if run := run_of(kind, name, shape, judged, outcome, now):
                workers = zip(run.stages, taken_s(plan, held), strict=True)
                yield (run := replace(run, stages=tuple(replace(stage, measured_s=taken.median_s) for stage, taken in workers)))
                if kind == CORRECTED:
                    again = zip(run.stages, taken_s(plan, seen), strict=True)
                    stages = tuple(replace(stage, predicted_s=taken.median_s) for stage, taken in again)
                    yield replace(run, kind=REPEATED, predicted_per_s=others_per_s, stages=stages)
        bench.unload(shape)


def _rounds(bench: Bench) -> dict[str, tuple[list[Span], list[Span]]]:
    """Let every plan run twice as many rounds as are judged; begin and end of the others, and of these, in nanoseconds."""
    times: dict[str, tuple[list[Span], list[Span]]] = {shape: ([], []) for shape in bench.loaded}
    for entry in bench.loaded.values():
        entry.restart()
    begun_s = time.monotonic()
    for number in range(2 * ROUNDS):
        if number % 2 == 0 and number >= 2 * LEAST_ROUNDS and time.monotonic() - begun_s > MOST_S:
            break
        names = list(bench.loaded)
        for shape in names if number // 2 % 2 == 0 else reversed(names):
            entry = bench.loaded[shape]
            begin_ns = time.monotonic_ns()
            entry.run(max(LEAST_ITEMS, round(ROUND_S * entry.pace_per_s)))
            times[shape][number % 2].append((begin_ns, time.monotonic_ns()))
    return times


def _within(span: Span, rounds: Iterable[Span]) -> bool:
    """Whether a request began in one of the rounds; its number does not tell, where replicas count by themselves."""
    return any(begin <= span[0] < end for begin, end in rounds)


def write_table() -> None:
    """benchmarks/accuracy.md from the newest run of each model."""
    newest = {row["model"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))}
    rows = [newest[name] for name in MODELS if name in newest]
    runs = [(Run.from_dict(data), row) for row in rows for data in row["runs"]]
    machines = " and ".join(dict.fromkeys(f"{row['cpu']['cpu']} (cores {row['cpu']['cores']})" for row in rows))
    lines = [
        "# Predicted against measured",
        "",
        f"`python -m benchmarks.accuracy` made these tables on {machines}; the first lines of its source say how. An error is "
        "predicted over measured, less one. Stages that share a core count for the errors of plans, but not for those of stages. "
        f"`{REPEATED}` takes the other rounds of the same plan in place of a prediction, so its error is the drift of the "
        f"machine. The goal on a quiet machine is a median of at most {GOAL[0]:.0%} and a worst error of at most {GOAL[1]:.0%}.",
        "",
        "| prediction | plans | median error | worst | stages | median error | worst |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        of_kind = [run for run, _ in runs if run.kind == kind]
        lines.append(_summary(f"**{kind}**", of_kind))
        for key in dict.fromkeys(run.backends for run in of_kind):
            lines.append(_summary(f"{kind}, {key}", [run for run in of_kind if run.backends == key]))
        for way in SHAPES:
            lines.append(_summary(f"{kind}, {way}", [run for run in of_kind if run.way == way]))
    titles = ["model", "backend", "shape", "items/s", "spread", *KINDS, f"worst stage, {CORRECTED}", "machine"]
    lines += ["", f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for planned, row in runs:
        if planned.kind == PLANNED:
            same = (planned.model, planned.backends, planned.way)
            kinds = {run.kind: run for run, _ in runs if (run.model, run.backends, run.way) == same}
            own = kinds[CORRECTED]
            cells = [*same, f"{own.measured_per_s:.4g}", f"{own.spread:.0%}"]
            cells += [f"{kinds[kind].error:+.1%}" if kind in kinds else "-" for kind in KINDS]
            cells += [f"{own.row()['stage_error']:+.1%}", row["note"]]
            lines.append(f"| {' | '.join(cells)} |")
    lines += ["", *(f"- {row['model']}: left out: {reason}" for row in rows for reason in row["left_out"])]
    TABLE.write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


def _summary(title: str, runs: Sequence[Run]) -> str:
    plans = [abs(run.error) for run in runs]
    stages = [abs(stage.error) for run in runs for stage in run.undisturbed]
    cells = [f"{len(errors)} | {median(errors):.1%} | {max(errors):.1%}" if errors else "0 | - | -" for errors in (plans, stages)]
    return f"| {title} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS), help="names with commas between")
    parser.add_argument("--backends", type=lambda text: text.split(","), default=["eager", "onnxruntime", "openvino"])
    parser.add_argument("--note", default="not known to be quiet", help="what a reader should know of the machine meanwhile")
    parser.add_argument("--write-table", action="store_true", help="only write the table from the results")
    given = parser.parse_args()
    failed = 0
    for name in [] if given.write_table else given.models:
        try:
            row = judge(name, given.backends) | {"note": given.note}
        except Exception:  # one model may not cost the table the others
            failed += 1
            print(f"{name} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
            continue
        keep_in(RESULTS, row)
        errors = [abs(run["predicted_per_s"] / run["measured_per_s"] - 1) for run in row["runs"] if run["kind"] == CORRECTED]
        worst = f"median {median(errors):.1%}, worst {max(errors):.1%}" if errors else "no plan ran"
        print(f"{name}: {len(errors)} plans, corrected {worst}, {row['seconds']} s", flush=True)
    write_table()
    return min(1, failed)


if __name__ == "__main__":
    sys.exit(main())

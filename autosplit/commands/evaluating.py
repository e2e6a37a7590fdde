"""Judge a plan file, a split of a model that another tool made, or a split of a planner's workload file."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from autosplit.commands.console import err, load_plan, say, show, trace
from autosplit.commands.exchangeoptions import Evaluate
from autosplit.commands.options import seconds
from autosplit.commands.workloadfiles import evaluate_workload
from autosplit.errors import UsageError
from autosplit.progress import bars

FOR_WORKLOADS = ("format", "num_devices", "bandwidth", "overlap", "simulate", "arrival_rate", "trace")
"""Flags for a planner's workload file."""

FOR_MODELS = ("cluster", "devices", "machine", "memory", "run", "rounds", "batch", "seq_len", "trust", "backend", "time_limit")
"""Flags for a model or its machine."""


def evaluate(given: Evaluate) -> None:
    """Judge a split: one of a model that another tool made, a plan.yaml, or one of a planner's workload file."""
    path = Path(given.subject)
    if path.suffix in (".yaml", ".yml"):
        _evaluate_plan(given, path)
    elif path.suffix == ".pt2" or ":" in given.subject:
        _evaluate_split(given)
    else:
        given.require_default(("model", *FOR_MODELS), "a workload file names its own devices and ops, and nothing is measured")
        evaluate_workload(given)


def _evaluate_plan(given: Evaluate, path: Path) -> None:
    """Predict a plan file, edited or not, and show its stages."""
    from autosplit import api, keeping
    from autosplit.commands.report import plan_table
    from autosplit.deploying.setup import Setup

    given.require_default((*FOR_WORKLOADS, "split", *FOR_MODELS), "a plan names its own stages")
    with bars(err) as progress:
        loaded = load_plan(path, given.model, progress)
    profile = keeping.stored_profile(loaded.traced, loaded.plan, loaded.machine, Setup(store=given.store))
    if profile is None:
        raise UsageError(f"the store '{given.store}' holds no measurement of this model here: autosplit profile makes one")
    plan = api.predict(loaded.plan, profile, loaded.traced, loaded.machine)
    data = {"plan": str(path), **asdict(plan.prediction), "stages": plan.rows()}
    show(given, data, plan_table(plan, given.verbose))


def _evaluate_split(given: Evaluate) -> None:
    """Judge a split of a model beside the best split under the same rules; with ``--run``, measure both too."""
    from autosplit.backends.base import get_backend
    from autosplit.commands.report import left_out_lines, table
    from autosplit.deploying.setup import Setup
    from autosplit.devices.discovering import machine_for
    from autosplit.splitjudge import judge, measured_rows, run_judged

    given.require_default((*FOR_WORKLOADS, "model", "cluster"), "a model is measured on the devices of this machine")
    if given.split is None:
        raise UsageError("name the split: --split 16,32, device_map.json, split_spec.yaml, stages.txt or a folder of ONNX files")
    if Path(given.split).suffix and not Path(given.split).exists():
        raise UsageError(f"split file '{given.split}' does not exist")
    get_backend(given.backend)
    machine = machine_for(given.devices, given.machine, given.memory)
    with bars(err) as progress:
        setup = Setup(store=given.store, progress=progress)
        traced = trace(given, progress, given.subject)
        limit_s = seconds(given.time_limit)
        judged = judge(traced, given.split, machine, backend=given.backend, setup=setup, time_limit_s=limit_s)
        report = run_judged(traced, judged, machine, setup=setup, num_rounds=given.rounds) if given.run else None
    for note in judged.split.notes:
        say(f"note: {note}")
    data: dict[str, Any] = {"model": traced.graph.name, **judged.to_dict()}
    rows = judged.rows()
    if report is not None:
        rows = measured_rows(judged, report)
        data |= {"plans": rows, "outputs_equal": report.plan.outputs_equal}
    below = "\n".join([judged.sentence, *judged.why, *left_out_lines(judged.left_out)])
    show(given, data, table(rows, f"{traced.graph.name}: a split beside others", below))

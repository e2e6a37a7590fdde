"""Judge a plan file, a split of a model that another tool made, or a split of a planner's workload file."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from autosplit.commands import options
from autosplit.commands.console import add_simulation, err, load_plan, say_notes, show, simulation_of, trace, write_simulation
from autosplit.commands.exchangeoptions import Evaluate
from autosplit.commands.machines import named_machine
from autosplit.commands.report import left_out_lines, plan_table, table
from autosplit.commands.workloadfiles import evaluate_workload
from autosplit.errors import UsageError
from autosplit.planning.estimating import sources
from autosplit.progress import bars

FOR_WORKLOADS = ("format", *options.FOR_WORKLOADS)
"""Flags for a planner's workload file."""

FOR_MODELS = ("run", "rounds", "batch", "seq_len", "trust", "backend", "time_limit")
"""Flags for a model."""

FOR_MACHINES = ("cluster", "devices", "machine", "memory", "profile_of")
"""Flags for the devices of a model or plan."""


def evaluate(given: Evaluate) -> None:
    """Judge a split: one that another tool made of a model, a plan.yaml, or one of a planner's workload file."""
    path = Path(given.subject)
    if path.suffix in (".yaml", ".yml"):
        _evaluate_plan(given, path)
    elif path.suffix == ".pt2" or ":" in given.subject:
        _evaluate_split(given)
    else:
        given.require_default(
            ("model", *FOR_MODELS, *FOR_MACHINES), "a workload file names its own devices and ops, and nothing is measured"
        )
        evaluate_workload(given)


def _evaluate_plan(given: Evaluate, path: Path) -> None:
    """Predict a plan file, edited or not, and show its stages; on other devices, here or not, if the flags describe some."""
    from autosplit import api, keeping
    from autosplit.deploying.setup import Setup
    from autosplit.placing.rules import broken_by

    given.require_default((*FOR_WORKLOADS, "split", "cluster", *FOR_MODELS), "a plan names its own stages")
    other = any(given.is_given(flag) for flag in FOR_MACHINES)
    with bars(err) as progress:
        setup = Setup(store=given.store, progress=progress, profile_of=given.profile_of)
        machine = named_machine(given, here=False) if other else None
        weights = machine is not None and bool(sources(machine))
        loaded = load_plan(path, given.model, progress, devices=machine, weights=weights)
        if machine is None:
            profile = keeping.stored_profile(loaded.traced, loaded.plan, loaded.machine, setup)
        else:
            backends = tuple(dict.fromkeys(stage.backend for stage in loaded.plan.stages))
            profile = api.measure(loaded.traced, machine, setup=replace(setup, backends=backends))
    if profile is None:
        raise UsageError(
            f"the store '{given.store}' holds no measurement of this model here: autosplit profile makes one. For devices that "
            "are not here, give --machine with a file that states their speeds"
        )
    plan = api.predict(loaded.plan, profile, loaded.traced, loaded.machine)
    say_notes([*(profile.notes if machine is not None else ()), *broken_by(plan, loaded.traced.graph, loaded.machine)])
    data: dict[str, Any] = {"plan": str(path), **asdict(plan.prediction), "stages": plan.rows(), "method": plan.method}
    views = [plan_table(plan, given.verbose)]
    simulation = simulation_of(plan, loaded.traced.graph, profile, loaded.machine)
    simulated = add_simulation(given, simulation, data, views, in_seconds=True)
    show(given, data, *views)
    write_simulation(given.trace, simulated)


def _evaluate_split(given: Evaluate) -> None:
    """Judge a split of a model beside the best split under the same rules; with ``--run``, measure both too."""
    from autosplit.backends.base import get_backend
    from autosplit.deploying.setup import Setup
    from autosplit.splitjudge import judge, measured_rows, run_judged

    for_others = (*FOR_WORKLOADS, "simulate", "arrival_rate", "trace", "model", "cluster")
    given.require_default(for_others, "a split of a model is predicted, or measured on the devices of this machine")
    if given.split is None:
        raise UsageError("name the split: --split 16,32, device_map.json, split_spec.yaml, stages.txt or a folder of ONNX files")
    lost = [one for one in map(str.strip, given.split.split(",")) if not one.isdigit() and not Path(one).exists()]
    if lost and not Path(given.split).exists():
        raise UsageError(f"split file '{lost[0]}' does not exist; numbers of layers are written as 16,32")
    get_backend(given.backend)
    machine = named_machine(given, here=given.run)
    with bars(err) as progress:
        setup = Setup(store=given.store, progress=progress, profile_of=given.profile_of)
        traced = trace(given, progress, given.subject, weights=given.run or bool(sources(machine)))
        limit_s = options.seconds(given.time_limit)
        judged = judge(traced, given.split, machine, backend=given.backend, setup=setup, time_limit_s=limit_s)
        report = run_judged(traced, judged, machine, setup=setup, num_rounds=given.rounds) if given.run else None
    say_notes(judged.split.notes)
    data: dict[str, Any] = {"model": traced.graph.name, **judged.to_dict()}
    rows = judged.rows()
    if report is not None:
        rows = measured_rows(judged, report)
        data |= {"plans": rows, "outputs_equal": report.plan.outputs_equal}
    below = "\n".join([judged.sentence, *judged.why, *left_out_lines(judged.left_out)])
    show(given, data, table(rows, f"{traced.graph.name}: a split beside others", below))

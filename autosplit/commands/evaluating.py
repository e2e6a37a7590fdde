"""Judge a plan file, a split of a model that another tool made, or a split of a planner's workload file."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autosplit.commands import options
from autosplit.commands.console import add_simulation, err, load_plan, say_notes, show, simulation_of, trace, write_simulation
from autosplit.commands.machines import named_machine
from autosplit.commands.report import left_out_lines, plan_table, table
from autosplit.commands.workloadfiles import read_problem, simulation_of_blocks
from autosplit.errors import PlanError, UsageError
from autosplit.files import read_data
from autosplit.parsing import parse_json
from autosplit.planning.estimating import sources
from autosplit.progress import bars

FOR_MODELS = ("run", "rounds", "batch", "seq_len", "trust", "backend", "time_limit")
"""Flags for a model."""

FOR_MACHINES = (*options.flags_of(options.Clustered, options.Devices), "profile_of")
"""Flags for the devices of a model or plan."""


@dataclass(frozen=True, kw_only=True)
class Evaluate(options.Simulated, options.Assumed, options.Devices):
    """Split to judge."""

    subject: Annotated[str, typer.Argument(help="A model as for profile, a plan.yaml, or a planner's workload file.")]
    split: Annotated[
        str | None,
        typer.Option(
            help="For a model: device_map.json, split_spec.yaml, stages.txt (last op of each stage), a folder of ONNX stages, or "
            "numbers of layers such as 16,32. For a workload: JSON from node id to device name."
        ),
    ] = None
    run: Annotated[bool, typer.Option("--run", help="For a model: also measure the split, the best one and other tools'.")] = (
        False
    )
    rounds: Annotated[int, typer.Option(min=1, help="For --run: interleaved rounds.")] = 3
    model: options.PlansModel = None
    batch: Annotated[int, typer.Option(min=1, help="For a model: items in one request.")] = 1
    seq_len: Annotated[int | None, typer.Option(min=1, help="For a model: tokens in one item.")] = None
    trust: Annotated[bool, typer.Option("--trust", help="Read a .pt2 file, which can run code of its maker.")] = False
    backend: Annotated[str, typer.Option(help="For a model: the backend that runs every stage.")] = "eager"
    profiles: options.Profiles = None
    profile_of: options.ProfileOf = ""
    time_limit: Annotated[str, typer.Option(help="For a model: most time for the planner.")] = options.PLANNER_TIME
    format: Annotated[str, typer.Option(help="dnn-partitioning or pipedream.")] = "dnn-partitioning"
    seed: Annotated[int, typer.Option(help="Seed of the arrivals.")] = 0


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
        _evaluate_workload(given)


def _evaluate_plan(given: Evaluate, path: Path) -> None:
    """Predict a plan file, edited or not, and show its stages; on other devices, here or not, if the flags describe some."""
    from autosplit import api, keeping
    from autosplit.deploying.setup import Setup
    from autosplit.placing.rules import broken_by

    given.require_default(
        ("format", *options.flags_of(options.Assumed), "split", "cluster", *FOR_MODELS), "a plan names its own stages"
    )
    other = any(given.is_given(flag) for flag in FOR_MACHINES)
    with bars(err) as progress:
        setup = Setup(store=given.store, progress=progress, profile_of=given.profile_of)
        machine = named_machine(given, here=False) if other else None
        weights = machine is not None and bool(sources(machine))
        loaded = load_plan(path, given.model, progress, devices=machine, weights=weights)
        if machine is None:
            profile = keeping.stored_profile(loaded.traced, loaded.plan, loaded.machine, setup)
        else:
            profile = api.measure(loaded.traced, machine, setup=replace(setup, backends=loaded.plan.backends))
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

    for_others = ("format", *options.flags_of(options.Assumed, options.Simulated), "model", "cluster")
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


def _evaluate_workload(given: Evaluate) -> None:
    """Judge a split of a planner's workload file by its loads."""
    from autosplit.costs import cost
    from autosplit.costs.workloads import read_split

    path = Path(given.subject)
    problem = read_problem(path, given)
    if given.split is None:
        raise UsageError(f"name a split of '{path}': --split FILE, JSON from op to device, one of {', '.join(problem.devices)}")
    split = read_data(Path(given.split), "split", UsageError, parse_json)
    try:
        blocks = read_split(problem, split)
    except PlanError as failure:
        raise PlanError(f"{failure}\nThe devices are {', '.join(problem.devices)}.") from None
    seconds = cost.evaluate(problem, blocks).device_s.tolist()
    loads = dict(zip(problem.devices, seconds, strict=True))
    data = {"workload": problem.name, "objective": max(loads.values()), "loads": loads}
    title = f"{problem.name}: {max(loads.values()):.6g}"
    views = [table([{"device": name, "load": load} for name, load in loads.items()], title)]
    simulated = add_simulation(given, simulation_of_blocks(problem, blocks), data, views)
    show(given, data, *views)
    write_simulation(given.trace, simulated)

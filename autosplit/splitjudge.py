"""judge(): a split that another tool made, beside the best one under the same rules and the rules of other tools."""

from dataclasses import replace
from typing import Any

from autosplit import api
from autosplit.arguments import checked
from autosplit.deploying.comparing import compare
from autosplit.deploying.footprints import Footprints
from autosplit.deploying.setup import SETUP, Budget, Setup
from autosplit.devices.discovering import Devices, as_machine
from autosplit.exporting.onnx_stages import from_onnx_stages, onnx_files
from autosplit.generating.steps import StepFamily
from autosplit.planning.baselines import Baselines
from autosplit.planning.givensplits import read_given
from autosplit.planning.question import Question
from autosplit.planning.splitjudging import GIVEN, Judgement, judge_split
from autosplit.reports.outcomes import PLAN
from autosplit.reports.runreport import RunReport
from autosplit.tracing.capturing import Traced


@checked
def judge(
    traced: Traced | StepFamily,
    split: str,
    devices: Devices | None = None,
    *,
    backend: str = "eager",
    setup: Setup = SETUP,
    time_limit_s: float = 10.0,
) -> Judgement:
    """Predict a split beside the best split under the same rules, and say how much the split loses.

    Args:
        traced: the model; of one that generates the largest step is judged.
        split: numbers of layers such as ``16,32``; a file (``device_map.json``, ``split_spec.yaml``, ``stages.txt``, see
            ``autosplit.planning.givensplits``); a folder of ONNX files, or ONNX files with commas between.
        devices: the devices, or their names, as a list or with commas between; stages get them in order.
        backend: the backend that runs every stage.
        setup: precision and store of the measurements.
        time_limit_s: seconds for the planner.
    Raises: UsageError: the split does not fit, with every fault. ProfileError, BackendError: as ``measure``. PlanError: the split
        needs more memory than a device has. InfeasibleError: the model does not fit the devices' memory.
    """
    machine = as_machine(devices)
    prefix, traced = (traced.prefix, traced.variants[0]) if isinstance(traced, StepFamily) else ("", traced)
    files = onnx_files(split)
    given = from_onnx_stages(files, traced, machine) if files else read_given(split, traced.graph, machine, prefix)
    profile = api.measure(traced, machine, setup=replace(setup, backends=(backend,)))
    account = Footprints(machine, setup.workspace).account(traced, profile)
    about = traced.graph, profile, traced.source, machine, (backend,)
    return judge_split(given, Question(*about, time_limit_s=time_limit_s / 2, account=account))


def run_judged(
    traced: Traced, judged: Judgement, devices: Devices | None = None, *, setup: Setup = SETUP, num_rounds: int = 3
) -> RunReport:
    """Run a judged split and its rivals in interleaved rounds; the split is the report's ``plan``.

    Args:
        traced: the model.
        judged: the judgement that ``judge`` returned.
        devices: the devices that the split was judged on.
        setup: workspace, progress.
        num_rounds: rounds of about 2 s for each plan.
    """
    rivals = {name: plan for name, plan in judged.plans.items() if name != GIVEN}
    subjects = {traced.source.batch: (traced, None)}
    plan = judged.plans[GIVEN]
    budget = Budget(num_rounds=num_rounds)
    return compare(subjects, plan, Baselines(rivals), as_machine(devices), None, setup=setup, budget=budget)


def measured_rows(judged: Judgement, report: RunReport) -> list[dict[str, Any]]:
    """The rows of a judgement with the measurements; None for a plan that did not run in the rounds."""
    outcomes = {GIVEN if name == PLAN else name: outcome for name, outcome in report.outcomes.items()}
    return [
        {**row, "measured_per_s": outcomes[row["plan"]].throughput_per_s if row["plan"] in outcomes else None}
        for row in judged.rows()
    ]

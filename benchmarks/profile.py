"""How well a profile predicts stages: op sums, and op sums corrected by other measured stages, against stages as they run.

    python -m benchmarks.profile [--models NAME ...] [--backends eager,onnxruntime] [--rounds 3] [--seconds 0.5] [--json FILE]

For each model and backend the graph is cut in two at a third, a half and two thirds of its time. The two stages of a cut run
at once in two pinned workers, cut after cut, in rounds. The truth is the median of all passes of a stage. Each row shows the
truth and the errors of three predictions: ``share`` is the stage's share of the raw op times of the whole model that runs
alone, ``sum`` is the profile's op sum, and ``fitted`` is the op sum after the stages of the *other* cuts have corrected the
profile. The last lines give median and worst of the absolute errors.
"""

import argparse
import json
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from autosplit.backends.base import get_backend
from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import usable_cores
from autosplit.measuring import Store, measure
from autosplit.measuring.measuring_worker import MeasuringWorker, Workers
from autosplit.measuring.stage_timer import INPUTS, PassBudget
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.programs import computed_values
from autosplit.tracing.splitting import StageProgram, save_stage, split
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Samples, Setting
from benchmarks.make_profiles import MODELS

CUTS = (1 / 3, 1 / 2, 2 / 3)


@dataclass(frozen=True)
class Row:
    """One measured stage and the errors of its predictions, as shares of the truth."""

    model: str
    backend: str
    cut: float
    stage: int
    num_ops: int
    truth_s: float
    spread: float
    share: float
    sum: float
    fitted: float


def cut_ops(profile: Profile, device: str, backend: str, share: float) -> list[list[str]]:
    """The ops in two: the first take ``share`` of the time."""
    names = list(profile.signatures)
    total, passed = profile.whole_s(device, backend), 0.0
    for position, name in enumerate(names):
        passed += profile.op_s(name, device, backend)
        if passed >= share * total:
            return [names[: position + 1], names[position + 1 :]]
    return [names[:-1], names[-1:]]


def time_stages(
    traced: Traced, machine: Machine, backend: str, cuts: list[list[list[str]]], rounds: int, seconds: float
) -> list[list[Samples]]:
    """For each cut the passes of its stages, each on its device, both at once."""
    found: list[list[list[float]]] = [[[] for _ in stages] for stages in cuts]
    devices = [device.name for device in machine.devices]
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="autosplit-")))
        pools: list[Workers] = []
        for number, stages in enumerate(cuts):
            pools.append(stack.enter_context(Workers(machine.devices)))
            folders = [_saved(program, traced, backend, root / f"{number}-{program.name}") for program in split(traced, stages)]
            places = {name: (folder, backend, 1) for name, folder in zip(devices, folders, strict=True)}
            pools[-1].call(MeasuringWorker.prepare, places)
        for _ in range(rounds):
            for passes, pool in zip(found, pools, strict=True):
                budget = PassBudget(seconds, least=3, most=10_000)
                answers = pool.call(MeasuringWorker.time, dict.fromkeys(devices, (budget,)))
                for samples, name in zip(passes, devices, strict=True):
                    samples.extend(answers[name].whole_s)
    return [[Samples(tuple(samples)) for samples in passes] for passes in found]


def _saved(program: StageProgram, traced: Traced, backend: str, folder: Path) -> Path:
    save_stage(program, folder)
    get_backend(backend).prepare(program, folder)
    values = computed_values(traced.program, traced.example_inputs, {spec.name for spec in program.inputs})
    torch.save([values[spec.name] for spec in program.inputs], folder / INPUTS)
    return folder


def judge(name: str, traced: Traced, machine: Machine, backend: str, profile: Profile, rounds: int, seconds: float) -> list[Row]:
    """The rows of one model and backend."""
    devices = [device.name for device in machine.devices]
    cuts = [cut_ops(profile, devices[0], backend, share) for share in CUTS]
    truths = time_stages(traced, machine, backend, cuts, rounds, seconds)
    rows = []
    for number, (share, stages) in enumerate(zip(CUTS, cuts, strict=True)):
        fitted = profile
        for other in range(len(cuts)):
            if other != number:
                for ops, device, samples in zip(cuts[other], devices, truths[other], strict=True):
                    fitted = fitted.with_stage(ops, Setting(device, backend, 1), samples, [d for d in devices if d != device])
        for stage, (ops, device, truth) in enumerate(zip(stages, devices, truths[number], strict=True)):
            setting = profile.setting(device, backend)
            raw = sum(profile.op_samples(op, setting).median_s for op in ops)
            everything = sum(profile.op_samples(op, setting).median_s for op in profile.signatures)
            alone = raw / everything * profile.whole_s(device, backend, busy=False)
            predictions = (alone, profile.stage_s(ops, device, backend), fitted.stage_s(ops, device, backend))
            errors = [predicted / truth.median_s - 1 for predicted in predictions]
            rows.append(Row(name, backend, share, stage, len(ops), truth.median_s, truth.spread, *errors))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--backends", default="eager,onnxruntime")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--profiles", type=Path, help="a store to take profiles from; by default all is measured now")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    machine = machine_for(",".join(f"cpu:{core}" for core in usable_cores()[:2]))
    rows: list[Row] = []
    columns = ("cut", 4), ("stage", 5), ("ops", 4), ("truth ms", 9), ("spread", 7), ("share", 7), ("sum", 7), ("fitted", 7)
    print(f"{'model':<10} {'backend':<12}", *(f"{title:>{width}}" for title, width in columns))
    for name in arguments.models:
        traced = trace(load_model(MODELS[name]))
        backends = arguments.backends.split(",")
        start = time.perf_counter()
        store = Store(arguments.profiles) if arguments.profiles else None
        profile = measure(traced, machine, backends, store=store, links=False)
        print(
            f"# {name}: profile of {len(traced.graph.ops)} ops in {time.perf_counter() - start:.1f} s",
            *profile.notes,
            sep="\n#   ",
        )
        for backend in backends:
            for row in judge(name, traced, machine, backend, profile, arguments.rounds, arguments.seconds):
                rows.append(row)
                print(
                    f"{row.model:<10} {row.backend:<12} {row.cut:4.2f} {row.stage:5d} {row.num_ops:4d} {row.truth_s * 1e3:9.3f} "
                    f"{row.spread:7.1%} {row.share:+7.1%} {row.sum:+7.1%} {row.fitted:+7.1%}",
                    flush=True,
                )
    for backend in dict.fromkeys(row.backend for row in rows):
        for what in ("share", "sum", "fitted"):
            errors = [abs(getattr(row, what)) for row in rows if row.backend == backend]
            print(
                f"{backend:<12} {what:<7} median {statistics.median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} stages"
            )
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

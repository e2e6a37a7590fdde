"""Memory of stages, predicted beside measured, and caps beside memory cgroups.

    python -m benchmarks.stage_memory [--models NAME,...] [--batch 1 8] [--backends eager,onnxruntime,openvino]
    python -m benchmarks.stage_memory --cgroup [--models unet] [--backends openvino]

Each model is cut into two stages with equal numbers of ops, on two cores. *Counted* is weights and values at their peak.
*Predicted* is what a first run of the plan measured, as a search with caps keeps it; *measured* is another run, of new processes
with more requests: six times as many, or as many as half a minute holds. All are without what the bare worker had. Rows are kept
in benchmarks/stage_memory.json, and benchmarks/stage_memory.md is made of the newest ones.

``--cgroup`` asks for a plan at caps around what is predicted, and runs it with its workers in a memory cgroup of the size of the
cap (version 1 of cgroups, as root): at 5 % below it must be refused with the numbers, at 5 % above it must run.
"""

import argparse
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from autosplit import api
from autosplit.backends.workspace import Workspace
from autosplit.deploying.footprints import NUM_WINDOWS, Footprints
from autosplit.deploying.networks import deploy
from autosplit.devices.discovering import machine_for
from autosplit.devices.limits import usable_cores
from autosplit.errors import AutosplitError
from autosplit.memory.stages import stage_memories
from autosplit.serving.hostmanager import HostManager
from autosplit.tables import bytes_text
from autosplit.tracing.aliasing import values_of
from autosplit.tracing.capturing import Traced
from autosplit.tracing.verifying import distinct_inputs
from autosplit.values.machine import Machine
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.profile import Profile
from benchmarks.models import MODELS

RESULTS, TABLE = Path("benchmarks/stage_memory.json"), Path("benchmarks/stage_memory.md")
NAMES = ("unet", "mlp1024", "mobilenet", "resnet50", "vit", "bert", "gpt2", "convnext")
BACKENDS = ("eager", "onnxruntime", "openvino")
MEASURED_S = 30.0
"""Seconds after which the second run ends, if it has had more requests than the first."""

CGROUPS = Path("/sys/fs/cgroup/memory")

HEAD = """# Memory of stages

`python -m benchmarks.stage_memory` runs two stages of each model on two cores of an AMD EPYC with AVX-512. *Counted* is weights
and values at their peak. *Predicted* was measured in a first run. *Measured* is from a second run, in new processes and with more
requests. Rings, and the memory of a worker without a stage, are not included.

The memory of a worker itself (`base_bytes` in `stage_memory.json`) held the weights of its stage a second time if their file had
been saved a moment before, which was mended on 2026-11-26. `--models mlp1024 --batch 1 --backends eager`, whose stages have
48 MiB of weights each, gave 59.0 MiB for both workers before, and gives 10.6 and 10.8 MiB; the stages are predicted at
48.3 MiB by both.

One of 16 measurements of U-Net's first stage on OpenVINO at batch 8 gave 142 MiB, the others 125 to 128; it is not known why.

"""


def halves(traced: Traced, backend: str, names: Sequence[str]) -> Plan:
    """Two stages with equal numbers of ops."""
    ops = [op.name for op in traced.graph.ops]
    parts = (ops[: len(ops) // 2], ops[len(ops) // 2 :])
    stages = tuple(Stage(f"stage{k}", tuple(part), (names[k],), backend) for k, part in enumerate(parts))
    return Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN, microbatch=traced.source.batch)


def again(traced: Traced, plan: Plan, machine: Machine, workspace: Workspace) -> list[int]:
    """What each stage holds in new processes that answer many requests."""
    with HostManager() as host:
        engine = deploy(host, "again", traced, plan, machine, workspace)
        work = distinct_inputs(traced.example_inputs, 4)
        end = time.monotonic() + MEASURED_S
        for number in range(6 * NUM_WINDOWS):
            if number <= NUM_WINDOWS or time.monotonic() < end:
                engine.run_many([work[k % len(work)] for k in range(engine.max_in_flight)])
        return [stats.held_bytes for stats in engine.stats().stages]


def rows_of(name: str, batch: int, backends: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows of a model: one a stage and backend."""
    machine = machine_for(",".join(f"cpu:{core}" for core in usable_cores()[:2]))
    names = [device.name for device in machine.devices]
    traced = api.trace(MODELS[name], batch=batch)
    with Workspace() as workspace:
        footprints = Footprints(machine, workspace)
        for backend in backends:
            plan = halves(traced, backend, names)
            footprints.measure(traced, plan)
            measured = again(traced, plan, machine, workspace)
            counted = stage_memories(traced.graph, plan, values_of(traced))
            for stage, one, held in zip(plan.stages, counted, measured, strict=True):
                found = footprints.footprint(traced, plan, stage)
                assert found is not None
                yield {
                    "model": name,
                    "batch": batch,
                    "backend": backend,
                    "stage": stage.name,
                    "counted_bytes": one.held_bytes,
                    "predicted_bytes": found.held_bytes,
                    "measured_bytes": held,
                    "base_bytes": found.base_bytes,
                }


def write_table(rows: Sequence[dict[str, Any]]) -> None:
    """Write the newest row of each stage."""
    newest = {(row["model"], row["batch"], row["backend"], row["stage"]): row for row in rows}
    errors = [abs(row["predicted_bytes"] / row["measured_bytes"] - 1) for row in newest.values()]
    lines = [
        f"{len(errors)} stages: predicted is off by {median(errors):.2%} in the median and by {max(errors):.1%} at worst; "
        f"{sum(error <= 0.1 for error in errors)} are within 10 %.",
        "",
    ]
    lines += ["| model | batch | backend | stage | counted | predicted | measured | predicted by measured |", "|" + "---|" * 8]
    for row in sorted(newest.values(), key=lambda row: (NAMES.index(row["model"]), row["batch"], BACKENDS.index(row["backend"]))):
        sizes = " | ".join(bytes_text(row[f"{what}_bytes"]) for what in ("counted", "predicted", "measured"))
        ratio = row["predicted_bytes"] / row["measured_bytes"]
        lines.append(f"| {row['model']} | {row['batch']} | {row['backend']} | {row['stage'][-1]} | {sizes} | {ratio:.3f} |")
    TABLE.write_text(HEAD + "\n".join(lines) + "\n", encoding="utf-8")


@contextmanager
def cgroup(num_bytes: int) -> Iterator[Path]:
    """A memory cgroup inside that of this process, with this limit."""
    own = next(line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    folder = CGROUPS / own.strip("/") / f"autosplit-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(num_bytes))
        yield folder
    finally:
        folder.rmdir()


def under_caps(name: str, backend: str) -> None:
    """Ask for plans at caps around what is predicted, and run each that is found in a cgroup of the size of its cap."""
    free = machine_for(f"cpu:{usable_cores()[0]}")
    [device] = free.devices
    traced = api.trace(MODELS[name])
    ops = tuple(op.name for op in traced.graph.ops)
    plan = Plan(traced.source, traced.graph.hash, "", (Stage("stage0", ops, (device.name,), backend),), UNKNOWN)
    profile = Profile.given(traced.graph, {(op, device.name): 1e-3 for op in ops}, backend)
    with Workspace() as workspace:
        measured = Footprints(free, workspace).account(traced, profile).measured(plan)
        [memory] = [stage.memory for stage in measured.stages]
        assert memory is not None
        total = memory.weight_bytes + memory.beside_bytes
        print(f"{name} on {backend}: predicted {bytes_text(total)}: {memory}", flush=True)
        for share in (0.95, 1.05):
            cap = int(total * share)
            machine = free.with_memory({device.name: cap})
            with cgroup(cap) as folder:
                [server] = [one for one in psutil.Process().children() if "autosplit.devices.forking" in " ".join(one.cmdline())]
                (folder / "cgroup.procs").write_text(str(server.pid))
                try:
                    with HostManager(machine) as host:
                        engine = deploy(host, name, traced, measured, machine, workspace)
                        engine.run_many([traced.example_inputs] * 50)
                        used = int((folder / "memory.max_usage_in_bytes").read_text())
                        failed = int((folder / "memory.failcnt").read_text())
                        print(f"cap {share:.0%}, {bytes_text(cap)}: ran, {bytes_text(used)} used, {failed} allocations refused")
                except AutosplitError as failure:
                    print(f"cap {share:.0%}, {bytes_text(cap)}: {type(failure).__name__}: {failure}")
                finally:
                    (folder.parent / "cgroup.procs").write_text(str(server.pid))


def main() -> None:
    """Measure what is asked for, and write the table of all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(NAMES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--cgroup", action="store_true")
    given = parser.parse_args()
    if given.cgroup:
        for name in given.models.split(","):
            for backend in given.backends.split(","):
                under_caps(name, backend)
        return
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for batch in given.batch:
        for name in given.models.split(","):
            for row in rows_of(name, batch, given.backends.split(",")):
                rows.append(row)
                print(row, flush=True)
            RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
            write_table(rows)


if __name__ == "__main__":
    main()

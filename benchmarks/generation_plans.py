"""Plans of a generator beside each other: two stages, replicas, equal layers, one device; forecasts beside measurements.

    python -m benchmarks.generation_plans [--models 25M] [--backend onnxruntime] [--rounds 3] [--parts equal-16,equal-8,unequal]
    python -m benchmarks.generation_plans --write-table

``equal-16`` and ``equal-8`` run so many sequences on two cores, with prompts that take about as long as the answers.
``decode-16`` and ``decode-8`` have short prompts and long answers. ``unequal`` runs 16 while workers on the second core stand
still for half of the time. Each part measures the model as its cores are then. Rounds interleave: in each, every plan gets the
same sequences at once. Parts are kept in benchmarks/generation_plans.json as they end.
"""

import argparse
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

import autosplit
from autosplit.devices.discovering import as_machine, describe
from autosplit.devices.limits import affinity
from autosplit.files import write_atomic
from autosplit.generating.bounds import state_bytes
from autosplit.generating.forecast import devices_of, forecast, replicas_of, stage_seconds
from autosplit.generating.generators import Generator
from autosplit.generating.phases import PhaseProfile
from autosplit.generating.steps import StepFamily
from autosplit.generating.trials import asked_at_once, random_prompts, stats_of
from autosplit.memory.stages import count
from autosplit.planning.baselines import ONE_DEVICE, REPLICAS, baseline_plan
from autosplit.planning.givensplits import read_given
from autosplit.planning.moduleunits import layer_lists
from autosplit.reports.outcomes import TokenRates
from autosplit.running.engine import Engine
from autosplit.tracing.aliasing import values_of
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan
from benchmarks.generation import MODELS
from benchmarks.pages import table

RESULTS, TABLE = Path("benchmarks/generation_plans.json"), Path("benchmarks/generation_plans.md")
LENGTH = 256


class Part(NamedTuple):
    """The sequences of a part, and the tokens of each."""

    num_sequences: int
    prompt: int
    new: int


PARTS = {
    "equal-16": Part(16, 128, 64),
    "equal-8": Part(8, 128, 64),
    "decode-16": Part(16, 16, 128),
    "decode-8": Part(8, 16, 128),
    "unequal": Part(16, 128, 64),
}

CHOSEN, TWO_STAGES, EQUAL_LAYERS = "searched", "two stages", "equal layers"
PLANNER_S = 5.0
GOALS = (
    ("equal-16", TWO_STAGES, REPLICAS, 0.95),
    ("decode-16", TWO_STAGES, REPLICAS, 0.95),
    ("equal-8", TWO_STAGES, EQUAL_LAYERS, 1.2),
    ("equal-16", TWO_STAGES, EQUAL_LAYERS, 1.2),
    ("decode-8", TWO_STAGES, EQUAL_LAYERS, 1.2),
    ("decode-16", TWO_STAGES, EQUAL_LAYERS, 1.2),
    ("unequal", CHOSEN, EQUAL_LAYERS, 1.3),
)
"""A part, two plans, and the least ratio of their tokens per second."""

TURN_S, LOOK_S = 0.002, 0.2
"""Seconds for which workers on the slow core run, and then stand still, and seconds between two looks for such workers."""

MOST_WEIGHTS = 0.55
"""Most weights of one of two stages, as a share of those of a replica."""


def slow(core: int, parent: int) -> None:
    """Let the workers of a process that have a core for themselves stand still for half of the time.

    Another thread looks for them: while this one looked, they all ran.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    workers = list[int]()

    def look() -> None:
        while True:
            workers[:] = workers_on(core, parent)
            time.sleep(LOOK_S)

    def tell(number: int) -> None:
        for pid in list(workers):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    threading.Thread(target=look, daemon=True).start()
    try:
        while True:
            for number in (signal.SIGSTOP, signal.SIGCONT):
                tell(number)
                time.sleep(TURN_S)
    finally:
        tell(signal.SIGCONT)


def workers_on(core: int, parent: int) -> list[int]:
    """The processes below another one that run on this core alone."""
    found = list[int]()
    for one in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += [one.pid] if one.cpu_affinity() == [core] else []
    return found


@contextmanager
def slowed(core: int) -> Iterator[None]:
    """The core at half of its speed, for workers."""
    process = multiprocessing.get_context("spawn").Process(target=slow, args=(core, os.getpid()), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def plans_of(
    family: StepFamily, profile: PhaseProfile, machine: Machine, backend: str, setup: autosplit.Setup
) -> dict[str, Plan]:
    """The plans of a part by their names."""
    budget = autosplit.Budget(search_s=0, planner_s=PLANNER_S)

    def searched(**demands: Any) -> Plan:
        return autosplit.search(family, profile, machine, autosplit.Constraints(**demands), setup=setup, budget=budget).plan

    found = {CHOSEN: searched(), TWO_STAGES: searched(num_stages=2, max_replicas=1)}
    graph, [num_layers] = family.graph, layer_lists(family.graph).values()
    everything, like = tuple(op.name for op in graph.ops), found[TWO_STAGES]
    equal = read_given(f"{num_layers - num_layers // 2},{num_layers // 2}", graph, machine)
    placed = {
        EQUAL_LAYERS: [(ops, [machine[device]]) for ops, device in zip(equal.stages, equal.devices, strict=True)],
        REPLICAS: [(everything, machine.devices)],
        ONE_DEVICE: [(everything, machine.devices[:1])],
    }
    for name, stages in placed.items():
        plan = baseline_plan(graph, like.source, name, backend, stages)
        found[name] = replace(plan, shapes=like.shapes, sequences=like.sequences)
    return {name: count(graph, plan, values_of(family.variants[0], family.variants[1:])) for name, plan in found.items()}


def run_part(model: str, part: str, backend: str, num_rounds: int) -> dict[str, Any]:
    """Measure, plan and run the plans of a part."""
    cores = affinity()[:2]
    machine = as_machine([f"cpu:{core}" for core in cores])
    with ExitStack() as stack:
        if part == "unequal":
            stack.enter_context(slowed(cores[1]))
        num_sequences, prompt, new = PARTS[part]
        asked = f"prompt={prompt},new={new},max_sequences={num_sequences},max_length={LENGTH}"
        family = autosplit.trace(MODELS[model], generate=asked)
        setup = autosplit.Setup(backends=backend, progress=False, remeasure=True)
        profile = autosplit.measure(family, machine, setup=setup)
        assert isinstance(family, StepFamily) and isinstance(profile, PhaseProfile)
        states = state_bytes(family)
        ways, opened, found = {}, {}, dict[str, dict[str, Any]]()
        for name, plan in plans_of(family, profile, machine, backend, setup).items():
            told = forecast(plan, family, machine, profile)
            weights = [
                family.graph.stage_bytes(one.ops) - sum(states[op] for op in one.ops) for one in plan.stages for _ in one.devices
            ]
            single, around = replicas_of(plan)[0], machine.only(devices_of(plan))
            busy_s, _ = stage_seconds(single, family, around, profile)
            group = family.sequences.largest_group(len(around.devices))
            found[name] = {
                "decoding_s": list(busy_s[group]),
                "stages": [[list(one.devices), len(one.ops)] for one in plan.stages],
                "weight_bytes": weights,
                "predicted_bytes": [one.memory.held_bytes for one in plan.stages for _ in one.devices if one.memory is not None],
                "predicted": None if told is None else asdict(told),
                "rounds": [],
            }
            if plan.hash not in opened:
                opened[plan.hash] = stack.enter_context(autosplit.open_generator(family, plan, machine))
            ways[name] = opened[plan.hash]
            print(f"{model}, {part}: {name}: {found[name]}", flush=True)
        for generator in opened.values():
            generator.generate(random_prompts(family, 0), max_new_tokens=4)
        for number in range(num_rounds):
            for name in list(ways)[:: -1 if number % 2 else 1]:
                prompts, before_s = random_prompts(family, number + 1), processor_s(ways[name])
                ways[name].stats(clear=True)
                begun_s = time.perf_counter()
                times_s = asked_at_once(ways[name], new, prompts)
                elapsed_s = time.perf_counter() - begun_s
                taken_s = [after - before for after, before in zip(processor_s(ways[name]), before_s, strict=True)]
                work = {"elapsed_s": elapsed_s, "num_steps": ways[name].stats().num_steps, "processor_s": taken_s}
                found[name]["rounds"].append(asdict(TokenRates.of(times_s, elapsed_s)) | work)
            print(f"{model}, {part}: round {number + 1} of {num_rounds}", flush=True)
        for name, generator in ways.items():
            found[name]["held_bytes"] = [one.held_bytes for one in stats_of(generator).stages]
    return {"cpu": describe().facts["cpu"], "backend": backend, "host_s": profile.host_s, "plans": found}


def processor_s(generator: Generator) -> list[float]:
    """The processor time so far of the host, and of each worker."""
    engines = [one for one in generator.pipelines if isinstance(one, Engine)]
    workers = [psutil.Process(pid).cpu_times() for one in engines for pid in one.pids]
    return [time.process_time(), *(one.user + one.system for one in workers)]


def step_text(plan: Mapping[str, Any]) -> str:
    """The milliseconds of a step: by the clock, of processor time at the host and in each worker, and predicted for decoding."""
    rounds = [one for one in plan["rounds"] if "num_steps" in one]  # not in rounds that were kept before steps were counted
    rows = [[1e3 * seconds / one["num_steps"] for seconds in (one["elapsed_s"], *one["processor_s"])] for one in rounds]
    clock, *processor = [f"{median(column):.2f}" for column in zip(*rows, strict=True)] or [""]
    told = " + ".join(f"{1e3 * seconds:.2f}" for seconds in plan.get("decoding_s", ()))  # nor before that was kept
    return f"{clock}: {' + '.join(processor)}{f' (decoding: {told})' * bool(told)}" if processor else ""


def middle(plan: Mapping[str, Any], figure: str) -> float:
    """The median of a figure over the rounds."""
    return median(one[figure] for one in plan["rounds"])


def rows_of(plans: Mapping[str, Any]) -> list[list[str]]:
    """A row for each plan of a part."""
    rows = []
    for name, plan in plans.items():
        rates = [one["tokens_per_s"] for one in plan["rounds"]]
        cells = [name, " ".join(f"{'+'.join(devices)}: {num_ops}" for devices, num_ops in plan["stages"])]
        for figure, factor in (("tokens_per_s", 1.0), ("first_token_s", 1e3), ("per_token_s", 1e3)):
            told, found = plan["predicted"][figure], middle(plan, figure)
            cells.append(f"{factor * found:.0f} / {factor * told:.0f} ({told / found - 1:+.0%})")
        cells.append(step_text(plan))
        cells.append(f"{(max(rates) - min(rates)) / median(rates):.0%}")
        cells.append(" + ".join(f"{one / 1e6:.0f}" for one in plan["weight_bytes"]))
        held = zip(plan["held_bytes"], plan["predicted_bytes"], strict=True)
        cells.append(" + ".join(f"{one / 1e6:.0f} / {told / 1e6:.0f}" for one, told in held))
        rows.append(cells)
    return rows


def ratio(plans: Mapping[str, Any], one: str, other: str) -> float:
    """The median over rounds of the tokens per second of a plan over those of another one."""
    pairs = zip(plans[one]["rounds"], plans[other]["rounds"], strict=True)
    return median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)


def page(kept: Mapping[str, Any]) -> str:
    """The page of all models and parts."""
    lines = ["# Plans of a generator", "", "Written by `python -m benchmarks.generation_plans`; rounds are in its JSON file.", ""]
    lines += [
        "As many sequences at once as the part says, in interleaved rounds. Rates and times are medians of the rounds, measured "
        "/ predicted (error). Memory is that of each worker, measured / predicted, without its process and rings. `unequal`: "
        "workers on the second core stand still for half of the time. A step by the clock is followed by the processor time that "
        "the host and each worker take for it, in the mean of both phases; of two replicas each step runs on one. In brackets "
        "stands what a step of decoding was predicted to take in each stage, beside busy devices and without the host."
    ]
    titles = ["plan", "ops on cores", "tokens/s", "first token, ms", "time per token, ms", "step, ms: host + workers"]
    titles += ["spread", "weights, MB", "memory, MB"]
    for model, parts in kept.items():
        errors = {figure: errors_of(parts.values(), figure) for figure in ("tokens_per_s", "first_token_s", "per_token_s")}
        lines += ["", f"## {model}"]
        for part, entry in parts.items():
            num_sequences, prompt, new = PARTS[part]
            lines += ["", f"### {model}, {part}", ""]
            lines += [
                f"{num_sequences} prompts of {prompt} tokens, and answers of {new}, on {entry['backend']}, {entry['cpu']}. "
                f"A step takes {1e3 * entry['host_s']:.2f} ms at the host."
            ]
            lines += ["", table(titles, rows_of(entry["plans"]))]
        lines += ["", f"### {model}, goals", ""]
        for part, one, other, goal in GOALS:
            if part in parts:
                lines.append(f"- {part}: {one} over {other} {ratio(parts[part]['plans'], one, other):.2f} (goal {goal})")
        for part, entry in parts.items():
            stages, [whole] = (entry["plans"][name]["weight_bytes"] for name in (TWO_STAGES, ONE_DEVICE))
            shares = " and ".join(f"{one / whole:.2f}" for one in stages)
            lines.append(f"- {part}: {TWO_STAGES} hold {shares} of a replica's weights (goal {MOST_WEIGHTS} at most)")
        for name, found in errors.items():
            lines.append(f"- predicted {name}: off by {median(found):.0%} in the median, {max(found):.0%} at most (goal 5 %)")
    return "\n".join(lines).rstrip() + "\n"


def errors_of(parts: Any, figure: str) -> Sequence[float]:
    """The errors of the forecasts of all plans, as shares."""
    plans = [plan for entry in parts for plan in entry["plans"].values()]
    return [abs(plan["predicted"][figure] / middle(plan, figure) - 1) for plan in plans]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="25M", help=f"names with commas between, of {', '.join(MODELS)}")
    parser.add_argument("--backend", default="onnxruntime")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}; others stay as they are kept")
    parser.add_argument("--write-table", action="store_true", help="only write the page anew")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    for name in [] if given.write_table else given.models.split(","):
        for part in given.parts.split(","):
            kept.setdefault(name, {})[part] = run_part(name, part, given.backend, given.rounds)
            write_atomic(RESULTS, json.dumps(kept, indent=1) + "\n")
    TABLE.write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()

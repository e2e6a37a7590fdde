"""The table of the numbers in the planner's code: ``python -m benchmarks.constants [part of a name ...]``.

A number is halved and doubled, and the problems of its folder are solved anew within equal processor time. The table,
``docs/decisions/planner-constants.md``, says by how much the worst plan and the worst bound change. Numbers that nobody tunes
have a kind instead: precision of the processor's numbers, memory, the clock, limits on files, words in messages.
"""

import argparse
import ast
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "decisions" / "planner-constants.md"
FOLDERS = ("costs", "planners", "planning")

GIVEN = {
    "precision of float64 and of 64-bit integers": """
        costs.cost.TOLERANCE costs.cost.CLOSED costs.workloads.COST_TOLERANCE costs.workloads.SMALLEST costs.workloads.LARGEST
        costs.workloads.MAX_ID planners.loads.ROUNDING planners.incumbent.ROUNDING planners.incumbent.CLOSE
        planners.cpsat.solver.SCALE planners.cpsat.solver.MOST_STEPS planners.cpsat.slots.MEMORY_STEPS
        planners.cpsat.sharing.STEPS planners.cpsat.sharing.MOST_STEPS planners.noncontiguous.sweeps.MAX_OPEN
        planning.plans.CLOSE
    """,
    "follows from two buffers": "costs.streaming.NUM_PASSES",
    "memory": """
        planners.contiguous.downsets.MAX_SETS planners.contiguous.downsets.MAX_SET_BYTES
        planners.contiguous.downsets.MAX_ENTRIES
        planners.delays.MOST_CELLS planners.latency.cut_vertices.MOST_ASSIGNMENTS
        planners.noncontiguous.column_generation.TABLE_CELLS planners.noncontiguous.resplitting.MAX_CELLS
    """,
    "seconds of this machine (two cores of an AMD EPYC)": """
        planners.clock.LOOK_S planners.clock.CELL_S planners.clock.LATEST_S planners.contiguous.linear.STEPS_OF_A_SLICE
        planners.contiguous.downsets.SLICE_STEPS planners.latency.order_annealing.MOVE_S planners.cpsat.solver.UNIT_S
        planners.cpsat.solver.LEAST_WORK_S planners.cpsat.solver.TERMS_PER_SECOND planners.contiguous.chains.SECONDS_TO_CONTRACT
        planners.contiguous.chains.SECONDS_FOR_SOONEST planners.latency.scheduling.SECONDS_TO_VERIFY
    """,
    "limit on a file": "costs.workloads.MAX_WORKLOAD_BYTES costs.workloads.MAX_DEVICES costs.workloads.MAX_TIMES",
    "words in a message": """
        costs.workloads.MAX_SHOWN_CYCLE planners.infeasible.MOST_NAMED planning.splitjudging.SHOWN planning.splitjudging.LEVEL
        planning.explaining.WORTH planning.plans.MAX_LISTED
    """,
    "default of a user's option": "planning.question.TIME_LIMIT_S",
    "measured where models run; its comment in the code has the figure": """
        planning.baselines.UNCERTAIN planning.baselines.QUICK_S planning.baselines.UNCERTAIN_QUICK planning.backends.LEAST_GAIN
        planners.cpsat.sharing.TIED planning.moduleunits.LIST_SHARE
    """,
    "number of another tool": "planning.peers.BUFFER",
    "measured; the record on the planner's methods, or the comment in the code, has the figures": """
        planners.bounds.MOST_PLANES planners.clock.SMALL_PLACES planners.clock.LEAST_S
        planners.contiguous.proving.STEP planners.contiguous.proving.NEAR planners.contiguous.proving.FAR
        planners.contiguous.proving.QUICK_S planners.contiguous.proving.CLOSE planners.cpsat.integer_program.FEW_ITEMS
        planners.delays.BYTE_STEPS planners.latency.cut_vertices.MOST_BETWEEN planners.latency.order_annealing.NUM_WALKERS
        planners.latency.segments.MOST_INSIDE planners.noncontiguous.column_generation.BYTE_LEVELS
        planners.noncontiguous.column_generation.GRAINS planners.noncontiguous.local_search.ITEMS_A_DEVICE
        planners.noncontiguous.local_search.MOST_MOVED
    """,
    "limit on the size of a table or a model, reached by none of the benchmarks": """
        planners.device_usage.MAX_STATES planners.device_usage.MAX_MOVES planners.instance.MANY_ITEMS
        planners.cpsat.stage_model.MOST_ORDERED planners.latency.segments.MOST_OPS planners.contiguous.linear.FIRST_LOOK_S
    """,
    "limit on the number of questions to the solvers": """
        planning.backends.MAX_CHOICES planning.backends.MAX_PROVING planning.caps.MAX_QUESTIONS planning.plans.NUM_STREAMED
        planning.plans.LEAST_S planning.plans.SMALL_SHARE planning.recutting.MOST_MOVED planning.recutting.MOST_TRIED
        planning.sharing.MAX_SUBSETS planners.pareto.NUM_LIMITS planners.cpsat.integer_program.LONGEST_REFUTATION_S
    """,
    "compiled into machine code, so not varied here; its comment in the code has the reason": """
        planners.contiguous.pruning.MOST_READY planners.latency.order_annealing.LONGEST_PATH
    """,
}
"""Kind to the numbers that are not tuned, or not by the problems below."""

LABELS = {"HOST", "BOTH", "FIRST", "SECOND", "ENDS", "NOWHERE"}
"""Numbers that are names of something."""


class Constant(NamedTuple):
    """A number or a row of numbers at the top of a module, and the docstring below it."""

    value: str
    words: str


@cache
def constants() -> dict[str, Constant]:
    """Every number by module and name; what stands in one assignment has one docstring."""
    found = {}
    for path in (path for folder in FOLDERS for path in sorted((ROOT / "autosplit" / folder).rglob("*.py"))):
        module = ".".join(path.relative_to(ROOT / "autosplit").with_suffix("").parts)
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for statement, after in zip(body, [*body[1:], ast.Pass()], strict=True):
            if isinstance(statement, ast.Assign):
                words = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else ""
                for name, value in _numbers(statement):
                    found[f"{module}.{name}"] = Constant(value, " ".join(str(words).split()))
    return found


def _numbers(statement: ast.Assign) -> Iterator[tuple[str, str]]:
    """The names of an assignment in capitals, and their values, if these are numbers."""
    target, value = statement.targets[0], statement.value
    pairs: Iterator[Any] = iter([(target, value)])
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        pairs = zip(target.elts, value.elts, strict=True)
    for name, number in pairs:
        leaves = [leaf.value for leaf in ast.walk(number) if isinstance(leaf, ast.Constant)]
        plain = all(isinstance(leaf, (int, float)) and not isinstance(leaf, bool) for leaf in leaves)
        calls = any(isinstance(leaf, (ast.Call, ast.Lambda)) for leaf in ast.walk(number))
        if isinstance(name, ast.Name) and name.id.isupper() and name.id not in LABELS and leaves and plain and not calls:
            yield name.id, ast.unparse(number)


def kinds() -> dict[str, str]:
    """The kind of each number that is not tuned."""
    return {name: kind for kind, names in GIVEN.items() for name in names.split()}


def rows() -> dict[str, tuple[str, str]]:
    """The table as it is: name to value and what the value stands on."""
    found = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines() if TABLE.exists() else ():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) == 6 and cells[1].startswith("`"):
            found[cells[1].strip("`")] = cells[2].strip("`"), cells[4]
    return found


def written(measured: dict[str, str]) -> str:
    """The rows of the table: new measurements in place of old ones, which stay while the value does."""
    old, given, lines = rows(), kinds(), []
    for name, (value, words) in constants().items():
        before = old.get(name, ("", ""))
        stands_on = given.get(name) or measured.get(name) or (before[1] if before[0] == value else "")
        lines.append(f"| `{name}` | `{value}` | {words.partition('. ')[0].rstrip('.').replace('|', '/')} | {stands_on} |")
    return "\n".join(lines)


def save(measured: dict[str, str]) -> None:
    """Write the rows below the head of the table."""
    head = TABLE.read_text(encoding="utf-8").partition("\n|---")[0]
    TABLE.write_text(f"{head}\n|---|---|---|---|\n{written(measured)}\n", encoding="utf-8")


# The measurement. Its imports take seconds, and the test of the table needs none of them.


def problems(module: str) -> list[tuple[Any, Any, float]]:
    """(problem, demands, seconds of processor time) that show what a number of a module does."""
    from autosplit.costs.workloads import read_workload
    from autosplit.values.constraints import Demands
    from benchmarks.planner import WORKLOADS, capped, trained
    from benchmarks.scale_graphs import simple_graphs

    def file(name: str) -> Any:
        return read_workload(WORKLOADS / f"{name}.json")

    any_sets, latency = Demands(contiguous=False), Demands(objective="latency")
    if "noncontiguous" in module:
        found = [(file(name), any_sets, 0.6) for name in ("layer-inceptionv3_inference", "op-bert_l-6_inference")]
        return [*found, (capped("op-resnet50_inference", 0.325, 4), any_sets, 0.6)]
    if "latency" in module or "delays" in module:
        cases = [("layer-inceptionv3_inference", 0.6, 2), ("layer-resnet50_inference", 0.14375, 8)]
        return [(capped(*case), latency, 0.6) for case in [*cases, ("op-bert_l-6_inference", 0.325, 4)]]
    if "contiguous" in module or "bounds" in module or "items" in module:
        found = [(problem, Demands(), 0.6) for problem in list(simple_graphs())[::6]]
        return [*found, (trained("layer-inceptionv3_inference", 7), Demands(), 0.6)]
    return _random_problems()


def _random_problems() -> list[tuple[Any, Any, float]]:
    """Small and middle-sized problems under every kind of demand."""
    from autosplit.values.constraints import Demands

    sys.path.insert(0, str(ROOT / "tests"))
    from problems import random_problem

    asks = ({}, {"contiguous": False}, {"objective": "latency"}, {"reuse": True}, {"max_latency_s": 14.0})
    plain = {"caps": False, "unsupported": False, "loose_order": False, "pooled": False}
    found = [
        (random_problem(seed, num_ops=8 + seed, num_devices=2 + seed % 2, **plain), Demands(**asks[seed % len(asks)]), 0.2)
        for seed in range(5)
    ]
    return [*found, (random_problem(50, num_ops=50, num_devices=4, **plain), Demands(contiguous=False), 0.6)]


def results(cases: Sequence[tuple[Any, Any, float]]) -> list[tuple[float, float]]:
    """Objective and bound of each case; infinite where no plan is found."""
    from autosplit.errors import InfeasibleError
    from autosplit.planners.portfolio import solve

    found = []
    for problem, demands, limit_s in cases:
        try:
            solution = solve(problem, demands, time_limit_s=limit_s, name_conflict=False)
            found.append((solution.objective_s, solution.bound_s))
        except InfeasibleError:
            found.append((inf, 0.0))
    return found


def change(before: Sequence[tuple[float, float]], after: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The worst change of a plan and of a bound, as shares: how much dearer, and how much lower."""
    pairs = [(one, other) for one, other in zip(before, after, strict=True) if one[0] < inf and one[1] > 0]
    return max(b[0] / a[0] - 1 for a, b in pairs), max(1 - b[1] / a[1] for a, b in pairs)


def varied(name: str, factor: float, solve_all: Callable[[], Any]) -> Any:
    """What ``solve_all`` gives while a number is multiplied, in every module that imported it."""
    module, _, short = name.rpartition(".")
    value = vars(sys.modules[f"autosplit.{module}"])[short]
    planners = [one for name, one in list(sys.modules.items()) if name.startswith("autosplit.planners")]
    places = [one for one in planners if vars(one).get(short) is value]
    for place in places:
        vars(place)[short] = scaled(value, factor)
    try:
        return solve_all()
    finally:
        for place in places:
            vars(place)[short] = value


def scaled(value: Any, factor: float) -> Any:
    """A number times a factor, whole and at least 1 where it was whole; of a row, each number."""
    if isinstance(value, tuple):
        return tuple(scaled(one, factor) for one in value)
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor


def said(changes: Sequence[tuple[float, float]], noise: tuple[float, float]) -> str:
    """The cell of the table."""
    parts = []
    for factor, (plan, bound) in zip(("half", "double"), changes, strict=True):
        parts.append(f"{factor}: plans {100 * plan:+.2f} %, bounds {100 * -bound:+.2f} %")
    return f"{'; '.join(parts)} (equal runs: {100 * noise[0]:.2f} and {100 * noise[1]:.2f} %)"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of the names of the numbers to measure anew")
    parser.add_argument("--rest", action="store_true", help="measure every number that has no measurement at its present value")
    options = parser.parse_args(arguments)
    given, old = kinds(), rows()
    tuned = [name for name in constants() if name not in given]
    chosen = [name for name in tuned if any(part in name for part in options.names)]
    if options.rest:
        chosen += [name for name in tuned if old.get(name, ("", ""))[0] != constants()[name].value or not old[name][1]]
    measured: dict[str, str] = {}
    if chosen:
        from autosplit.planners import clock

        clock.monotonic = time.process_time  # other work on the machine takes nothing from a limit
    begun: dict[str, tuple[Any, Any, tuple[float, float]]] = {}
    for name in chosen:
        cases = problems(name)
        key = str([(problem.name, demands) for problem, demands, _ in cases])
        if key not in begun:
            results(cases)  # compiles
            first, again = results(cases), results(cases)
            noise = tuple(max(abs(x), abs(y)) for x, y in zip(change(first, again), change(again, first), strict=True))
            begun[key] = cases, first, noise
        cases, first, noise = begun[key]
        changes = [change(first, varied(name, factor, lambda cases=cases: results(cases))) for factor in (0.5, 2.0)]
        measured[name] = said(changes, noise)
        save(measured)
        print(f"{name} = {constants()[name].value}: {measured[name]}", flush=True)
    save(measured)


if __name__ == "__main__":
    main()

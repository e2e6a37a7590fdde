"""The order of the modules: each may import only what stands above it, and heavy packages only where they belong."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "autosplit"

LAYERS = """
    errors arguments opening parsing files children scratch tables terminal progress
    values/       graph links machine samples machinefile measurements profile constraints explanation placement
    values/       plan planfile timeline dot
    memory/       lives arena packing offsets slots stages account
    costs/        wires problem graphproblem hostways cost pieces faults simulation schedule planschedule workloads
    planners/     jit objective incumbent dominance items bounds clusters delays row_annealing
    planners/     noncontiguous contiguous cpsat latency infeasible wired portfolio pareto warming
    planning/     moduleunits charging predicting baselines backends plans caps recutting explaining peers givensplits estimating
    planning/     splitjudging
    reports/      results outcomes judging runreport accuracy status health
    -- torch --
    figures
    examples
    tracing/      modelspec tensorspec differing operators programs architectures checkpoints importing loading devicecopies
    tracing/      uncuttable flattening verifying callbinding capturing aliasing weightsfile indexlimits valueranges
    tracing/      splitting
    devices/      limits accelerators cuda forking forkserver processes discovering
    backends
    placing/      sites patterns moves parts costs storages drawing interpreting placed
    placing/      precisions refusals rules annotating
    running
    serving
    deploying/    checking workspace footprints setup calling service compiling microbatching sidebyside screening halving
    deploying/    comparing
    measuring
    searching/    correcting candidates tuning journal loop
    clusters/     sockets handshake listener frames hostlinks segments runningsegment agent localnodes raynodes fleet
    clusters/     hostsfeed replanning remote relaycost devicelinks hostprofile cluster
    bundling/     containers driver manifest weightpool packing drafting nativedriver bundler bundlepart mapping partchain
    bundling/     openbundle dumps crosscheck showing
    exporting
    keeping
    api
    annotation
    loadedplan
    splitjudge
    pages/        contents charts document writing
    commands
    cli
    __main__
"""
"""Folders and modules in processing order. A module imports what stands before it; a folder without a list is one layer.

A name in a folder's list is a module or a folder inside it.
"""


def _places(text: str) -> Iterator[str]:
    for line in text.splitlines():
        folder, slash, modules = line.rpartition("/")
        yield from (f"{folder.strip()}.{name}" if slash else name for name in modules.split())
        if slash:
            yield folder.strip()


ABOVE, BELOW = (list(_places(part)) for part in LAYERS.split("-- torch --"))
ORDER = {name: rank for rank, name in enumerate([*ABOVE, *BELOW])}

ALLOWED = {
    "ortools": {"memory.packing", "planners.bounds", "planners.cpsat", "planners.latency", "planners.noncontiguous"},
    "optuna": {"searching.tuning", "searching.journal"},
    "pandas": {"tables", "figures"},
    "matplotlib": {"figures"},
    "plotly": {"pages.charts", "pages.document"},
    "multiprocessing": {
        "devices.forking",
        "devices.forkserver",
        "devices.processes",
        "backends",
        "measuring",
        "running",
    },
    "typer": {"commands", "cli"},
    "rich": {"commands", "progress", "terminal"},
    "transformers": {"tracing.architectures"},
    "ray": {"clusters.localnodes", "clusters.raynodes", "exporting"},
    "onnxruntime": {"backends", "bundling.driver", "exporting"},
    "openvino": {"backends", "bundling.driver", "exporting"},
}
"""Package to the layers that may import it; where a layer may at all, it may in a function too."""

HEAVY = ["torch", "transformers", "matplotlib", "onnx", "onnxscript", "onnxruntime", "openvino", "ray"]
"""Packages that nothing above the line may load, not even through others."""

MAX_LINES = 400


class Import(NamedTuple):
    """One imported name: the importing module, the line, the target, and whether only type checkers or calls import it."""

    module: str
    line: int
    target: str
    typing_only: bool
    in_function: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def layer(module: str) -> str:
    """``autosplit.running.ring`` is of layer ``running``, ``autosplit.values.plan`` of its own; the package itself has none."""
    place = module.partition(".")[2]
    while place not in ORDER and "." in place:
        place = place.rpartition(".")[0]
    return place


def imports(module: str, source: str) -> Iterator[Import]:
    """Every import of a module, those inside functions too."""
    tree = ast.parse(source)
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for statement in node.body
        for inner in ast.walk(statement)
    }
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inside = {id(inner) for function in functions for inner in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively; write autosplit.…"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        for target in targets:
            yield Import(module, node.lineno, target, id(node) in guarded, id(node) in inside)


def package_imports() -> list[Import]:
    return [found for module, path in MODULES.items() for found in imports(module, path.read_text(encoding="utf-8"))]


IMPORTS = package_imports()


def wrong_imports(found: list[Import]) -> list[str]:
    """Every import that goes down, a sentence each."""
    faults = []
    for one in found:
        mine, theirs = layer(one.module), layer(one.target)
        if one.target.split(".")[0] != "autosplit" or not mine:
            continue
        if not theirs:
            faults.append(f"{one.module}:{one.line} imports the package's face; import the module itself")
        elif mine != theirs and ORDER.get(theirs, -1) > ORDER.get(mine, len(ORDER)):
            faults.append(f"{one.module}:{one.line} imports {one.target}, which stands below it")
    return faults


def misplaced_packages(found: list[Import]) -> list[str]:
    """Every third-party import where it does not belong, a sentence each."""
    faults = []
    for one in found:
        package = one.target.split(".")[0]
        mine = layer(one.module)
        if one.typing_only:
            continue
        if package in ALLOWED and mine not in ALLOWED[package]:
            faults.append(f"{one.module}:{one.line} imports {package}, which belongs in {', '.join(sorted(ALLOWED[package]))}")
        if package == "torch" and mine in ("", *ABOVE):
            faults.append(f"{one.module}:{one.line} imports torch, and stands above the line")
    return faults


def test_every_module_has_its_place_and_every_place_its_module() -> None:
    listed = {name.partition(".")[0] for name in ORDER if "." in name}
    found = {layer(module) for module in MODULES if layer(module)}
    lost = {module for module in MODULES if layer(module) in listed and module.count(".") > 1}
    assert sorted((found - set(ORDER)) | lost) == [], "these modules are not in LAYERS"
    assert sorted(set(ORDER) - found) == [], "these names in LAYERS are no modules"


def test_imports_go_up() -> None:
    assert wrong_imports(IMPORTS) == []


def test_packages_are_imported_where_they_belong() -> None:
    assert misplaced_packages(IMPORTS) == []


def test_no_module_imports_itself_through_others() -> None:
    edges: dict[str, set[str]] = {module: set() for module in MODULES}
    for one in IMPORTS:
        if one.target in MODULES and one.target != "autosplit" and one.module != "autosplit" and not one.typing_only:
            edges[one.module].add(one.target)
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as cycle:
        pytest.fail("modules import each other in a circle: " + " <- ".join(cycle.args[1]))


def test_measuring_and_running_load_no_solver() -> None:
    """Each command took 1 s longer since the memory account was imported from a module that asks the planner."""
    at_start = [one for one in IMPORTS if not (one.typing_only or one.in_function)]
    loaded, waiting = set[str](), {"autosplit.api"}
    while waiting:
        loaded |= waiting
        folders = {module.rpartition(".")[0] for module in waiting if module in MODULES}
        waiting = {one.target for one in at_start if one.module in waiting}.union(folders) - loaded
    assert "autosplit.deploying.comparing" in loaded
    packages = {target.partition(".")[0] for target in loaded}
    assert packages & {"ortools", "numba", "optuna", "pandas", "matplotlib", "plotly"} == set()


@pytest.mark.timeout(100)
def test_planning_needs_no_torch() -> None:
    modules = ["autosplit", *(module for module in MODULES if layer(module) in ABOVE)]
    program = f"""
import importlib, sys
for name in {HEAVY}:
    sys.modules[name] = None
for name in {modules}:
    importlib.import_module(name)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_no_module_has_outgrown_its_idea(capsys: pytest.CaptureFixture[str]) -> None:
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in MODULES.items()}
    with capsys.disabled():
        ordered = sorted(lines.items(), key=lambda item: (ORDER.get(layer(item[0]), -1), item[0]))
        cells = [f"{count:4d} {module.removeprefix('autosplit.')}" for module, count in ordered]
        print(f"\n{len(lines)} modules, {sum(lines.values())} lines, median {sorted(lines.values())[len(lines) // 2]}")
        for start in range(0, len(cells), 4):
            print("".join(f"{cell:<32}" for cell in cells[start : start + 4]).rstrip())
    assert {module: count for module, count in lines.items() if count > MAX_LINES} == {}


# The check itself, on code that breaks each rule.


@pytest.mark.parametrize(
    "module,source,fault",
    [
        (
            "autosplit.costs.cost",
            "def f():\n    from autosplit.running import ring\n",
            "autosplit.costs.cost:2 imports autosplit.running",
        ),
        ("autosplit.values.graph", "import autosplit.planners", "stands below it"),
        ("autosplit.cli", "from autosplit import nothing", "imports the package's face"),
    ],
)
def test_an_import_that_goes_down_is_found(module: str, source: str, fault: str) -> None:
    [found] = wrong_imports(list(imports(module, source)))
    assert fault in found


@pytest.mark.parametrize(
    "module,source,num_faults",
    [
        ("autosplit.costs.cost", "import torch.nn", 1),
        ("autosplit.costs.cost", "def f():\n    import torch\n", 1),
        ("autosplit.costs.cost", "if TYPE_CHECKING:\n    import torch\n", 0),
        ("autosplit.planners.cpsat.dp", "from ortools.sat.python import cp_model", 0),
        ("autosplit.costs.cost", "from ortools.sat.python import cp_model", 1),
        ("autosplit.tracing.capturing", "import torch\nimport pandas", 1),
    ],
)
def test_a_misplaced_package_is_found(module: str, source: str, num_faults: int) -> None:
    assert len(misplaced_packages(list(imports(module, source)))) == num_faults

"""The order of the modules: each may import only what stands above it, and heavy packages only where they belong."""

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "autosplit"

LAYERS = Path(__file__).with_name("layers.txt")
TORCH = "torch ----------"


def _places(lines: Iterable[str]) -> Iterator[str]:
    """The modules and folders, in their order: a name indented below ``folder/`` lies in it, and the folder follows them."""
    folders: list[str] = []
    for line in lines:
        depth = (len(line) - len(line.lstrip())) // 4
        while len(folders) > depth:
            yield ".".join(folders)
            folders.pop()
        if line.endswith("/"):
            folders.append(line.strip(" /"))
        else:
            yield ".".join([*folders, line.strip()])
    yield from (".".join(folders[:depth]) for depth in range(len(folders), 0, -1))


PLACES = list(_places(line for line in LAYERS.read_text(encoding="utf-8").splitlines() if not line.startswith("#")))
ORDER = {name: rank for rank, name in enumerate(PLACES)}
ABOVE = PLACES[: PLACES.index(TORCH)]

ALLOWED = {
    "ortools": {"cpsat", "memory.packing", "planners.bounds", "planners.cpsat", "planners.latency", "planners.noncontiguous"},
    "optuna": {"searching.tuning"},
    "pandas": {"tables", "figures"},
    "matplotlib": {"figures"},
    "multiprocessing": {
        "devices.forking",
        "devices.forkserver",
        "devices.processes",
        "devices.calls",
        "backends",
        "measuring",
        "running",
    },
    "typer": {"commands", "cli"},
    "rich": {"commands", "progress", "terminal"},
    "transformers": {
        "generating.decoders",
        "generating.sources",
        "generating.texts",
        "tracing.architectures",
        "tracing.checkpoints",
    },
    "ray": {"compat.raysettings", "clusters.localnodes", "clusters.raynodes", "exporting"},
    "onnxruntime": {"backends", "compat.runtimes", "bundling.driver", "exporting"},
    "openvino": {"backends", "compat.runtimes", "bundling.driver", "exporting"},
}
"""Package to the folders and modules that may import it, in a function too."""

HEAVY = ["torch", "transformers", "matplotlib", "onnx", "onnxscript", "onnxruntime", "openvino", "ray"]
"""Packages that nothing above the line may load, not even through others."""


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
    """Place of a module, or of its folder if the module has none; the package itself has none."""
    place = module.partition(".")[2]
    while place not in ORDER and "." in place:
        place = place.rpartition(".")[0]
    return place


def statements(node: ast.AST, in_function: bool = False, typing_only: bool = False) -> Iterator[tuple[ast.AST, bool, bool]]:
    """A node and all statements in it; whether they stand in a function, and in a block for type checkers alone."""
    yield node, in_function, typing_only
    in_function |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    checks = isinstance(node, ast.If) and "TYPE_CHECKING" in (getattr(node.test, "id", ""), getattr(node.test, "attr", ""))
    for part in ("body", "handlers", "cases", "orelse", "finalbody"):
        for inner in getattr(node, part, ()):
            yield from statements(inner, in_function, typing_only or (checks and part == "body"))


def imports(module: str, source: str) -> Iterator[Import]:
    """Every import of a module, those inside functions too."""
    for node, in_function, typing_only in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively; write autosplit.…"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            targets = [name if name in MODULES else str(node.module) for name in names]
        else:
            continue
        for target in targets:
            yield Import(module, node.lineno, target, typing_only, in_function)


@cache
def package_imports() -> list[Import]:
    """All imports of the package. They are read by the tests and not at the collection, which each test process pays."""
    return [found for module, path in MODULES.items() for found in imports(module, path.read_text(encoding="utf-8"))]


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
        if package in ALLOWED and not any(f"{mine}.".startswith(f"{place}.") for place in ALLOWED[package]):
            faults.append(f"{one.module}:{one.line} imports {package}, which belongs in {', '.join(sorted(ALLOWED[package]))}")
        if package == "torch" and mine in ("", *ABOVE):
            faults.append(f"{one.module}:{one.line} imports torch, and stands above the line")
    return faults


def test_every_module_has_one_place_and_every_place_its_module() -> None:
    modules = {module.partition(".")[2] for module in MODULES} - {""}
    assert sorted(modules - {*PLACES}) == [], f"these modules are not in {LAYERS.name}"
    assert sorted({*PLACES} - modules) == [TORCH], f"these names in {LAYERS.name} are no modules"
    assert sorted(name for name, times in Counter(PLACES).items() if times > 1) == ["compat"], "only this folder stands twice"


def test_imports_go_up() -> None:
    assert wrong_imports(package_imports()) == []


def test_packages_are_imported_where_they_belong() -> None:
    assert misplaced_packages(package_imports()) == []


def test_measuring_and_running_load_no_solver() -> None:
    """Each command took 1 s longer since the memory account was imported from a module that asks the planner."""
    at_start = [one for one in package_imports() if not (one.typing_only or one.in_function)]
    loaded, waiting = set[str](), {"autosplit.api"}
    while waiting:
        loaded |= waiting
        folders = {module.rpartition(".")[0] for module in waiting if module in MODULES}
        waiting = {one.target for one in at_start if one.module in waiting}.union(folders) - loaded
    assert "autosplit.deploying.comparing" in loaded
    packages = {target.partition(".")[0] for target in loaded}
    assert packages & {"ortools", "numba", "optuna", "pandas", "matplotlib"} == set()


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


# The check itself, on code that breaks each rule.


@pytest.mark.parametrize(
    "module,source,fault",
    [
        ("autosplit.costs.cost", "def f():\n    from autosplit.running import ring\n", "costs.cost:2 imports autosplit.running"),
        ("autosplit.running.ring", "if TYPE_CHECKING:\n    from autosplit.running import engine\n", "stands below it"),
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

"""Lines of each folder within its budget, so that code added in one place is paid for by code removed there."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "sizes.toml"
MAX_MODULE_LINES = 400


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def sizes(tree: str) -> Counter[str]:
    """Lines of Python in each folder of ``tree``; its own modules count as folder ``.``."""
    lines: Counter[str] = Counter()
    for path in (ROOT / tree).rglob("*.py"):
        folder, *rest = path.relative_to(ROOT / tree).parts
        lines[folder if rest else "."] += lines_of(path)
    return lines


def faults(tree: str, lines: dict[str, int], limits: dict[str, int]) -> list[str]:
    """Every folder beyond its limit, without one, or gone, a sentence each."""
    found = [f"{tree}/{folder} is gone: remove its row" for folder in limits if folder not in lines]
    for folder, count in lines.items():
        if folder not in limits:
            found.append(f"{tree}/{folder} has {count} lines and no limit: give it a row, with a sentence on what it brings")
        elif count > limits[folder]:
            found.append(
                f"{tree}/{folder} has {count} lines, {count - limits[folder]} above its limit of {limits[folder]}: "
                "remove as many, or raise the limit with a sentence beside it on what the lines bought"
            )
    return found


@pytest.mark.parametrize("tree", ["autosplit", "tests"])
def test_no_folder_outgrows_its_budget(tree: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines, limits = sizes(tree), tomllib.loads(BUDGET.read_text(encoding="utf-8"))[tree]
    with capsys.disabled():
        print(f"\n{tree:<14} lines  limit")
        for folder, count in sorted(lines.items()):
            print(f"{folder:<14}{count:6}{limits.get(folder, 0):7}")
        print(f"{'sum':<14}{lines.total():6}{sum(limits.values()):7}")
    assert faults(tree, lines, limits) == [], f"see {BUDGET.name}"


def test_no_module_outgrows_its_idea() -> None:
    lines = {str(path.relative_to(ROOT)): lines_of(path) for path in (ROOT / "autosplit").rglob("*.py")}
    assert {module: count for module, count in lines.items() if count > MAX_MODULE_LINES} == {}


def test_a_folder_beyond_its_limit_is_named_with_the_way_out() -> None:
    assert faults("autosplit", {"values": 120, "new": 7}, {"values": 100, "old": 100}) == [
        "autosplit/old is gone: remove its row",
        "autosplit/values has 120 lines, 20 above its limit of 100: remove as many, or raise the limit with a sentence "
        "beside it on what the lines bought",
        "autosplit/new has 7 lines and no limit: give it a row, with a sentence on what it brings",
    ]

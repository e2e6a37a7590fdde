"""Lines of each folder within its budget, so that code added in one place is paid for by code removed there."""

import pytest
from linecounts import BUDGET, ROOT, limits, lines_of, sizes

MAX_MODULE_LINES = 400


def faults(tree: str, lines: dict[str, int], most: dict[str, int]) -> list[str]:
    """Every folder beyond its limit, without one, or gone, a sentence each."""
    found = [f"{tree}/{folder} is gone: remove its row" for folder in most if folder not in lines]
    for folder, count in lines.items():
        if folder not in most:
            found.append(f"{tree}/{folder} has {count} lines and no limit: give it a row, in a commit that says what it brings")
        elif count > most[folder]:
            found.append(
                f"{tree}/{folder} has {count} lines, {count - most[folder]} above its limit of {most[folder]}: "
                "remove as many, or raise the limit in a commit that says what the lines bought"
            )
    return found


@pytest.mark.parametrize("tree", ["autosplit", "tests"])
def test_no_folder_outgrows_its_budget(tree: str) -> None:
    assert faults(tree, sizes(tree), limits(tree)) == [], f"see {BUDGET.name}, and make sizes"


def test_no_module_outgrows_its_idea() -> None:
    lines = {str(path.relative_to(ROOT)): lines_of(path) for path in (ROOT / "autosplit").rglob("*.py")}
    assert {module: count for module, count in lines.items() if count > MAX_MODULE_LINES} == {}


def test_a_folder_beyond_its_limit_is_named_with_the_way_out() -> None:
    assert faults("autosplit", {"values": 120, "new": 7}, {"values": 100, "old": 100}) == [
        "autosplit/old is gone: remove its row",
        "autosplit/values has 120 lines, 20 above its limit of 100: remove as many, or raise the limit in a commit "
        "that says what the lines bought",
        "autosplit/new has 7 lines and no limit: give it a row, in a commit that says what it brings",
    ]

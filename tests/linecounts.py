"""Lines of Python in each folder beside its limit in sizes.toml. Run as a program it prints them; it needs Python alone."""

import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUDGET = ROOT / "sizes.toml"


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def sizes(tree: str) -> Counter[str]:
    """Lines of Python in each folder of ``tree``; its own modules count as folder ``.``."""
    lines: Counter[str] = Counter()
    for path in (ROOT / tree).rglob("*.py"):
        folder, *rest = path.relative_to(ROOT / tree).parts
        lines[folder if rest else "."] += lines_of(path)
    return lines


def limits(tree: str) -> dict[str, int]:
    return dict(tomllib.loads(BUDGET.read_text(encoding="utf-8"))[tree])


if __name__ == "__main__":
    for tree in ("autosplit", "tests"):
        lines, most = sizes(tree), limits(tree)
        print(f"\n{tree:<14} lines  limit")
        for folder, count in sorted(lines.items()):
            print(f"{folder:<14}{count:6}{most.get(folder, 0):7}")
        print(f"{'sum':<14}{lines.total():6}{sum(most.values()):7}")

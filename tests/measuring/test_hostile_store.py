"""A store of a stranger, with links, pipes, devices and folders in any place: nothing outside changes, and nothing waits.

It is tried 100 times, or AUTOSPLIT_FUZZ_CASES times (``make fuzz``).
"""

import os
import random
import shutil
import socket
from pathlib import Path

import pytest

from autosplit.measuring.store import Store
from tests.measuring.test_store import LOCKS, chain, profile, use
from tests.test_hostile_files import NUM_CASES

CONTENT = "mine"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that everything was saved in, with its locks."""
    store = Store(tmp_path_factory.mktemp("store"))
    store.save(chain(), profile())
    assert use(store) == []
    return store.root


def plant(path: Path, outside: Path, chance: random.Random) -> None:
    """Put something else in the place of a file or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    targets = [outside / "file", outside / "folder", outside / "absent", path, path.parent, Path("/dev/zero"), Path("/dev/full")]
    way = chance.randrange(4)
    if way == 0:
        os.mkfifo(path)
    elif way == 1:
        path.mkdir()
    elif way == 2 and len(str(path)) < 100:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        target = chance.choice(targets)
        path.symlink_to(os.path.relpath(target, path.parent) if chance.random() < 0.5 else target)


@pytest.mark.timeout(3600)
def test_nothing_planted_in_a_store_changes_a_file_outside_or_is_waited_for(model: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    for place in ("file", "folder/file"):
        (outside / place).write_text(CONTENT)
    num_refused = 0
    for seed in range(NUM_CASES):
        chance, root = random.Random(seed), tmp_path / "s"
        shutil.copytree(model, root)
        names = [path.relative_to(root) for path in root.rglob("*")] + [Path(name) for name in LOCKS if "{" not in name]
        for name in chance.sample(names, chance.choice([1, 1, 2, 4])):
            if (root / name).parent.is_dir() and not (root / name).parent.is_symlink():
                plant(root / name, outside, chance)
        said = use(Store(root))
        num_refused += bool(said)
        for text in said:
            assert 0 < len(text) < 2000 and "Traceback" not in text, f"case {seed}"
        found = sorted(str(path.relative_to(outside)) for path in outside.rglob("*"))
        assert found == ["file", "folder", "folder/file"], f"case {seed}"
        assert all((outside / place).read_text() == CONTENT for place in ("file", "folder/file")), f"case {seed}"
        shutil.rmtree(root)
    assert num_refused > NUM_CASES // 2

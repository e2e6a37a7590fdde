"""Scratch folders: gone with their owner, swept where it was killed, and nothing that is not ours is touched."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from autosplit import scratch
from autosplit.errors import UsageError
from autosplit.scratch import private_folder, scratch_folder


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of temporary files, for this test alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def root(temporary: Path) -> Path:
    return private_folder(temporary, "scratch")


def left_behind(root: Path, name: str, marker: object) -> Path:
    """A folder with a file in it and a marker that nobody has locked. Bytes are written as they are, other values as JSON."""
    folder = root / name
    folder.mkdir(parents=True)
    (folder / "kept").write_text("data")
    (folder / ".autosplit-scratch").write_bytes(marker if isinstance(marker, bytes) else json.dumps(marker).encode())
    return folder


OURS = {"made_by": "autosplit", "version": "0", "uid": os.getuid(), "pid": 1}


def test_a_folder_is_private_and_gone_after_its_block(temporary: Path) -> None:
    with scratch_folder() as folder:
        assert folder.stat().st_mode & 0o777 == folder.parent.stat().st_mode & 0o777 == 0o700
        about = json.loads((folder / ".autosplit-scratch").read_text())
        assert about["made_by"] == "autosplit" and about["pid"] == os.getpid() and about["version"]
    assert list(temporary.iterdir()) == []


@contextlib.contextmanager
def holding(temporary: Path, code: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that runs some code, and the scratch folder that it prints."""
    environment, pipe = {**os.environ, "TMPDIR": str(temporary)}, subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_is_removed_without_a_next_one(temporary: Path) -> None:
    code = """if True:
        from autosplit.scratch import scratch_folder, sweep_at_death
        with scratch_folder() as folder:
            death = sweep_at_death()
            print(folder, flush=True)
            input()
    """
    with holding(temporary, code) as (process, left):
        assert left.is_dir()
        assert not psutil.Process(process.pid).children(), "Ray kills the children of a process whose driver is gone"
        process.kill()
    for _ in range(300):
        if not list(temporary.iterdir()):
            break
        time.sleep(0.1)
    assert not list(temporary.iterdir())


def test_what_a_killed_process_left_is_removed_by_the_next(temporary: Path) -> None:
    code = "from autosplit.scratch import scratch_folder as f\nwith f() as folder: print(folder, flush=True); input()"
    with holding(temporary, code) as (process, left):
        with scratch_folder() as own:
            assert own.is_dir() and left.is_dir()
        process.kill()
    assert not own.exists() and left.is_dir()
    with scratch_folder():
        assert not left.exists()


def test_folders_of_others_in_the_temporary_folder_stay(temporary: Path) -> None:
    environment = temporary / "autosplit-venv"  # uv locks a virtual environment by a file of this name
    environment.mkdir()
    (environment / ".lock").touch()
    with scratch_folder():
        pass
    assert (environment / ".lock").exists()


@pytest.mark.parametrize(
    "marker",
    [
        *({}, [], None, "autosplit", {**OURS, "made_by": "uv"}, {**OURS, "uid": os.getuid() + 1}, {**OURS, "pad": "x" * 5000}),
        *(b"", b"{", b"\xff\0", b"[" * 4000, b'{"uid": ' * 500, b'{"uid": ' + b"9" * 4000 + b"}"),
    ],
)
def test_a_folder_with_another_marker_stays(root: Path, marker: object) -> None:
    folder = left_behind(root, "other", marker)
    with scratch_folder():
        pass
    assert (folder / "kept").exists()


def test_a_folder_with_our_marker_goes(root: Path) -> None:
    folder = left_behind(root, "ours", OURS)
    with scratch_folder():
        assert not folder.exists()


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_the_marker_does_not_block(root: Path) -> None:
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / ".autosplit-scratch")
    with scratch_folder():
        pass
    assert (root / "pipe").exists()


def test_links_are_not_followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    outside = left_behind(tmp_path_factory.mktemp("outside"), "ours", OURS)
    (root / "link").symlink_to(outside)
    (root / "linked-marker").mkdir()
    (root / "linked-marker" / ".autosplit-scratch").symlink_to(outside / ".autosplit-scratch")
    with scratch_folder():
        pass
    assert (outside / "kept").exists() and (root / "linked-marker").exists()


def test_a_locked_folder_stays(root: Path) -> None:
    folder = left_behind(root, "ours", OURS)
    with (folder / ".autosplit-scratch").open() as marker:
        fcntl.flock(marker, fcntl.LOCK_EX)
        with scratch_folder():
            pass
    assert (folder / "kept").exists()


def test_a_root_that_is_not_ours_is_refused(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = temporary / f"autosplit-{os.getuid()}-scratch"
    (temporary / "elsewhere").mkdir(mode=0o700)
    root.symlink_to(temporary / "elsewhere")
    with pytest.raises(UsageError, match="is not a folder of user"), scratch_folder():
        pass
    root.unlink()
    root.mkdir(mode=0o755)
    with pytest.raises(UsageError, match="mode 0700"), scratch_folder():
        pass
    root.chmod(0o700)
    another = os.getuid() + 1
    monkeypatch.setattr(scratch.os, "getuid", lambda: another)
    root.rename(temporary / f"autosplit-{another}-scratch")
    with pytest.raises(UsageError, match="is not a folder of user"), scratch_folder():
        pass

"""Hosts tell how they fare in files that only their user reads, and that go with them however they go."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autosplit import cli
from autosplit.commands import console, watching
from autosplit.errors import UsageError
from autosplit.reports import status
from autosplit.reports.status import Beacon, running_hosts
from autosplit.terminal import Terminal

HEALTH = {
    "devices": {
        "cpu:0": {"state": "busy", "used_bytes": 2**20, "free_bytes": None, "resident_bytes": 2**21, "stages": ["net/first"]}
    },
    "networks": {"net": {"state": "starting"}},
    "workers": [],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the status files, for this test alone; nothing may be left in it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / f"autosplit-{os.getuid()}-hosts"
    assert list(tmp_path.iterdir()) == []


def test_a_host_is_seen_until_it_closes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "BEAT_S", 0.01)
    beats = []
    beacon = Beacon(lambda: {**HEALTH, "number": beats.append(None) or len(beats)})
    [path] = folder.iterdir()
    assert path.stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700
    [found] = running_hosts()
    assert found["pid"] == os.getpid() and found["networks"] == HEALTH["networks"] and found["age_s"] >= 0
    while len(beats) < 20:
        assert running_hosts()[0]["number"] >= found["number"]
    assert list(folder.iterdir()) == [path] and len(list(path.iterdir())) <= 3
    beacon.close()
    beacon.close()
    assert running_hosts() == []


def test_two_hosts_of_a_process_are_two_and_the_older_stands_first() -> None:
    first, second = Beacon(lambda: {"name": "first"}), Beacon(lambda: {"name": "second"})
    assert [host["name"] for host in running_hosts()] == ["first", "second"]
    first.close()
    assert [host["name"] for host in running_hosts()] == ["second"]
    second.close()


def test_a_host_stays_in_its_folder_when_the_environment_changes(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    beacon, other = Beacon(lambda: {"name": "first"}), tmp_path_factory.mktemp("other")
    [path] = folder.iterdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(other))
    beacon.write()
    assert list(folder.iterdir()) == [path] and list(other.iterdir()) == []
    beacon.close()
    assert not folder.exists()


def test_what_a_killed_host_left_is_ignored_and_removed(folder: Path) -> None:
    program = "import time\nfrom autosplit.reports.status import Beacon\nBeacon(dict)\nprint(flush=True)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None and host.stdout.readline()
        assert [one["pid"] for one in running_hosts()] == [host.pid]
        host.send_signal(signal.SIGKILL)
        host.wait(10)
    [left] = folder.iterdir()
    Beacon(dict).close()  # the next start removes it, and so does the next look
    assert not left.exists() and running_hosts() == []


def test_a_host_whose_folder_was_removed_makes_another_one(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    beacon = Beacon(lambda: {"name": "first"})
    [path] = folder.iterdir()
    shutil.rmtree(path)
    beacon.write()
    assert "the status of this host cannot be told" in caplog.text and running_hosts() == []
    beacon.write()
    assert [host["name"] for host in running_hosts()] == ["first"]
    beacon.close()


def test_a_folder_that_others_may_enter_is_not_trusted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UsageError, match="with mode 0700, so autosplit does not trust it; remove it"):
        running_hosts()
    Beacon(dict).close()
    assert "the status of this host cannot be told" in caplog.text and list(folder.iterdir()) == []
    folder.rmdir()
    folder.symlink_to("/")
    with pytest.raises(UsageError, match="does not trust"):
        running_hosts()
    folder.unlink()


def test_the_command_shows_hosts_and_says_when_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown(*words: str) -> str:
        done = CliRunner().invoke(cli.app, ["status", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    def at_once(seconds: float) -> None:
        raise KeyboardInterrupt

    for module in (console, watching):
        monkeypatch.setattr(module, "out", Terminal(width=200))
    assert shown() == "No host of this user is running.\n" and json.loads(shown("--json")) == {"hosts": []}
    beacon = Beacon(lambda: HEALTH)
    for text in ("heart-beat", "cpu:0", "busy", "1.0 MiB", "net/first", "starting"):
        assert text in shown()
    monkeypatch.setattr(watching.time, "sleep", at_once)
    assert "net/first" in shown("--watch")
    assert json.loads(shown("--json", "--watch"))["hosts"][0]["devices"] == HEALTH["devices"]
    beacon.close()

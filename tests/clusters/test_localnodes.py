"""Local nodes that cannot be started: the error has the reason."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from autosplit.clusters.localnodes import local_nodes
from autosplit.errors import DeviceError

pytest.importorskip("ray", reason="a cluster of hosts needs Ray: pip install 'autosplit[ray]'")


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short folder for temporary files, of this process and its children."""
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setenv("TMPDIR", path)
        monkeypatch.setattr(tempfile, "tempdir", None)  # read TMPDIR again
        yield Path(path)


def test_a_folder_too_long_for_sockets_is_named_with_the_limit_and_the_way_out(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes failed without a reason: the path of a Unix socket has at most 107 bytes."""
    long = folder / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("TMPDIR", str(long))
    with pytest.raises(DeviceError, match=r"has \d+ bytes, and at most \d+ fit. Set TMPDIR to .* such as /tmp"), local_nodes(1):
        pass
    assert list(long.iterdir()) == []


def test_nodes_that_do_not_start_show_the_end_of_their_output(folder: Path) -> None:
    """Their output went nowhere, and the error named a time limit that had not passed."""
    (folder / f"autosplit-{os.getuid()}-scratch").touch()
    with (
        pytest.raises(DeviceError, match=r"could not be started .* ends with:\n    UsageError: .* is not a folder"),
        local_nodes(1),
    ):
        pass

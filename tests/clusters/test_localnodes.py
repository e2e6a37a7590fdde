"""Local nodes that cannot be started: the error has the reason."""

import os
from pathlib import Path

import pytest

from autosplit.clusters.localnodes import local_nodes
from autosplit.errors import DeviceError

pytest.importorskip("ray", reason="a cluster of hosts needs Ray: pip install 'autosplit[ray]'")


def test_nodes_that_do_not_start_show_the_end_of_their_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their output went nowhere, and the error named a time limit that had not passed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # of the process that starts the nodes
    (tmp_path / f"autosplit-{os.getuid()}-scratch").touch()
    with (
        pytest.raises(DeviceError, match=r"could not be started .* ends with:\n    UsageError: .* is not a folder"),
        local_nodes(1),
    ):
        pass

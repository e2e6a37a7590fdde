"""Values that a call cannot take are refused in a sentence, and nothing changes."""

import pytest
from pipelines import increment, local, request

from autosplit.errors import UsageError
from autosplit.running.pipeline import Pipeline
from autosplit.serving.hostmanager import HostManager

pytestmark = pytest.mark.timeout(60)


def test_misuse_of_a_host_is_told() -> None:
    with pytest.raises(UsageError, match="machine must be Machine or None, but is 'cpu:0'"):
        HostManager("cpu:0")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="limit must be int or None, but is '8'"):
        HostManager(limit="8")  # type: ignore[arg-type]
    with HostManager() as host:
        host.add_network("net", [local("a", increment, "x", "y")], ["x"], ["y"])
        with pytest.raises(UsageError, match="when_busy must be drain, refuse or fail, but is 'later'"):
            host.remove_network("net", when_busy="later")  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="a chain needs at least one network"):
            host.chain()
        assert host.run("net", request(1))[0][0] == 2


def test_misuse_of_a_pipeline_is_told() -> None:
    with pytest.raises(UsageError, match="max_restarts must be at least 0, but is -1"):
        Pipeline([local("a", increment, "x", "y")], ["x"], ["y"], max_restarts=-1)

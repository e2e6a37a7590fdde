"""The contract of a transport, for hosts over TCP; and what is the hosts' own: another route for a lost host."""

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from contract import ROOM, TransportContract
from hosts import SECRET, Hosts, on_hosts

from autosplit.clusters.agent import Agent
from autosplit.clusters.remote import HostsPipeline
from autosplit.running.engine import Engine

pytestmark = pytest.mark.timeout(60)


class TestHosts(TransportContract):
    """Two hosts, for which agents in this process stand."""

    agents: ClassVar[dict[str, Agent]]

    @pytest.fixture(scope="class", autouse=True)
    def hosts(self) -> Iterator[None]:
        """The agents."""
        type(self).agents = {name: Agent(name, "127.0.0.1", SECRET) for name in ("one", "two")}
        yield
        for agent in self.agents.values():
            agent.close()

    def open(self, function: Callable[..., Any], replicas: int = 1) -> Engine:
        """A replica on each host."""
        devices = [f"{name}/null:0" for name in list(self.agents)[:replicas]]
        stage = on_hosts(function, *devices, queue_depth=1)
        return HostsPipeline(Hosts(**self.agents), [stage], ["x"], ["y"], room=ROOM)  # type: ignore[arg-type]

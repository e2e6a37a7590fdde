"""The contract of a transport, for hosts over TCP."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import pytest
from contract import ROOM, TransportContract
from hosts import SECRET, Hosts, on_hosts
from pipelines import at_widths, increment, request

from autosplit.clusters.agent import Agent
from autosplit.clusters.hostsdeployment import Lost
from autosplit.clusters.hoststransport import HostsPipeline
from autosplit.errors import WorkerError
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

    def open(self, function: Callable[..., Any], replicas: int = 1, widths: Sequence[int] = ()) -> Engine:
        """A replica on each host."""
        devices = [f"{name}/null:0" for name in list(self.agents)[:replicas]]
        stage = at_widths(on_hosts(function, *devices, queue_depth=1), *widths)
        return HostsPipeline(Hosts(**self.agents), [stage], ["x"], ["y"], queue_capacity=ROOM)  # type: ignore[arg-type]

    def test_a_pipeline_that_lost_a_host_can_be_opened_again(self) -> None:
        with self.open(increment) as engine:
            engine._transport._events.put(Lost("one", "it was silent"))  # type: ignore[attr-defined]
            with pytest.raises(WorkerError, match="host 'one' was lost: it was silent"):
                while True:
                    engine.run(request(0))
            engine.reopen()
            assert engine.run(request(1))[0][0] == 2 and engine.failure is None

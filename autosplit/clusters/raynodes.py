"""The nodes of a Ray cluster, and an agent on each of them, for which a placement group keeps a processor."""

import contextlib
import os
import socket
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from autosplit.clusters.localnodes import LABEL, MAX_LOCAL, START_S, local_nodes
from autosplit.errors import AutosplitError, DeviceError, MissingExtraError, UsageError, WorkerError

ASK_S, LISTENER_S = 600.0, 5.0


@dataclass(frozen=True, slots=True)
class Node:
    """A node of Ray: its id, its name among the hosts, and its address."""

    id: str
    name: str
    address: str


@contextlib.contextmanager
def connected(cluster: str) -> Iterator[list[Node]]:
    """Yield the nodes of a cluster, by name.

    Args:
        cluster: ``auto`` for the one that this machine belongs to, ``HOST:PORT``, or ``local:N`` for N nodes on this machine,
            which are started, and ended at the end.
    Raises: MissingExtraError: Ray is not installed. UsageError: another form. DeviceError: no cluster answers.
    """
    ray = _ray()
    kind, _, count = cluster.partition(":")
    with contextlib.ExitStack() as stack:
        address = cluster
        if kind == "local":
            if not (count.isdecimal() and 1 <= int(count) <= MAX_LOCAL):
                raise UsageError(f"cluster '{cluster}' is not understood; write local:1 to local:{MAX_LOCAL}")
            address = stack.enter_context(local_nodes(int(count)))
        elif cluster != "auto" and not count.isdecimal():
            raise UsageError(f"cluster '{cluster}' is not understood; write auto, HOST:PORT or local:3")
        elif cluster != "auto":
            _require_listener(kind, int(count))
        try:
            ray.init(
                address=address,
                log_to_driver=False,
                logging_level="ERROR",
                namespace="autosplit",
                job_config=_without_driver_path(),
            )
        except (ConnectionError, TimeoutError, RuntimeError) as failure:
            way_out = "Start one with `ray start --head`, or set RAY_AUTH_MODE=token if it asks for a token."
            raise DeviceError(f"no Ray cluster answers at '{cluster}': {failure}. {way_out}") from None
        stack.callback(ray.shutdown)
        yield living_nodes()


class Agents:
    """An actor on each node of a cluster. They end with this process, however it ends.

    Args:
        kind: the class whose objects the actors are; it is called with a node's name, its address and ``arguments``.
    Raises: DeviceError: a node has no processor free for its agent.
    """

    def __init__(self, nodes: Sequence[Node], kind: type, *arguments: Any) -> None:
        self._ray = _ray()
        self._kind, self._arguments = self._ray.remote(kind), arguments
        self._handles: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        """The placement group of each node, which keeps a processor for its agent."""
        self.start(nodes)

    def start(self, nodes: Sequence[Node], timeout_s: float = START_S) -> None:
        """Start an agent on each node, in place of an earlier one of the same name. Raises: DeviceError: as the constructor."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        for node in nodes:
            self._end(node.name)
            here = [{"ray.io/node-id": node.id}]
            self._groups[node.name] = placement_group([{"CPU": 1.0}], strategy="STRICT_PACK", bundle_label_selector=here)
        until_s = time.monotonic() + timeout_s
        busy = [node.name for node in nodes if not self._groups[node.name].wait(max(1.0, until_s - time.monotonic()))]
        if busy:
            raise DeviceError(
                f"the hosts {', '.join(busy)} have no processor free for an agent after {timeout_s:.0f} s; end other jobs there"
            )
        for node in nodes:
            place = PlacementGroupSchedulingStrategy(self._groups[node.name], 0)
            options = self._kind.options(num_cpus=1, max_concurrency=8, scheduling_strategy=place)
            self._handles[node.name] = options.remote(node.name, node.address, *self._arguments)

    def ask(self, calls: Sequence[tuple[Any, ...]], timeout_s: float = ASK_S) -> list[Any]:
        """Call methods of agents, all at once: each call is a host, the name of a method and its arguments.

        An argument from ``share`` travels once to each node.

        Returns: the answers, in the order of the calls.
        Raises: the error that a method raised; WorkerError: an agent died or did not answer in time.
        """
        asked = [getattr(self._handles[host], method).remote(*given) for host, method, *given in calls]
        return [self._answer(host, method, answer, timeout_s) for (host, method, *_), answer in zip(calls, asked, strict=True)]

    def _answer(self, host: str, method: str, answer: Any, timeout_s: float) -> Any:
        failures = self._ray.exceptions
        try:
            return self._ray.get(answer, timeout=timeout_s)
        except failures.RayTaskError as failure:
            if isinstance(failure.cause, AutosplitError):
                raise type(failure.cause)(f"host '{host}': {failure.cause}") from None
            raise WorkerError(f"the agent on host '{host}' failed in {method}: {failure}") from None
        except failures.GetTimeoutError:
            raise WorkerError(f"the agent on host '{host}' gave no answer to {method} in {timeout_s:g} s") from None
        except failures.RayError as failure:
            first = str(failure).partition("\n")[0]
            raise WorkerError(f"the agent on host '{host}' died during {method}: {first}") from None

    def share(self, value: Any) -> Any:
        """A value in Ray's object store, to be given to several agents."""
        return self._ray.put(value)

    def kill(self) -> None:
        """End all agents and, with them, their workers."""
        for name in list(self._groups):
            self._end(name)

    def _end(self, name: str) -> None:
        """End the agent of a name, if there is one, and free its processor."""
        from ray.util.placement_group import remove_placement_group

        if name in self._handles:
            self._ray.kill(self._handles.pop(name))
        if name in self._groups:
            remove_placement_group(self._groups.pop(name))


def _require_listener(host: str, port: int) -> None:
    """Raises: DeviceError: no process listens there within ``LISTENER_S``. Ray itself would try for more than a minute."""
    try:
        socket.create_connection((host, port), LISTENER_S).close()
    except (OSError, OverflowError) as failure:
        raise DeviceError(f"no Ray cluster answers at '{host}:{port}': {failure}. Start one with `ray start --head`.") from None


def _without_driver_path() -> Any:
    """A job whose agents do not get the current folder of this process, which Ray puts before Python's own modules."""
    from ray.job_config import JobConfig

    class Job(JobConfig):  # type: ignore[misc]
        def _runtime_env_has_working_dir(self) -> bool:  # Ray calls this before it adds the folder
            return True

    return Job()


def _ray() -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # an abandoned answer is not an error
    try:
        import ray
    except ImportError:
        raise MissingExtraError("a cluster of hosts needs Ray: pip install 'autosplit[ray]'") from None
    return ray


def living_nodes() -> list[Node]:
    """The nodes of the connected cluster that listen and have a processor, by name.

    Ray itself counts a dead node as alive for about half a minute.
    """
    alive = [node for node in _ray().nodes() if node["Alive"] and node["Resources"].get("CPU", 0.0) >= 1]  # an agent needs one
    names = Counter(node["NodeManagerHostname"] for node in alive)
    found = []
    for node in alive:
        host, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
        with contextlib.suppress(DeviceError):
            _require_listener(address, node["NodeManagerPort"])
            name = node["Labels"].get(LABEL) or (host if names[host] == 1 else f"{host}-{address}")
            found.append(Node(node["NodeID"], name, address))
    return sorted(found, key=lambda node: node.name)

"""Hosts without Ray: agents in this process, to which pipelines connect over TCP."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines import double, spec

from autosplit.backends.base import Runnable
from autosplit.clusters.agent import Agent
from autosplit.clusters.fleet import ClockOffset
from autosplit.clusters.listener import Listener
from autosplit.running.modules import StageFolder, positional
from autosplit.running.stage import StagePlacement
from autosplit.values.machine import parse_device

SECRET = b"secret of the run"


@dataclass(frozen=True, slots=True)
class Functional(StageFolder):
    """A stage that needs no files."""

    function: Callable[..., Any] = double

    @property
    def num_bytes(self) -> int:
        """None."""
        return 0

    def load(self, threads: int, device: str, shared: bool, streams: int = 1) -> Runnable:
        """The function."""
        return positional(self.function)

    def import_packages(self) -> None:
        """Do nothing."""


def on_hosts(function: Callable[..., Any], *devices: str, **settings: Any) -> StagePlacement:
    """A stage from ``x`` to ``y`` that runs a function on devices of hosts."""
    module = Functional(Path("folder"), warms_up=False, trust=True, function=function)
    return StagePlacement("double", module, (spec("x"),), (spec("y"),), tuple(map(parse_device, devices)), **settings)


class Hosts:
    """What a pipeline asks of a Fleet, without Ray: agents in this process, or listeners that stand for hosts."""

    def __init__(self, **hosts: Agent | Listener) -> None:
        self.secret, self.lost = SECRET, dict[str, str]()
        self._hosts = hosts

    def lose(self, host: str, reason: str) -> None:
        """Note a lost host."""
        self.lost[host] = reason

    def address(self, host: str) -> tuple[str, int]:
        """Where a host listens."""
        return self._hosts[host].address

    def clock_offset(self, host: str) -> ClockOffset:
        """Hosts in one process have one clock."""
        return ClockOffset(0, 0)

    def ask(self, calls: Sequence[tuple[Any, ...]], timeout_s: float = 0.0) -> list[Any]:
        """Call agents; a listener does nothing."""
        return [getattr(self._hosts[host], method, lambda *_: None)(*given) for host, method, *given in calls]

    def ship(self, folders: Mapping[str, Collection[Path]]) -> tuple[dict[Path, str], dict[str, dict[str, str]]]:
        """Ship nothing."""
        return {Path("folder"): "folder"}, {"folder": {}}

"""Watch hosts: ``autosplit status``, and the live table of ``autosplit run --watch``."""

import contextlib
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live

from autosplit.closing import Closing
from autosplit.commands.console import out, show
from autosplit.commands.options import Output
from autosplit.commands.report import table
from autosplit.parsing import MALFORMED, MAX_REASON, json_safe
from autosplit.progress import Progress, bars
from autosplit.reports.health import Health, at_work, device_rows, network_rows, worker_rows

EVERY_S = 1.0
"""Seconds between two readings."""

NOTHING = "No host of this user is running."


@dataclass(frozen=True, kw_only=True)
class Status(Output):
    """How to look at running hosts."""

    watch: Annotated[bool, typer.Option(help="Look again every second, until Ctrl-C.")] = False


def status(given: Status) -> None:
    """Show the hosts of this user that run now: devices, networks, workers, queues. It disturbs none of them."""
    from autosplit.reports.status import running_hosts

    if not given.watch:
        found = running_hosts()
        show(given, {"hosts": found}, *_views(found))
        return
    with Live(console=out, auto_refresh=False, screen=False) as live:
        try:
            while True:
                found = running_hosts()
                if given.json:
                    sys.stdout.write(json.dumps(json_safe({"hosts": found})) + "\n")
                    sys.stdout.flush()
                elif out.is_terminal:
                    live.update(Group(*_views(found)), refresh=True)
                else:
                    out.print(*_views(found), sep="\n")
                time.sleep(EVERY_S)
        except KeyboardInterrupt:
            return


def _views(hosts: Sequence[Health]) -> list[RenderableType]:
    views: list[RenderableType] = []
    for host in hosts:
        try:
            title = f"host {host['pid']}: {host['command']} (heart-beat {host['age_s']:.1f} s ago)"
            views += [table(device_rows(host), title), table(network_rows(host), "networks"), table(worker_rows(host), "workers")]
        except MALFORMED as failure:
            views.append(f"a host of another version of autosplit, whose status cannot be shown: {failure!r:.{MAX_REASON}}")
    return views or [NOTHING]


@contextlib.contextmanager
def watched(console: Console, watch: bool) -> Iterator[tuple[Progress, Callable[[Any], None] | None]]:
    """The progress function of a run and the function that gets its host: of a Watcher with --watch, else of a bar."""
    if watch:
        with Watcher(console) as watcher:
            yield watcher.progress, watcher.observe
    else:
        with bars(console) as progress:
            yield progress, None


class Watcher(Closing):
    """Shows the tables of a host every second while a block runs; in a terminal, new tables replace old ones."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._look: Callable[[], Health] | None = None
        self._doing = ""
        self._ended = threading.Event()
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._thread = threading.Thread(target=self._watch, name="autosplit-watcher", daemon=True)
        self._live.start()
        self._thread.start()

    def observe(self, host: Any) -> None:
        """Show this host from now on."""
        self._look = host.health

    def progress(self, step: str, share: float, text: str) -> None:
        """Keep the name of the step, which the line above the table shows."""
        self._doing = f"{share:4.0%}  {text}"

    def close(self) -> None:
        """Take the tables away."""
        self._ended.set()
        self._thread.join()
        self._live.stop()

    def _watch(self) -> None:
        before, then = None, time.monotonic()
        while not self._ended.wait(EVERY_S):
            if self._look is not None:
                health, now = self._look(), time.monotonic()
                self._show(at_work(health, before), before, now - then)
                before, then = health, now

    def _show(self, health: Health, before: Health | None, elapsed_s: float) -> None:
        networks = table(network_rows(health, before, elapsed_s), self._doing)
        drawn = Group(networks, table(worker_rows(health, before), hide=("network", "device", "for_s")))
        if self._console.is_terminal:
            self._live.update(drawn, refresh=True)
        else:
            self._console.print(drawn)

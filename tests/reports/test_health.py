"""What happened between two looks at a host, as rows."""

import math
import threading
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from autosplit.commands import watching
from autosplit.reports.health import at_work, device_rows, network_rows, worker_rows


def look(answered: int, busy_s: float, requests: int) -> dict[str, Any]:
    """A host of two networks: one at work, one that is starting."""
    worker = {
        "network": "net", "stage": "first", "replica": 1, "device": "cpu:0", "state": "running", "since_s": 0.5,
        "num_requests": requests, "num_queued": 3, "busy_s": busy_s, "wait_s": 1.0, "transfer_s": 0.0, "queue_s": 2 * busy_s,
        "resident_bytes": 4096,
    }  # fmt: skip
    net = {
        "state": "ready", "num_waiting": 1, "room": 6, "num_held": 38, "num_running": 2, "window": 6,
        "num_answered": answered, "restarts": 0, "latency_s": {"p50": 0.002, "p90": 0.003, "p99": 0.004}, "rows_per_request": 8,
    }  # fmt: skip
    device = {"state": "busy", "used_bytes": 10, "free_bytes": None, "resident_bytes": 20, "stages": ["net/first", "new/a"]}
    return {"devices": {"cpu:0": device}, "networks": {"net": net, "new": {"state": "starting"}}, "workers": [worker]}


def test_rows_hold_what_happened_since_the_earlier_look() -> None:
    before, now = look(10, 1.0, 10), look(40, 4.0, 30)
    ready, starting = network_rows(now, before, 2.0)
    assert ready["requests_per_s"] == 15 and ready["waiting"] == "1 of 6 + 38 held" and ready["p99_s"] == 0.004
    assert (starting["state"], starting["waiting"], starting["requests_per_s"]) == ("starting", "-", None)
    [worker] = worker_rows(now, before)
    assert (worker["stage"], worker["requests"], worker["busy"], worker["queued"]) == ("first.1", 20, 1.0, 3)
    assert worker["compute_s"] == 0.15 and worker["queue_s"] == 0.3 and worker["transfer_s"] == 0 and worker["rows"] == 8


def test_a_first_look_shows_what_was_since_the_start() -> None:
    [worker] = worker_rows(look(40, 3.0, 30))
    assert worker["busy"] == 0.75 and worker["compute_s"] == 0.1
    assert network_rows(look(40, 3.0, 30))[0]["requests_per_s"] is None
    assert device_rows(look(1, 1, 1))[0]["stages"] == "net/first new/a"
    [idle] = worker_rows(look(40, 3.0, 30), look(40, 3.0, 30))
    assert math.isnan(idle["busy"]) and math.isnan(idle["queue_s"])


def test_only_networks_at_work_are_shown_if_any_is() -> None:
    before, now = look(10, 1.0, 10), look(40, 4.0, 30)
    assert list(at_work(now, before)["networks"]) == ["net"] and len(at_work(now, before)["workers"]) == 1
    assert list(at_work(now, now)["networks"]) == ["net", "new"] and list(at_work(now, None)["networks"]) == ["net"]


@pytest.mark.parametrize("terminal", [True, False])
def test_a_watcher_shows_a_host_again_and_again(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Host:
        def __init__(self) -> None:
            self.looks = 0
            self.enough = threading.Event()

        def health(self) -> dict[str, Any]:
            self.looks += 1
            if self.looks > 3:
                self.enough.set()
            return look(10 * self.looks, 1.0 * self.looks, 10 * self.looks)

    monkeypatch.setattr(watching, "EVERY_S", 0.01)
    screen, host = StringIO(), Host()
    with watching.watched(Console(file=screen, force_terminal=terminal, width=200), True) as (progress, observe):
        assert observe is not None
        progress("run", 0.5, "round 1")
        observe(host)
        assert host.enough.wait(10)
    shown = screen.getvalue()
    assert "requests/s" in shown and "first.1" in shown and "round 1" in shown
    assert ("\x1b" in shown) == terminal

"""What is measured live, as Prometheus text."""

import re
import time

import pytest
from pipelines import double, fail_on_7, local, request

from autosplit.errors import StageError
from autosplit.machine import Machine, parse_device
from autosplit.running.host import HostManager

pytestmark = pytest.mark.timeout(60)

LINE = re.compile(r'autosplit_[a-z_]+\{([a-z]+="[^"]*",?)+\} [0-9.e+-]+')


def test_prometheus_text_counts_what_happened() -> None:
    with HostManager(Machine.of([parse_device("null:0")]).with_memory({"null:0": 1000})) as host:
        host.add_network("net", [local("a", fail_on_7, "x", "u", 2), local("b", double, "u", "y")], ["x"], ["y"])
        futures = [host.submit("net", request(number)) for number in range(10)]
        with pytest.raises(StageError):
            futures[7].result(10)
        futures[9].result(10)
        while sum(worker["num_requests"] for worker in host.health()["workers"]) < 18:
            time.sleep(0.001)  # a worker counts a request after it handed it on
        text = host.prometheus()
    lines = text.splitlines()
    assert all(line.startswith("# ") or LINE.fullmatch(line) for line in lines) and text.endswith("\n")
    worker = 'network="net",stage="a",replica="1",device="null:0"'
    assert f'autosplit_requests_total{{{worker},outcome="done"}} 4' in lines
    assert f'autosplit_requests_total{{{worker},outcome="failed"}} 1' in lines
    assert f"autosplit_worker_up{{{worker}}} 1" in lines
    assert 'autosplit_requests_running{network="net"} 0' in lines and 'autosplit_device_free_bytes{device="null:0"} 1000' in lines
    assert sum(line.startswith("# TYPE autosplit_requests_total counter") for line in lines) == 1

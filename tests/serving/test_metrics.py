"""What is measured live, as Prometheus text, read by a parser that takes nothing but the format's own words."""

import re
import time

import pytest
from pipelines import double, fail_on_7, local, request

from autosplit.errors import StageError
from autosplit.serving.hostmanager import HostManager
from autosplit.values.machine import Machine, parse_device

pytestmark = pytest.mark.timeout(60)

NAME = "[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\[\\"n])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} ([0-9]+(?:\.[0-9]+)?(?:e[+-][0-9]+)?)")


def parse(text: str) -> dict[str, tuple[str, dict[str, float]]]:
    """Kind and samples of each metric. Raises: ValueError: a line that the format (0.0.4) does not have, or has elsewhere."""
    found: dict[str, tuple[str, dict[str, float]]] = {}
    lines = iter(text.removesuffix("\n").split("\n"))
    current = ""
    for line in lines:
        if helped := re.fullmatch(rf"# HELP ({NAME}) [^\\]+", line):
            current = helped[1]
            typed = re.fullmatch(rf"# TYPE {current} (counter|gauge)", next(lines))
            if typed is None or current in found or current.endswith("_total") != (typed[1] == "counter"):
                raise ValueError(line)
            found[current] = typed[1], {}
        else:
            sample = SAMPLE.fullmatch(line)
            if sample is None or sample[1] != current or sample[2] in found[current][1]:
                raise ValueError(line)
            found[current][1][sample[2]] = float(sample[3])
    if not text.endswith("\n") or not all(samples for _, samples in found.values()):
        raise ValueError(text)
    return found


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
        host.add_network('odd"\\\n', [local("a", double, "x", "y")], ["x"], ["y"])
        parse(host.prometheus())
    found = {name: samples for name, (_, samples) in parse(text).items()}
    worker = 'network="net",stage="a",replica="1",device="null:0"'
    assert found["autosplit_requests_total"][f'{worker},outcome="done"'] == 4
    assert found["autosplit_requests_total"][f'{worker},outcome="failed"'] == 1
    assert found["autosplit_worker_up"][worker] == 1
    assert found["autosplit_requests_running"]['network="net"'] == 0
    assert found["autosplit_device_free_bytes"]['device="null:0"'] == 1000
    assert found["autosplit_latency_seconds"]['network="net",quantile="0.99"'] > 0
    for wrong in ("a 1", 'a{b="c"} 1', text.replace("counter", "count"), text + text, text[:-1], text.replace("} 4", "} four")):
        with pytest.raises((ValueError, KeyError)):
            parse(wrong)

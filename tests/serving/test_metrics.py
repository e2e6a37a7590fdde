"""What is measured live, as Prometheus text, read by Prometheus' own parser."""

import sys
import time

import pytest
from pipelines import double, fail_on_7, local, request

from autosplit.errors import MissingExtraError, StageError
from autosplit.serving.hostmanager import HostManager
from autosplit.values.machine import Machine, parse_device

text_string_to_metric_families = pytest.importorskip("prometheus_client.parser").text_string_to_metric_families

pytestmark = pytest.mark.timeout(60)


def samples(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Name of a sample to labels to value."""
    found: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
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
        odd = samples(host.prometheus())["autosplit_requests_running"]
    found = samples(text)
    worker = {"network": "net", "stage": "a", "replica": "1", "device": "null:0"}.items()
    assert found["autosplit_requests_total"][frozenset((*worker, ("outcome", "done")))] == 4
    assert found["autosplit_requests_total"][frozenset((*worker, ("outcome", "failed")))] == 1
    assert found["autosplit_worker_up"][frozenset(worker)] == 1
    assert found["autosplit_requests_running"] == {frozenset({("network", "net")}): 0}
    assert found["autosplit_device_free_bytes"] == {frozenset({("device", "null:0")}): 1000}
    assert found["autosplit_latency_seconds"][frozenset({("network", "net"), ("quantile", "0.99")})] > 0
    assert odd == {frozenset({("network", name)}): 0 for name in ("net", 'odd"\\\n')}


def test_without_prometheus_client_a_sentence_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with HostManager() as host, pytest.raises(MissingExtraError, match=r"autosplit\[serve\]"):
        host.prometheus()

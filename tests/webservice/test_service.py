"""A server with its plan: requests of real clients, limits, faults, loads and unloads, and its end."""

import json
import os
import re
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from urllib.parse import urlsplit

import psutil
import pytest
import torch
from pipelines import wait_until
from servedplans import Served, first_event, good
from typer.testing import CliRunner

import autosplit
from autosplit import cli


def takes_connections(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def is_read(sock: socket.socket) -> bool:
    """Whether the other end, a process of this machine, has accepted a connection and read all that was sent."""
    ends = [sock.getpeername()[1], sock.getsockname()[1]]
    for line in Path("/proc/net/tcp").read_text(encoding="ascii").splitlines()[1:]:
        _, local, remote, _, queues, *_, inode = line.split()[:10]
        if [int(one.rpartition(":")[2], 16) for one in (local, remote)] == ends:
            return queues.endswith(":00000000") and inode != "0"
    return False


def expected(served: Served, request: dict[str, Any]) -> torch.Tensor:
    return answer_of(served.traced, torch.tensor(request["inputs"][0]["data"]).view(1, 16))


def answer_of(traced: autosplit.Traced, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        (found,) = traced.program(x)
    return found


def test_curl(served: Served, tmp_path: Path) -> None:
    (tmp_path / "request.json").write_text(json.dumps(good(id="mine")))
    words = ["curl", "--silent", "--fail", "--data", "@request.json", f"{served.url}/v2/models/mlp/infer"]
    answer = json.loads(subprocess.run(words, cwd=tmp_path, check=True, capture_output=True).stdout)
    (output,) = answer.pop("outputs")
    (version,) = served.call("GET", "/v2/models/mlp")[1]["versions"]
    assert answer == {"model_name": "mlp", "model_version": version, "id": "mine"}
    assert torch.equal(torch.tensor(output["data"]).view(1, 16), expected(served, good()))


def test_tritons_own_client(served: Served) -> None:
    client = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed")
    with client.InferenceServerClient(served.url.removeprefix("http://")) as server:
        assert server.is_server_live() and server.is_server_ready() and server.is_model_ready("mlp")
        assert server.get_model_metadata("mlp")["inputs"] == [{"name": "input_1", "datatype": "FP32", "shape": [1, 16]}]
        for binary in (True, False):
            given = client.InferInput("input_1", [1, 16], "FP32")
            given.set_data_from_numpy(torch.ones(1, 16).numpy(), binary_data=binary)
            wanted = [client.InferRequestedOutput(served.traced.graph.outputs[0], binary_data=binary)]
            answer = server.infer("mlp", [given], outputs=wanted).as_numpy(served.traced.graph.outputs[0])
            assert torch.equal(torch.from_numpy(answer.copy()), answer_of(served.traced, torch.ones(1, 16)))


def test_many_callers_get_their_own_answers(served: Served) -> None:
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda seed: served.call("POST", "/v2/models/mlp/infer", good(seed)), range(64)))
    assert [status for status, _ in answers] == [200] * 64
    for seed, (_, answer) in enumerate(answers):
        assert torch.equal(torch.tensor(answer["outputs"][0]["data"]).view(1, 16), expected(served, good(seed)))


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("POST", "/v2/models/nosuch/infer", 404, "model 'nosuch' is not in service; the models are: mlp"),
        ("POST", "/v2/models/mlp/versions/99/infer", 404, "model 'mlp' has version"),
        ("POST", "/v2/models/..%2f..%2fetc%2fpasswd/infer", 404, ""),
        ("POST", "/v2/repository/models/..%2fplan/load", 404, ""),
        ("POST", "/v2/repository/models/nosuch/load", 400, "there is no plan for a model 'nosuch'"),
        ("POST", "/v2/repository/models/nosuch/unload", 400, "model 'nosuch' is not in service"),
        ("POST", "/v2/models/mlp/infer", 400, "the request does not fit the model"),
        ("GET", "/v2/models/mlp/infer", 405, "{'error': \"GET '/v2/models/mlp/infer': Method Not Allowed\"}"),
        ("GET", "/nosuch", 404, "{'error': \"GET '/nosuch': Not Found\"}"),
    ],
)
def test_a_wrong_call_gets_its_status_and_a_sentence(served: Served, method: str, path: str, status: int, said: str) -> None:
    found, answer = served.call(method, path, {"inputs": []} if method == "POST" else None)
    assert found == status and said in str(answer)


def test_a_caller_that_leaves_cancels_its_request(served: Served) -> None:
    body = json.dumps(good()).encode()
    head = f"POST /v2/models/mlp/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    place = urlsplit(served.url)
    for _ in range(50):
        with socket.create_connection((place.hostname or "", place.port or 0)) as connection:
            connection.sendall(head + body)
    wait_until(lambda: served.application.bodies.num_bytes == 0)
    assert served.call("POST", "/v2/models/mlp/infer", good())[0] == 200


def test_a_new_version_takes_over_while_requests_run(served: Served) -> None:
    ended = threading.Event()
    statuses = list[int]()

    def ask() -> None:
        while not ended.is_set():
            statuses.append(served.call("POST", "/v2/models/mlp/infer", good())[0])

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    before = served.call("GET", "/v2/models/mlp")[1]["versions"]
    assert served.call("POST", "/v2/repository/models/mlp/load") == (200, {})
    after = served.call("GET", "/v2/models/mlp")[1]["versions"]
    ended.set()
    for thread in threads:
        thread.join()
    assert set(statuses) == {200} and int(after[0]) == int(before[0]) + 1
    assert len(served.application.host.networks()) == 1


def test_metrics_index_and_events(served: Served) -> None:
    served.call("POST", "/v2/models/mlp/infer", good())
    _, metrics = served.call("GET", "/metrics")
    assert b'autosplit_http_requests_total{model="mlp",status="200"}' in metrics and b"autosplit_worker_up" in metrics
    assert served.call("POST", "/v2/repository/index")[1][0]["state"] == "READY"
    event = first_event(served.url)
    assert event["models"][0]["ready"] is True and {"first", "second"} == {worker["stage"] for worker in event["workers"]}
    assert b"<title>autosplit</title>" in served.call("GET", "/")[1]


def test_readiness_follows_the_stages(served: Served) -> None:
    (network,) = served.application.host.networks()
    engine = served.application.host[network]
    healthy = engine.health()
    with patch.object(type(engine), "health", lambda _, network="": [replace(one, state="dead") for one in healthy]):
        assert served.call("GET", "/v2/health/ready")[0] == served.call("GET", "/v2/models/mlp/ready")[0] == 503
        assert served.call("POST", "/v2/repository/index")[1][0]["state"] == "UNREADY"
    os.kill(served.application.host[network].pids[0], signal.SIGKILL)
    assert served.call("POST", "/v2/models/mlp/infer", good())[0] == 200
    wait_until(lambda: served.call("GET", "/v2/health/ready")[0] == 200)


def test_a_token_guards_all_but_health_and_the_page(served: Served) -> None:
    served.application.token = "open sesame"
    try:
        assert served.call("GET", "/v2/health/ready")[0] == served.call("GET", "/health")[0] == served.call("GET", "/")[0] == 200
        for path in ("/v2", "/events", "/metrics", "/v2/models/mlp"):
            assert served.call("GET", path)[0] == 401
            assert served.call("GET", path, headers={"authorization": "Bearer wrong"})[0] == 401
        assert served.call("GET", "/v2", headers={"authorization": "Bearer open sesame"})[0] == 200
    finally:
        served.application.token = ""


def test_the_server_of_the_document_ends_in_peace_after_sigterm(
    served: Served, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The document's own lines start it, with a second model, and a request is under way when they end it."""
    code = (Path(__file__).parents[2] / "docs" / "http.md").read_text(encoding="utf-8")
    [code] = [block for block in re.findall(r"```python\n(.*?)```", code, re.DOTALL) if '"serve"' in block]
    for line, replaced in {'"mlp.yaml"': '"mlp.yaml", "one=mlp.yaml"', "server.terminate()": "end(server, url)"}.items():
        assert code.count(line) == 1
        code = code.replace(line, replaced)
    servers: list[subprocess.Popen[bytes]] = []
    children: list[psutil.Process] = []

    def end(process: subprocess.Popen[bytes], url: str) -> None:
        servers.append(process)
        assert Served(served.traced, served.application, url).call("POST", "/v2/models/one/infer", good())[0] == 200
        children.extend(psutil.Process(process.pid).children(recursive=True))
        body = json.dumps(good()).encode()
        head = f"POST /v2/models/one/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        place = urlsplit(url)
        with socket.create_connection((place.hostname or "", place.port or 0), timeout=60) as under_way:
            under_way.sendall(head + body[:10])
            wait_until(lambda: is_read(under_way))
            process.terminate()
            wait_until(lambda: not takes_connections(place.hostname or "", place.port or 0))
            under_way.sendall(body[10:])
            assert under_way.recv(65536).startswith(b"HTTP/1.1 200")

    monkeypatch.chdir(served.application.repository.files()["mlp"].parent)
    exec(code, {"end": end})
    assert servers[0].returncode == 0 and "Traceback" not in capfd.readouterr().err
    assert children and not psutil.wait_procs(children, timeout=30)[1]


def test_a_load_at_a_rate_and_of_callers(served: Served, tmp_path: Path) -> None:
    plan = served.application.repository.files()["mlp"]
    words = ["bench", served.url, "mlp", "--time", "250ms", "--json"]
    for more in (["--rate", "20,40", "--plan", str(plan), "--picture", str(tmp_path / "load.svg")], ["--in-flight", "4"]):
        done = CliRunner().invoke(cli.app, [*words, *more])
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        loads, http_s = found["loads"], found["http_s"]
        assert all(load["failed"] == 0 and 0 < load["p50_s"] <= load["p99_s"] for load in loads)
        if "--plan" in more:  # two stages of 0.1 ms
            assert 1e-4 < http_s < 1.0  # measured by refused requests, which no stage saw
            assert [load["predicted_p50_s"] - http_s for load in loads] == pytest.approx([2e-4, 2e-4])
            assert all(1.99e-4 < load["predicted_p99_s"] - http_s < 1e-3 for load in loads)
    assert (tmp_path / "load.svg").read_bytes().startswith(b"<?xml")


def test_a_port_in_use_is_told_before_a_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = taken.getsockname()
        done = CliRunner().invoke(cli.app, ["serve", "none.yaml", "--port", str(place[1])])
    assert done.exit_code == 1 and f"cannot listen at 127.0.0.1:{place[1]}" in done.output


@pytest.mark.parametrize("words", [[], ["--rate", "0"], ["--rate", "fast"], ["--rate", "1", "--in-flight", "1"]])
def test_a_load_that_cannot_be(served: Served, words: list[str]) -> None:
    assert CliRunner().invoke(cli.app, ["bench", served.url, *words]).exit_code == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "nonsense", "http://127.0.0.1:9/\x00"])
def test_a_load_on_no_server_is_a_sentence(url: str) -> None:
    done = CliRunner().invoke(cli.app, ["bench", url, "--in-flight", "1", "--json"])
    assert done.exit_code == 1 and "Traceback" not in done.output and json.loads(done.stdout)["error"] == "UsageError"

"""A served plan beside other servers, and what HTTP adds to ``submit``.

    python -m benchmarks.serving [--minutes 20] [--models mobilenet,bert] [--clients 1,4,16,64] [--rounds 3]
        [--ray-python PYTHON] [--mlserver-python PYTHON] [--write-table]

All servers of a model run at the same time and are measured in turns, by the same client with the same request: as binary data,
and as JSON beside MLServer, which takes nothing else. This service lets requests wait for 60 s in place of 1 s, since the others
refuse none. Ray Serve and MLServer run ONNX Runtime on the exported model, a worker on
each core, in environments of their own; MLServer 1.7 needs uvloop below 0.22 there. ``--minutes`` bounds the measurements;
exporting and starting take a few minutes more.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any
from urllib.request import Request, urlopen

import torch
from torch import nn

import autosplit
from autosplit.backends.workspace import Workspace
from autosplit.deploying.service import as_call
from autosplit.devices.limits import affinity
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.planfile import write_plan
from autosplit.webservice.load import Target, find_target, load_in_flight
from autosplit.webservice.tensors import DATATYPES, JSON_LENGTH
from benchmarks.pages import table, with_section

PAGE = Path("benchmarks/serving.md")
MODELS = {"mobilenet": "transformers:MobileNetV2Model", "bert": "transformers:BertModel"}
SIZES = {"1 KB": 256, "600 KB": 150_528, "10 MB": 2_621_440}
"""Floats of a request."""

CORES = [f"cpu:{core}" for core in affinity()]
START_S = 120.0
LEAST_S = 0.5
"""Seconds that each server is measured for in a round, at least."""

OURS, ECHO, SUBMIT = "autosplit", "Starlette alone, echoing", "submit in the same process"
RAY, OURS_JSON, MLSERVER = "Ray Serve", "autosplit, JSON", "MLServer, JSON"

Cells = dict[str, list[tuple[float, float, float]]]
"""Server to requests/s, p50 and p99 in seconds, of each round."""


class Double(nn.Module):
    """Twice its input: a model that costs next to nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Twice ``x``."""
        return 2 * x


def double(num_floats: int = 256) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    """The model for requests of this size."""
    return Double().eval(), (torch.zeros(1, num_floats),)


def started(stack: ExitStack, words: Sequence[str], **settings: Any) -> "subprocess.Popen[str]":
    """A process that ends with the stack."""
    process = stack.enter_context(subprocess.Popen(words, text=True, **settings))
    stack.callback(process.terminate)
    return process


def ours(stack: ExitStack, plan: Path, *flags: str) -> str:
    """The address of ``autosplit serve``."""
    words = [sys.executable, "-m", "autosplit", "serve", f"model={plan}", "--port", "0", "--json", *flags]
    process = started(stack, words, stdout=subprocess.PIPE)
    assert process.stdout is not None
    url: str = json.loads(process.stdout.readline())["url"]
    return url


def peer(stack: ExitStack, python: str, port: int, kind: str, target: Target, *words: str) -> Target:
    """The same request to another server, once that one answers it."""
    started(stack, [python, "benchmarks/serving_peers.py", kind, str(port), *words], stdout=subprocess.DEVNULL)
    found = Target(f"http://127.0.0.1:{port}/v2/models/model/infer", target.body, target.headers)
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s:
        try:
            asked(found)
        except OSError:
            time.sleep(0.5)
        else:
            return found
    raise TimeoutError(f"{kind} does not answer within {START_S:g} s")


def asked(target: Target) -> bytes:
    """One answer. Raises: OSError: there is none."""
    with urlopen(Request(target.url, target.body, dict(target.headers)), timeout=60) as answer:
        content: bytes = answer.read()
    return content


def as_json(target: Target) -> Target:
    """The same request with its numbers in JSON, as MLServer takes it, which has no binary tensors."""
    end = int(target.headers[JSON_LENGTH])
    rows, dtypes = [], {datatype: getattr(torch, dtype) for dtype, datatype in DATATYPES.items()}
    for row in json.loads(target.body[:end])["inputs"]:
        begin, end = end, end + row.pop("parameters")["binary_data_size"]
        numbers = torch.frombuffer(bytearray(target.body[begin:end]), dtype=dtypes[row["datatype"]])
        rows.append({**row, "data": numbers.tolist()})
    return Target(target.url, json.dumps({"inputs": rows}).encode(), {"content-type": "application/json"})


def in_turns(calls: dict[str, Callable[[float], tuple[float, float, float]]], rounds: int, seconds: float) -> Cells:
    """Measure each in each round; the first round starts with another one than the second."""
    found: Cells = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            found[name].append(calls[name](seconds))
    return found


def over_http(target: Target, clients: int) -> Callable[[float], tuple[float, float, float]]:
    """Measures a server with so many callers."""

    def measured(seconds: float) -> tuple[float, float, float]:
        found = load_in_flight(target, clients, seconds)
        if set(found.statuses) != {200}:
            raise RuntimeError(f"{target.url} answered with {dict(found.statuses)}")
        return found.answered_per_s, found.latency.p50_s, found.latency.p99_s

    return measured


def by_submit(network: Any, x: torch.Tensor) -> Callable[[float], tuple[float, float, float]]:
    """Measures ``submit`` from an event loop of this process, as the server calls it."""

    async def ask(seconds: float) -> list[float]:
        times_s, end_s = list[float](), time.perf_counter() + seconds
        while (begun_s := time.perf_counter()) < end_s:
            await network.call_async(x)
            times_s.append(time.perf_counter() - begun_s)
        return sorted(times_s)

    def measured(seconds: float) -> tuple[float, float, float]:
        times_s = asyncio.run(ask(seconds))
        return len(times_s) / sum(times_s), median(times_s), times_s[int(0.99 * len(times_s))]

    return measured


def one_stage(spec: str, backend: str, cores: Sequence[str], path: Path) -> autosplit.Traced:
    """Write a plan of one stage, with a copy on each core."""
    traced = autosplit.trace(spec)
    stage = Stage("all", tuple(op.name for op in traced.graph.ops), tuple(cores), backend, 1, 1e-4)
    write_plan(Plan(traced.source, traced.graph.hash, "", (stage,), UNKNOWN), traced.graph, path)
    return traced


def overhead(rounds: int, seconds: float, folder: Path, port: int) -> str:
    """The section on what HTTP adds."""
    rows = []
    for label, num_floats in SIZES.items():
        with ExitStack() as stack:
            spec, plan = f"benchmarks.serving:double?num_floats={num_floats}", folder / f"double{num_floats}.yaml"
            one_stage(spec, "eager", CORES[:1], plan)
            target = find_target(ours(stack, plan, "--model", spec), "model")
            echo = peer(stack, sys.executable, port, "echo", target)
            here = stack.enter_context(autosplit.load(plan, model=spec).open())
            calls = {SUBMIT: by_submit(here, torch.zeros(1, num_floats)), ECHO: over_http(echo, 1), OURS: over_http(target, 1)}
            in_turns(calls, 1, LEAST_S)
            found = in_turns(calls, rounds, seconds)
        p50_ms = {name: 1e3 * median(cell[1] for cell in cells) for name, cells in found.items()}
        added = p50_ms[OURS] - p50_ms[SUBMIT]
        times = [f"{p50_ms[name]:.2f}" for name in (SUBMIT, ECHO, OURS)]
        rows.append([label, *times, f"{added:.2f}", f"{p50_ms[OURS] / (p50_ms[SUBMIT] + p50_ms[ECHO]):.2f}"])
        print(rows[-1], flush=True)
    titles = ["request and answer", SUBMIT, ECHO, f"{OURS} over HTTP", "added by HTTP", "HTTP over submit + echo"]
    said = "Medians of latency in ms, one caller. The stage doubles its input. Echoing is the least that HTTP costs."
    return f"## Over submit\n\n{said}\n\n{table(titles, rows)}"


def export(spec: str, traced: autosplit.Traced, path: Path) -> None:
    """Write the module as ONNX for the other servers."""
    args, kwargs = as_call(traced, list(traced.example_inputs))
    program = torch.onnx.export(load_model(spec).module, tuple(args), kwargs=dict(kwargs), dynamo=True, verbose=False)
    assert program is not None
    program.save(path, external_data=True)


def beside_peers(name: str, given: argparse.Namespace, seconds: float, folder: Path, port: int) -> str:
    """The section on one model."""
    plan, onnx = folder / f"{name}.yaml", folder / f"{name}.onnx"
    traced = one_stage(MODELS[name], "onnxruntime", CORES, plan)
    export(MODELS[name], traced, onnx)
    rows = []
    with ExitStack() as stack:
        targets = {OURS: find_target(ours(stack, plan, "--queue-time", "60s"), "model")}
        words = (str(onnx.resolve()), str(len(CORES)))
        if given.ray_python:
            targets[RAY] = peer(stack, given.ray_python, port, "ray", targets[OURS], *words)
        if given.mlserver_python:
            (folder / name).mkdir()
            words = (*words, str(folder / name))
            targets[OURS_JSON] = as_json(targets[OURS])
            targets[MLSERVER] = peer(stack, given.mlserver_python, port + 10, "mlserver", targets[OURS_JSON], *words)
        for clients in map(int, given.clients.split(",")):
            calls = {server: over_http(target, clients) for server, target in targets.items()}
            in_turns(calls, 1, LEAST_S)
            for server, cells in in_turns(calls, given.rounds, seconds).items():
                rate, p50_s, p99_s = (median(column) for column in zip(*cells, strict=True))
                rows.append([str(clients), server, f"{rate:.1f}", f"{1e3 * p50_s:.1f}", f"{1e3 * p99_s:.1f}"])
                print(rows[-1], flush=True)
    return f"## {name}\n\n{table(['callers', 'server', 'requests/s', 'p50 ms', 'p99 ms'], rows)}"


def main() -> None:
    """Measure, print, and write the page if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--models", default="mobilenet,bert")
    parser.add_argument("--clients", default="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8700)
    parser.add_argument("--ray-python", default="")
    parser.add_argument("--mlserver-python", default="")
    parser.add_argument("--write-table", action="store_true")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers end with this process
    names = [name for name in given.models.split(",") if name]
    num_servers = 1 + bool(given.ray_python) + 2 * bool(given.mlserver_python)
    num_cells = given.rounds * (3 * len(SIZES) + len(names) * num_servers * len(given.clients.split(",")))
    seconds = max(LEAST_S, 60 * given.minutes / num_cells)
    os.environ["PYTHONPATH"] = str(Path.cwd())  # the servers import this module too
    page = PAGE.read_text(encoding="utf-8") if PAGE.exists() else "# Serving over HTTP\n"
    with Workspace() as workspace:
        sections = [overhead(given.rounds, seconds, workspace.folder, given.port)]
        sections += [beside_peers(name, given, seconds, workspace.folder, given.port) for name in names]
    for section in sections:
        print(section)
        page = with_section(page, section)
    if given.write_table:
        PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

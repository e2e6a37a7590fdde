"""Storms of faults on running pipelines: ``python -m benchmarks.chaos [--minutes N] [--seed N] [--json FILE] [SCENARIO ...]``.

Each scenario streams requests through real worker processes, or through threads of this process, while faults strike at random
times. Afterwards the pipeline is closed, and every request must have its right answer, or an error that it has earned. In a
storm of callers, networks are closed again and again under threads that submit and cancel. The exit code is 1 if
a count is not 0.
"""

import argparse
import contextlib
import json
import logging
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch

from autosplit.devices.limits import affinity
from autosplit.devices.processes import spawn_worker
from autosplit.errors import DeadlineError, RefusedError, StageError, WorkerError
from autosplit.running.engine import Engine
from autosplit.running.modules import PythonFunction
from autosplit.running.pipeline import InProcess, Pipeline
from autosplit.running.stage import StagePlacement
from autosplit.serving.hostmanager import HostManager
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.machine import parse_device
from autosplit.values.plan import Process
from benchmarks.callers import Callers, as_request, verdict

LAYOUTS = {1: (1,), 2: (1, 1), 3: (1, 2), 4: (2, 2), 8: (2, 2, 2, 2)}
"""Number of workers to the replicas of each stage."""

HANG_S = 1.0
"""Seconds after which a worker that holds up a request is killed."""

LIMIT_S = 90.0
"""Seconds within which a request must be taken in, every request must be answered, and a pipeline must close."""

CRASH, HANG, RAISE = 1.0, 2.0, 3.0

ZEROS = ("wrong", "lost", "hung", "unresolved", "left_behind")


@dataclass(frozen=True, slots=True)
class Scenario:
    """A pipeline and the faults that strike it, one every ``mean_s`` seconds on average.

    ``process`` is where its stages run; ``closes`` makes it a storm of callers.
    """

    name: str
    num_workers: int
    faults: tuple[str, ...]
    mean_s: float = 1.0
    process: Process = "workers"
    closes: bool = False


SCENARIOS = [
    Scenario("storm of callers", 1, ("kill",), 0.7, closes=True),
    Scenario("storm of callers", 3, ("kill",), 0.7, closes=True),
    Scenario("storm of callers", 2, ("raise",), 0.7, process="caller", closes=True),
    Scenario("requests that raise", 2, ("raise",), 0.1, process="caller"),
    Scenario("kill a worker", 1, ("kill",)),
    Scenario("kill a worker", 2, ("kill",), 0.7),
    Scenario("kill a worker", 8, ("kill",), 0.7),
    Scenario("kill all workers", 4, ("kill all",), 2.0),
    Scenario("kill all workers", 8, ("kill all",), 4.0),
    Scenario("kill the fork server", 4, ("kill server",), 4.0),
    Scenario("kill the fork server", 8, ("kill server",), 6.0),
    Scenario("stop a worker", 2, ("stop",), 2.0),
    Scenario("stop a worker", 3, ("stop",), 2.0),
    Scenario("stop the fork server", 4, ("stop server", "kill"), 6.0),
    Scenario("crashing requests", 1, ("crash",), 0.5),
    Scenario("crashing requests", 4, ("crash",), 0.5),
    Scenario("hanging requests", 2, ("hang",), 3.0),
    Scenario("kill while loading", 2, ("kill", "kill new"), 1.0),
    Scenario("kill while loading", 4, ("kill", "kill new"), 1.0),
    *(
        Scenario("everything", num, ("kill", "kill all", "kill server", "stop", "stop server", "crash", "hang"), 2.0)
        for num in LAYOUTS
    ),
]


@dataclass(slots=True)
class Result:
    """The counts of one scenario; all of ``ZEROS`` must be 0.

    ``num_given_up`` are requests that at least two deaths of their workers hit by chance; ``num_reopened`` counts how often
    the pipeline gave up and was opened again.
    """

    scenario: Scenario
    seconds: float = 0.0
    num_requests: int = 0
    num_faults: int = 0
    num_restarts: int = 0
    num_given_up: int = 0
    num_reopened: int = 0
    close_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def blame(self, kind: str, note: str, count: int = 1) -> None:
        """Count faults of the runtime, and keep the first few stories."""
        self.counts[kind] += count
        if len(self.notes) < 20:
            self.notes.append(f"{kind}: {note}")

    def row(self) -> dict[str, Any]:
        """The row of the table."""
        return {
            "scenario": self.scenario.name,
            "workers": self.scenario.num_workers,
            "process": self.scenario.process,
            "seconds": round(self.seconds),
            "requests": self.num_requests,
            "faults": self.num_faults,
            "restarts": self.num_restarts,
            "given_up": self.num_given_up,
            "reopened": self.num_reopened,
            "close_s": round(self.close_s, 1),
            **{kind: self.counts[kind] for kind in ZEROS},
        }


@dataclass(slots=True)
class Asked:
    """A request under way: what it was to do, and what it was allowed to end with."""

    number: int
    what: float
    priority: int
    may_expire: bool
    future: "Future[tuple[torch.Tensor, ...]]"
    cancelled: bool = False


def idle(connection: Connection) -> None:
    """A worker that ends at once."""


def step(x: torch.Tensor) -> torch.Tensor:
    """A stage: add 1, or crash, hang or raise if the request says so."""
    if x[1] == CRASH:
        os.kill(os.getpid(), signal.SIGKILL)
    if x[1] == HANG:
        time.sleep(600)
    if x[1] == RAISE:
        raise ValueError("as the request wants it")
    time.sleep(0.001)
    result = x.clone()
    result[0] += 1
    return result


def layout(scenario: Scenario) -> tuple[int, ...]:
    """The replicas of each stage; the caller's process holds one stage."""
    return LAYOUTS[scenario.num_workers] if scenario.process == "workers" else (scenario.num_workers,)


def placements(scenario: Scenario) -> list[StagePlacement]:
    """Stages in a chain, their workers on the cores in turn."""
    module = PythonFunction("benchmarks.chaos:step", ("benchmarks",))
    specs = [TensorSpec(f"v{number}", (4,), (1,), "float32") for number in range(len(layout(scenario)) + 1)]
    cores, stages, placed = affinity(), [], 0
    for number, replicas in enumerate(layout(scenario)):
        devices = tuple(parse_device(f"cpu:{cores[(placed + replica) % len(cores)]}") for replica in range(replicas))
        placed += replicas
        stages.append(StagePlacement(f"s{number}", module, (specs[number],), (specs[number + 1],), devices, hang_s=HANG_S))
    return stages


def open_pipeline(scenario: Scenario) -> Engine:
    """The pipeline of a scenario."""
    stages, last = placements(scenario), f"v{len(layout(scenario))}"
    if scenario.process == "caller":
        return InProcess(stages, ["v0"], [last])
    max_restarts = 1 if "kill new" in scenario.faults else 5  # so that it gives up, and is opened again
    return Pipeline(stages, ["v0"], [last], max_restarts=max_restarts)


class Storm:
    """Strikes one pipeline with the faults of its scenario until it is stopped."""

    def __init__(self, scenario: Scenario, pipeline: Engine, chance: random.Random) -> None:
        self.ordered: deque[float] = deque()
        """Faults that requests bring along: the next one takes one."""
        self.num_faults = 0
        self._scenario, self._pipeline, self._chance = scenario, pipeline, chance
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._strike, name="storm")
        self._thread.start()

    def stop(self) -> None:
        """Strike no more."""
        self._stopping.set()
        self._thread.join()

    def _strike(self) -> None:
        while not self._stopping.wait(min(self._chance.expovariate(1 / self._scenario.mean_s), 2 * self._scenario.mean_s)):
            fault, pids = self._chance.choice(self._scenario.faults), self._pipeline.pids
            self.num_faults += 1
            match fault:
                case "kill" | "stop":
                    send(self._chance.choice(pids), signal.SIGKILL if fault == "kill" else signal.SIGSTOP)
                case "kill all":
                    for pid in pids:
                        send(pid, signal.SIGKILL)
                case "kill server" | "stop server":
                    send(parent(pids[0]), signal.SIGKILL if fault == "kill server" else signal.SIGSTOP)
                case "kill new":
                    self._kill_new(set(pids))
                case "crash":
                    self.ordered.append(CRASH)
                case "hang":
                    self.ordered.append(HANG)
                case "raise":
                    self.ordered.append(RAISE)

    def _kill_new(self, old: set[int]) -> None:
        """Kill a worker, and each that is started in its place within a second: all that load."""
        send(self._chance.choice(sorted(old)), signal.SIGKILL)
        until = time.monotonic() + 1.0
        while time.monotonic() < until and not self._stopping.is_set():
            new = set(self._pipeline.pids) - old
            for pid in new:
                send(pid, signal.SIGKILL)
            old |= new
            time.sleep(0.005)


def parent(pid: int) -> int:
    """The parent of a process, 0 if it is gone."""
    try:
        return psutil.Process(pid).ppid()
    except (psutil.Error, ValueError):
        return 0


def send(pid: int, sign: signal.Signals) -> None:
    """Signal a worker or a fork server of this process, and no process that got the number of one that has ended."""
    if os.getpid() in (parent(pid), parent(parent(pid))):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, sign)


def stream(result: Result, storm: Storm, pipeline: Engine, chance: random.Random, until_s: float) -> list[Asked]:
    """Submit requests until the time is over: some urgent, some with a deadline, some cancelled later."""
    asked: list[Asked] = []
    room = threading.Semaphore(64)
    while time.monotonic() < until_s:
        if pipeline.failure is not None and isinstance(pipeline, Pipeline):
            reopen(result, pipeline)
        if not room.acquire(timeout=LIMIT_S):
            result.blame("hung", f"no answer for {LIMIT_S:.0f} s at request {len(asked)}")
            break
        try:
            one = ask(pipeline, len(asked), storm.ordered.popleft() if storm.ordered else 0.0, chance)
        except WorkerError as failure:  # the pipeline gave up since it was looked at
            room.release()
            if pipeline.failure is None:
                result.blame("lost", f"request {len(asked)} was refused: {failure}")
            continue
        except RefusedError as failure:
            result.blame("hung", str(failure))
            break
        asked.append(one)

        one.future.add_done_callback(lambda _: room.release())
        if chance.random() < 0.03:
            victim = asked[chance.randrange(max(0, len(asked) - 40), len(asked))]
            victim.cancelled = True
            victim.future.cancel()
    wait([one.future for one in asked], timeout=LIMIT_S)
    return asked


def ask(pipeline: Engine, number: int, what: float, chance: random.Random) -> Asked:
    """Submit one request, with a priority and perhaps a deadline."""
    priority, may_expire = chance.choice((-1, 0, 0, 1)), chance.random() < 0.05
    future = pipeline.submit(
        [as_request(number, what)],
        priority=priority,
        deadline_s=chance.uniform(0.001, 0.05) if may_expire else None,
        timeout_s=LIMIT_S,
    )
    return Asked(number, what, priority, may_expire, future)


def reopen(result: Result, pipeline: Pipeline) -> None:
    """Open a pipeline that has given up again. Only workers that are killed while they load may make it give up."""
    if "kill new" not in result.scenario.faults:
        result.blame("lost", f"the pipeline gave up: {pipeline.failure}")
    result.num_reopened += 1
    until = time.monotonic() + LIMIT_S
    while time.monotonic() < until:
        with contextlib.suppress(WorkerError):  # a worker was killed while it loaded
            pipeline.reopen()
            return
    result.blame("hung", "the pipeline cannot be opened again")


def judge(result: Result, one: Asked, num_stages: int) -> None:
    """Compare the end of a request with what it may end with."""
    failure = one.future.exception(0) if one.future.done() and not one.future.cancelled() else None
    if not one.future.done():
        result.blame("hung", f"request {one.number} has no answer after {LIMIT_S:.0f} s")
    elif one.future.cancelled() or isinstance(failure, DeadlineError):
        if not (one.cancelled if one.future.cancelled() else one.may_expire):
            result.blame("lost", f"request {one.number} was cancelled or expired, and nobody asked for it")
    elif one.what == RAISE and isinstance(failure, StageError):
        pass
    elif isinstance(failure, WorkerError) and "was tried" in str(failure):
        result.num_given_up += one.what == 0.0
    elif failure is not None:
        if not (result.num_reopened and isinstance(failure, WorkerError)):
            result.blame("lost", f"request {one.number}: {failure!r}")
    elif one.what:
        result.blame("wrong", f"request {one.number} was to end its worker and has an answer")
    elif (value := float(one.future.result()[0][0])) != one.number + num_stages:
        result.blame("wrong", f"request {one.number} has the answer {value:g} instead of {one.number + num_stages}")


def run(scenario: Scenario, seconds: float, seed: int) -> Result:
    """One scenario from the opening of its pipeline to what is left of it."""
    result, chance = Result(scenario), random.Random(seed)
    spawn_worker("benchmarks.chaos:idle").close()  # the fork server belongs to what was there before
    before = belongings()
    if scenario.closes:
        run_callers(result, seconds, chance)
    else:
        run_stream(result, seconds, chance)
    for kind, left in leftovers(before).items():
        result.blame("left_behind", f"{kind}: {left}")
    return result


def run_callers(result: Result, seconds: float, chance: random.Random) -> None:
    """A storm of callers: open a network and close it under its callers, until the time is over."""
    start_s = time.monotonic()
    while time.monotonic() < start_s + seconds:
        close_under_callers(result, chance)
    result.seconds = time.monotonic() - start_s


def close_under_callers(result: Result, chance: random.Random) -> None:
    """Open a network, close it in one of several ways while callers use it, and judge their requests."""
    scenario = result.scenario
    num_stages = len(layout(scenario))
    host = HostManager()
    outputs = [f"v{num_stages}"]
    engine = host.add_network("net", placements(scenario), ["v0"], outputs, process=scenario.process)
    storm = Storm(scenario, engine, random.Random(chance.random()))
    callers = Callers(engine, chance.randrange(1 << 20), lambda story: result.blame("lost", story))
    time.sleep(chance.uniform(0.05, 1.5))
    drain = chance.random() < 0.6
    endings: list[Callable[[], None]] = [
        lambda: engine.close(drain=drain),
        lambda: host.remove_network("net", when_busy="drain" if drain else "fail"),
        lambda: host.close(drain=drain),
    ]
    close_within_limit(result, chance.choice(endings))
    if not callers.join(LIMIT_S):
        result.blame("hung", f"a caller still waits {LIMIT_S:.0f} s after the network was closed")
    storm.stop()
    result.num_faults += storm.num_faults
    result.num_restarts += engine.restarts
    result.num_requests += len(callers.asked)
    for number, future in callers.asked:
        if (found := verdict(number, future, num_stages)) is not None:
            result.blame(*found)
    host.close()


def close_within_limit(result: Result, close: Callable[[], None]) -> None:
    """Close a pipeline, and keep the longest time that it took. A close that does not return is left to its thread."""
    closing_s = time.monotonic()
    closer = threading.Thread(target=close, daemon=True)
    closer.start()
    closer.join(LIMIT_S)
    result.close_s = max(result.close_s, time.monotonic() - closing_s)
    if closer.is_alive():
        result.blame("hung", f"close() has not returned after {LIMIT_S:.0f} s")


def run_stream(result: Result, seconds: float, chance: random.Random) -> None:
    """Stream requests through one pipeline, and judge them once it is closed."""
    scenario, start_s = result.scenario, time.monotonic()
    pipeline = open_pipeline(scenario)
    storm = Storm(scenario, pipeline, random.Random(chance.random()))
    try:
        asked = stream(result, storm, pipeline, chance, time.monotonic() + seconds)
    finally:
        storm.stop()
        result.num_faults, result.num_restarts = storm.num_faults, pipeline.restarts
        close_within_limit(result, lambda: pipeline.close(drain=False))
        result.seconds = time.monotonic() - start_s
    result.num_requests = len(asked)
    for one in asked:
        judge(result, one, len(layout(scenario)))
        if not one.future.done():
            result.blame("unresolved", f"request {one.number} has no answer after the pipeline was closed")
    if 2 * result.num_given_up > result.num_restarts:
        result.blame("lost", f"{result.num_given_up} requests were given up, for {result.num_restarts} deaths of workers")


def belongings() -> dict[str, set[str]]:
    """What this process holds by name: descriptors, shared memory, temporary files, threads and workers."""
    shared = {path.name for path in Path("/dev/shm").iterdir() if "autosplit" in path.name or str(os.getpid()) in path.name}
    workers = {
        str(worker.pid)
        for server in psutil.Process().children()
        for worker in server.children()
        if worker.status() != psutil.STATUS_ZOMBIE
    }
    return {
        "descriptors": {f"{count} of {kind}" for kind, count in Counter(map(target, Path("/proc/self/fd").iterdir())).items()},
        "shared memory": shared,
        "files": {str(path) for path in Path(tempfile.gettempdir()).rglob("*")},
        "threads": {thread.name for thread in threading.enumerate()},
        "workers": workers,
    }


def target(path: Path) -> str:
    """The kind of a descriptor, without the numbers of sockets and pipes."""
    try:
        return str(path.readlink()).split(":[")[0]
    except OSError:
        return "gone"


def leftovers(before: Mapping[str, set[str]]) -> dict[str, list[str]]:
    """What is there now and was not before, after up to ten seconds in which the kernel may end processes."""
    until = time.monotonic() + 10
    while True:
        after = belongings()
        left = {kind: sorted(names - before[kind] - {"autosplit-spawner"}) for kind, names in after.items()}
        left = {kind: names for kind, names in left.items() if names}
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as text, each column as wide as its widest cell."""
    widths = {key: max(len(key), *(len(str(row[key])) for row in rows)) for key in rows[0]}
    lines = ["  ".join(key.rjust(width) for key, width in widths.items())]
    lines += ["  ".join(str(row[key]).rjust(width) for key, width in widths.items()) for row in rows]
    return "\n".join(lines)


def main() -> int:
    """Parse, run the scenarios, print the table; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("scenarios", nargs="*", help="names of scenarios, or parts of them; all by default")
    parser.add_argument("--minutes", type=float, default=5.0, help="of all scenarios together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the storms (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the counts and the stories of faults to this file")
    options = parser.parse_args()
    logging.getLogger("autosplit").setLevel(logging.ERROR)
    names = options.scenarios or [""]
    chosen = [scenario for scenario in SCENARIOS if any(name in scenario.name for name in names)]
    if not chosen:
        parser.error(f"no scenario is called {options.scenarios}; there are: {', '.join({one.name for one in SCENARIOS})}")
    with tempfile.TemporaryDirectory(prefix="autosplit-chaos-") as folder:
        tempfile.tempdir = folder
        results = run_all(chosen, 60 * options.minutes / len(chosen), options.seed)
    print(table([result.row() for result in results]))
    if options.json:
        rows = [{**asdict(result.scenario), **result.row(), "notes": result.notes} for result in results]
        options.json.write_text(json.dumps({"seed": options.seed, "results": rows}, indent=1), encoding="utf-8")
    return int(any(result.counts[kind] for result in results for kind in ZEROS))


def run_all(chosen: Sequence[Scenario], seconds: float, seed: int) -> list[Result]:
    """The results of the scenarios, with progress and the stories of faults on stderr."""
    results = []
    for number, scenario in enumerate(chosen):
        place = f"{scenario.num_workers} workers" if scenario.process == "workers" else f"{scenario.num_workers} threads"
        print(f"[{number + 1}/{len(chosen)}] {scenario.name}, {place} ...", file=sys.stderr, flush=True)
        results.append(run(scenario, seconds, seed + number))
        for note in results[-1].notes:
            print(f"  {note}", file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())

"""What the figures are drawn of: a small graph, its plan, a run and a report."""

from dataclasses import replace

import pytest

from autosplit.reports.judging import Verdict
from autosplit.reports.outcomes import Outcome
from autosplit.reports.results import LatencyStats, RunStats, StageStats
from autosplit.reports.runreport import RunReport
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.plan import Plan, Prediction, Source, Stage


def blocks(num_blocks: int) -> Graph:
    """Residual blocks: x -> (conv -> bn -> relu) + x -> ..., 4 ops a block."""
    values, ops, weights, last = [Value("x", (1, 8), "float32", 32)], [], [], "x"
    for number in range(num_blocks):
        names = [f"conv_{number}", f"bn_{number}", f"relu_{number}", f"add_{number}"]
        reads = [(last,), (names[0],), (names[1],), (names[2], last)]
        for name, inputs in zip(names, reads, strict=True):
            weight = (f"w_{name}",) if name.startswith("conv") else ()
            weights += [Value(w, (8, 8), "float32", 256) for w in weight]
            values.append(Value(name, (1, 8), "float32", 32))
            operator = f"aten.{name.split('_')[0]}.default"
            ops.append(Op(name, operator, f"block{number}", inputs, (name,), weight, operator))
        last = names[-1]
    return Graph("blocks", ("x",), (last,), tuple(ops), {v.name: v for v in values}, {w.name: w for w in weights}).verify()


def halves(graph: Graph) -> Plan:
    """The first half on one device, the second on two."""
    names = [op.name for op in graph.ops]
    middle = len(names) // 2
    stages = (
        Stage("stage0", tuple(names[:middle]), ("cpu:0",), load_s=0.004),
        Stage("stage1", tuple(names[middle:]), ("cpu:1", "cpu:2"), load_s=0.006),
    )
    return Plan(Source("m:f"), graph.hash, "p", stages, Prediction(0.004, 0.01, 0.004, 0.0, 250.0), method="dp", status="optimal")


def stats_of(plan: Plan) -> RunStats:
    """A run that took a tenth longer than predicted."""

    def samples(seconds: float) -> LatencyStats:
        return LatencyStats.of([seconds, seconds, seconds])

    workers = tuple(
        StageStats(
            stage.name,
            device,
            replica,
            stage.backend,
            stage.threads,
            num_requests=100,
            num_failed=0,
            num_skipped=0,
            busy=samples(stage.load_s * 1.1),
            wait=samples(0.001),
            transfer=samples(0.0002),
            queue=samples(1.0),
            base_bytes=2**20,
            held_bytes=2 * 2**20,
            resident_bytes=3 * 2**20,
            load_s=0.5,
        )
        for stage in plan.stages
        for replica, device in enumerate(stage.devices)
    )
    return RunStats(200, 1.0, samples(0.02), samples(0.0), workers, 0)


@pytest.fixture
def graph() -> Graph:
    return blocks(5)


@pytest.fixture
def plan(graph: Graph) -> Plan:
    return halves(graph)


@pytest.fixture
def stats(plan: Plan) -> RunStats:
    return stats_of(plan)


@pytest.fixture
def report(plan: Plan, stats: RunStats) -> RunReport:
    latency = LatencyStats.of([0.01, 0.011])
    unknown = replace(plan, prediction=Prediction(0, 0, 0, 1, 0))
    outcomes = {
        "plan": Outcome(plan, (240.0, 242.0, 238.0), (0.0105,), latency, latency, True, 0.0, 0.0, stats),
        "one device": Outcome(unknown, (120.0, 121.0, 119.0), (0.0105,), latency, latency, True, 0.0, 0.0, stats),
    }
    return RunReport("blocks", 1, outcomes, Verdict("plan", "The plan is the best.", True), {"replicas": "they do not fit [sic]"})


@pytest.fixture
def large_graph() -> Graph:
    return blocks(100)

"""Accelerators: kept busy, smaller than the model, and several of them. On a card where there is one, else simulated.

    make bench-gpu
    python -m benchmarks.gpu ["Kept busy"]

On a card tests/devices/test_cuda.py runs first. The page is written after each row, and no row begins after ``LIMIT_S``, so all
ends within 6 minutes. A section that was left short is made whole by a command that names it.

A simulated accelerator (tests/simulatedmemory.py) takes 10 us for an op, and its link copies 10 GB/s in each direction; a core
takes an op's weights at 1.5 GB/s. Stages on accelerators are run; answers of whole plans are compared in all bits with those of
torch on a core. The seconds of a request are those of the clocks of the devices; those of a core are given, not measured.
"""

import gc
import math
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import autosplit
from autosplit.devices.accelerators import Accelerator
from autosplit.devices.cuda import Cuda
from autosplit.memory.slots import NUM_CONTEXTS
from autosplit.tables import bytes_text
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan
from benchmarks.gpucases import (
    Case,
    accelerator,
    alone_per_s,
    card_case,
    limits_per_s,
    ours_per_s,
    placed,
    simulated_case,
)
from benchmarks.pages import with_section

TABLE, IS_CARD = Path("benchmarks/gpu.md"), Cuda.count() > 0
MLP = "autosplit.examples.mlp:mlp?depth=24&width=512"
BERT_24 = "transformers:BertModel?num_hidden_layers=24&hidden_size=1024&num_attention_heads=16&intermediate_size=4096"
BUSY = (
    ("transformers:ResNetForImageClassification", None),
    ("transformers:BertModel", 128),
    ("transformers:GPT2Model", 128),
    ("autosplit.examples.unet:unet?size=256", None),
)
"""Model and its tokens."""
LARGER = (
    (BERT_24, 128, (800_000_000,), 4),
    (MLP, None, tuple(tenth / 10 for tenth in ((1, 5, 9) if IS_CARD else range(1, 11))), 20),
)
"""Model, its tokens, caps in bytes or as shares of its weights, and requests on simulated accelerators."""
CAPS = (0.15,)
"""Caps of each of several accelerators, as shares of all weights."""
BUSES = (("none", 0.0, False), ("10 GB/s shared", 1e10, False), ("10 GB/s, peer to peer", 1e10, True))
NUM_ALONE, NUM_OURS = (100, 100) if IS_CARD else (1, NUM_CONTEXTS)
"""Requests that are timed. A simulated one takes as long each time; ours settle once each context has had one."""
Rows = Iterator[Callable[[], str]]
"""The rows of a table, each made when it is called: one that fails leaves the others."""
TESTS, TESTS_LIMIT_S, LIMIT_S = "tests/devices/test_cuda.py", 110.0, 220.0 if IS_CARD else math.inf


def words(plan: Plan, core: str) -> str:
    """The stages of a plan in words."""
    kinds = [
        "streamed" if s.resident_bytes is not None else "on the core" if core in s.devices else "resident" for s in plan.stages
    ]
    return " + ".join(f"{len(stage.ops)} ops {kind}" for stage, kind in zip(plan.stages, kinds, strict=True))


def row(*cells: object) -> str:
    """A row of a table, told as it is made."""
    texts = (f"{cell:.0f}" if isinstance(cell, float) and cell >= 50 else cell for cell in cells)
    shown = " | ".join(f"{text:.3f}" if isinstance(text, float) else str(text) for text in texts)
    print(f"| {shown} |", flush=True)
    return f"| {shown} |"


def kept_busy() -> Rows:
    """One accelerator fed from one process with pinned copies.

    Alone: copies in, compute, copies out in one queue, and a wait for each request. Ours: as a worker runs the stage. The limit
    is the slower of compute without copies, and copies without compute in the slower direction: where it is below 1.05 of the
    best alone, so is every way. A simulated op takes as long in a graph as alone.
    """
    shares = "ours / best alone", "limit / best alone", "ours / compute", "ours / limit"
    ways = "eager alone", "graph alone", "compiled alone", "ours", "compute", "copies"
    yield partial(row, "model", "batch", *ways, *shares)
    yield lambda: "|---" * 12 + "|"
    device = accelerator(IS_CARD)
    for batch in (1, 8):
        for spec, seq_len in BUSY:
            yield partial(_kept_busy, spec, batch, seq_len, device)
            gc.collect()  # a stage is a ring, and the device has no room for those of two models


def _kept_busy(spec: str, batch: int, seq_len: int | None, device: Accelerator) -> str:
    traced = autosplit.trace(spec, batch=batch, seq_len=seq_len)
    inputs = traced.example_inputs

    def alone(compiles: bool) -> float:
        return alone_per_s(placed(traced, device, record=compiles, compiles=compiles), inputs, NUM_ALONE) if IS_CARD else 0.0

    eager, compiled = alone(compiles=False), alone(compiles=True)
    gc.collect()
    graph = placed(traced, device, record=True)
    recorded, ours = alone_per_s(graph, inputs, NUM_ALONE), ours_per_s(graph, inputs, NUM_OURS)
    compute, copies = limits_per_s(graph, NUM_ALONE)
    best, limit = max(eager, recorded, compiled), min(compute, copies)
    ways = eager or "–", recorded, compiled or "–", ours, compute, copies
    return row(spec, batch, *ways, ours / best, limit / best, ours / compute, ours / limit)


def one_accelerator() -> Rows:
    """BERT of 24 layers with 128 tokens under a cap of 800 MB, and an MLP with caps for its weights as shares of them.

    The rule of accelerate is a formula: weights fill the device in order, and each later layer is copied before it computes, for
    each request; the copy of the answer is left out. It takes the rate of pinned memory, which accelerate does not use: on an
    H100 it gave 7.86 requests/s for this BERT. A resident stage copies its outputs to their place, one op more than is predicted.
    """
    rates = "predicted", "run", "all streamed", "all on the core", "accelerate's rule"
    shares = "predicted / run", "run / better of streamed and core", "run / rule"
    yield partial(row, "model", "cap", "plan", *rates, *shares)
    yield lambda: "|---" * 11 + "|"
    for spec, seq_len, caps, count in LARGER:
        traced = autosplit.trace(spec, seq_len=seq_len)
        case = card_case(traced) if IS_CARD else simulated_case(traced, 1)
        streamed, on_core = case.run_per_s(case.streamed(), count), case.run_per_s(case.on_core(), count)
        for cap in caps:
            yield partial(_under_cap, case, spec, cap, count, streamed, on_core)


def _under_cap(case: Case, spec: str, cap: float, count: int, streamed: float, on_core: float) -> str:
    room = int(cap * case.traced.graph.weight_bytes) if cap <= 1 else int(cap) - case.beside_bytes
    plan = case.planned(room)
    predicted, run, rule = 1 / plan.prediction.bottleneck_s, case.run_per_s(plan, count), case.rule_per_s(room)
    better = max(on_core, streamed if case.least_bytes <= room else 0.0)
    name, told = spec.partition(":")[2], f"{cap:.0%}" if cap <= 1 else bytes_text(int(cap))
    others = streamed if case.least_bytes <= room else "no room", on_core, rule
    about = predicted / run, run / better, run / rule
    return row(name, told, words(plan, case.names[0]), predicted, run, *others, *about)


def several_accelerators() -> Rows:
    """The MLP with 128 rows on one, two and four simulated accelerators with a link each and a bus.

    The cap is that of each, as a share of all weights. Without a bus only the links limit copies. Values between accelerators
    pass through the host; where they could go from one to the other (peer to peer), the plan is predicted and simulated, not run.
    The waits of workers for answers are left out: where values alone fill the bus of four accelerators, they cost a tenth.
    """
    traced = autosplit.trace(MLP, batch=128)
    yield partial(row, "accelerators", "cap", "bus", "plan", "predicted", "schedule", "run", "predicted / run")
    yield lambda: "|---" * 8 + "|"
    for num_gpus in (1, 2, 4):
        for share in CAPS:
            for name, rate, peer_to_peer in BUSES[: 1 if num_gpus == 1 else None]:
                case = simulated_case(traced, num_gpus, rate, peer_to_peer)
                yield partial(_on_bus, case, traced, share, name, peer_to_peer)


def _on_bus(case: Case, traced: Traced, share: float, name: str, peer_to_peer: bool) -> str:
    plan = case.planned(int(share * traced.graph.weight_bytes))
    predicted, num_gpus = 1 / plan.prediction.bottleneck_s, len(case.names) - 1
    ran = () if peer_to_peer else (case.run_per_s(plan),)
    told = (*ran, predicted / ran[0]) if ran else ("–", "–")
    return row(num_gpus, f"{share:.0%}", name, words(plan, case.names[0]), predicted, case.scheduled_per_s(plan), *told)


def tested() -> str:
    """What the tests of a card end with."""
    try:
        command = [sys.executable, "-m", "pytest", "-q", TESTS]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=TESTS_LIMIT_S, check=False)
        print(ran.stdout)
    except subprocess.TimeoutExpired as late:
        print((late.stdout or b"").decode())
        return f"{TESTS}: had not ended after {TESTS_LIMIT_S:.0f} s"
    return f"{TESTS}: {ran.stdout.strip().splitlines()[-1]}"


def _made(rows: Rows, failures: list[Exception]) -> Iterator[str]:
    """The rows, those that fail with the reason in their place."""
    while True:
        try:
            line = next(rows)()
        except StopIteration:
            break
        except Exception as failure:
            traceback.print_exc()
            failures.append(failure)
            line = row(f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}")
        yield line


def main() -> None:
    """Write the sections of this device; those of others stay."""
    where = str(Cuda(0).facts()) if IS_CARD else "simulated"
    about = (__doc__ or "").strip().rpartition("\n\n")[2]
    page = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    page = with_section(page, f"# Accelerators\n\nMade by `make bench-gpu`, in requests/s. Each heading says on what.\n\n{about}")
    parts = (
        ("Kept busy", kept_busy),
        ("Models larger than one accelerator", one_accelerator),
        ("Several accelerators", several_accelerators),
    )
    wanted = sys.argv[1:] or [heading for heading, _ in parts[: 2 if IS_CARD else None]]
    failures = list[Exception]()
    about_tests = [tested(), ""] if IS_CARD and not sys.argv[1:] else []
    for heading, table in (part for part in parts if part[0] in wanted):
        lines = [f"## {heading}, {where}", "", *about_tests, " ".join((table.__doc__ or "").split()), ""]
        began, limit_s = time.monotonic(), LIMIT_S / len(wanted)
        for line in _made(table(), failures):
            lines.append(line)
            is_over = time.monotonic() - began > limit_s
            lines += ["", f"A row that would have begun after {limit_s:.0f} s was left out."] if is_over else []
            page = with_section(page, "\n".join(lines))
            TABLE.write_text(page, encoding="utf-8")
            if is_over:
                break
    if failures:
        sys.exit(f"{len(failures)} rows failed")


if __name__ == "__main__":
    main()

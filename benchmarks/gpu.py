"""Accelerators: kept busy, smaller than the model, and several of them. On a card where there is one, else simulated.

    make bench-gpu
    python -m benchmarks.gpu ["Several accelerators"]

A simulated accelerator (tests/simulatedmemory.py) takes 10 us for an op, and its link copies 10 GB/s in each direction; a core
takes an op's weights at 1.5 GB/s. Stages on accelerators are run; answers of whole plans are compared in all bits with those of
torch on a core. The seconds of a request are those of the clocks of the devices; those of a core are given, not measured.
"""

import gc
import sys
from pathlib import Path

import autosplit
from autosplit.devices.accelerators import Accelerator
from autosplit.devices.cuda import Cuda
from autosplit.tables import bytes_text
from autosplit.tracing.capturing import Traced
from autosplit.values.plan import Plan
from benchmarks.gpucases import (
    Case,
    accelerator,
    alone_per_s,
    card_case,
    computes_per_s,
    ours_per_s,
    placed,
    simulated_case,
)
from benchmarks.pages import with_section

TABLE, IS_CARD = Path("benchmarks/gpu.md"), Cuda.count() > 0
MLP = "autosplit.examples.mlp:mlp?depth=24&width=512"
BERT_24 = "transformers:BertModel?num_hidden_layers=24&hidden_size=1024&num_attention_heads=16&intermediate_size=4096"
BUSY = (
    ("transformers:ResNetForImageClassification", None, (1, 8)),
    ("transformers:BertModel", 128, (1, 8) if IS_CARD else (1,)),
    ("transformers:GPT2Model", 128, (1, 8) if IS_CARD else (1,)),
    ("autosplit.examples.unet:unet?size=256", None, (1, 8)),
)
"""Model, its tokens, and batches. A simulated op takes as long at any batch, and a core takes a minute for these two at 8."""
LARGER = (
    (BERT_24, 128, (800_000_000,), 4),
    (MLP, None, (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0), 20),
)
"""Model, its tokens, caps in bytes or as shares of its weights, and requests on simulated accelerators."""
CAPS = (0.15,)
"""Caps of each of several accelerators, as shares of all weights."""
BUSES = (("none", 0.0, False), ("10 GB/s shared", 1e10, False), ("10 GB/s, peer to peer", 1e10, True))
COUNT = 100 if IS_CARD else 2


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


def kept_busy() -> list[str]:
    """One accelerator fed from one process with pinned copies.

    Alone: copies in, compute, copies out in one queue, and a wait for each request. Ours: as a worker runs the stage. The limit
    is compute without copies: where it is below 1.05 of the best alone, so is every way. Where copies in one direction take
    longer than compute, as those of the U-Net at batch 8 do, ours is at the rate of the link.
    """
    shares = "ours / best alone", "limit / best alone", "ours / limit"
    lines = [
        row("model", "batch", "eager alone", "graph alone", "compiled alone", "ours", "limit", *shares),
        "|---" * 10 + "|",
    ]
    device = accelerator(IS_CARD)
    for spec, seq_len, batches in BUSY:
        for batch in batches:
            lines.append(_kept_busy(spec, batch, seq_len, device))
            gc.collect()  # a stage is a ring, and the device has no room for those of two models
    return lines


def _kept_busy(spec: str, batch: int, seq_len: int | None, device: Accelerator) -> str:
    traced = autosplit.trace(spec, batch=batch, seq_len=seq_len)
    inputs = traced.example_inputs
    eager = alone_per_s(placed(traced, device, record=False), inputs, COUNT)
    compiled = alone_per_s(placed(traced, device, record=True, compiles=True), inputs, COUNT) if IS_CARD else 0.0
    gc.collect()
    graph = placed(traced, device, record=True)
    recorded, ours, limit = (per_s(graph, inputs, COUNT) for per_s in (alone_per_s, ours_per_s, computes_per_s))
    best = max(eager, recorded, compiled)
    return row(spec, batch, eager, recorded, compiled or "–", ours, limit, ours / best, limit / best, ours / limit)


def one_accelerator() -> list[str]:
    """BERT of 24 layers with 128 tokens under a cap of 800 MB, and an MLP with caps for its weights as shares of them.

    The rule of accelerate is a formula: weights fill the device in order, and each later layer is copied before it computes, for
    each request; the copy of the answer is left out. It takes the rate of pinned memory, which accelerate does not use: on an
    H100 it gave 7.86 requests/s for this BERT. A resident stage copies its outputs to their place, one op more than is predicted.
    """
    rates = "predicted", "run", "all streamed", "all on the core", "accelerate's rule"
    shares = "predicted / run", "run / better of streamed and core", "run / rule"
    lines = [row("model", "cap", "plan", *rates, *shares), "|---" * 11 + "|"]
    for spec, seq_len, caps, count in LARGER:
        traced = autosplit.trace(spec, seq_len=seq_len)
        case = card_case(traced) if IS_CARD else simulated_case(traced, 1)
        streamed, on_core = case.run_per_s(case.streamed(), count), case.run_per_s(case.on_core(), count)
        for cap in caps:
            room = int(cap * traced.graph.weight_bytes) if cap <= 1 else cap - case.beside_bytes
            plan = case.planned(room)
            predicted, run, rule = 1 / plan.prediction.bottleneck_s, case.run_per_s(plan, count), case.rule_per_s(room)
            better = max(on_core, streamed if case.least_bytes <= room else 0.0)
            name, told = spec.partition(":")[2], f"{cap:.0%}" if cap <= 1 else bytes_text(cap)
            others = streamed if case.least_bytes <= room else "no room", on_core, rule
            about = predicted / run, run / better, run / rule
            lines.append(row(name, told, words(plan, case.names[0]), predicted, run, *others, *about))
    return lines


def several_accelerators() -> list[str]:
    """The MLP with 128 rows on one, two and four simulated accelerators with a link each and a bus.

    The cap is that of each, as a share of all weights. Without a bus only the links limit copies. Values between accelerators
    pass through the host; where they could go from one to the other (peer to peer), the plan is predicted and simulated, not run.
    """
    traced = autosplit.trace(MLP, batch=128)
    lines = [row("accelerators", "cap", "bus", "plan", "predicted", "schedule", "run", "predicted / run"), "|---" * 8 + "|"]
    for num_gpus in (1, 2, 4):
        for share in CAPS:
            for name, rate, peer_to_peer in BUSES[: 1 if num_gpus == 1 else None]:
                lines.append(_on_bus(simulated_case(traced, num_gpus, rate, peer_to_peer), traced, share, name, peer_to_peer))
    return lines


def _on_bus(case: Case, traced: Traced, share: float, name: str, peer_to_peer: bool) -> str:
    plan = case.planned(int(share * traced.graph.weight_bytes))
    predicted, num_gpus = 1 / plan.prediction.bottleneck_s, len(case.names) - 1
    ran = () if peer_to_peer else (case.run_per_s(plan),)
    told = (*ran, predicted / ran[0]) if ran else ("–", "–")
    return row(num_gpus, f"{share:.0%}", name, words(plan, case.names[0]), predicted, case.scheduled_per_s(plan), *told)


def main() -> None:
    """Write the sections of this device; those of others stay."""
    where = str(Cuda(0).facts()) if IS_CARD else "simulated"
    about = (__doc__ or "").partition('accelerators"]\n\n')[2].strip()
    page = TABLE.read_text(encoding="utf-8") if TABLE.exists() else ""
    page = with_section(page, f"# Accelerators\n\nMade by `make bench-gpu`, in requests/s. Each heading says on what.\n\n{about}")
    parts = (
        ("Kept busy", kept_busy),
        ("Models larger than one accelerator", one_accelerator),
        ("Several accelerators", several_accelerators),
    )
    wanted = sys.argv[1:] or [heading for heading, _ in parts[: 2 if IS_CARD else None]]
    for heading, table in (part for part in parts if part[0] in wanted):
        told = " ".join((table.__doc__ or "").split())
        page = with_section(page, "\n".join([f"## {heading}, {where}", "", told, "", *table()]))
        TABLE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

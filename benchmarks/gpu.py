"""Accelerators: kept busy, smaller than the model, and several of them. On a card where there is one, else simulated.

    make bench-gpu
    python -m benchmarks.gpu ["Several accelerators"]

A simulated accelerator (tests/simulatedmemory.py) takes 10 us for an op, and its link copies 10 GB/s in each direction; a core
takes an op's weights at 1.5 GB/s. Stages on accelerators are run; answers of whole plans are compared in all bits with those of
torch on a core. The seconds of a request are those of the clocks of the devices; those of a core are given, not measured.
"""

import sys
from pathlib import Path

import autosplit
from autosplit.devices.cuda import Cuda
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
LARGE = BERT_24 if IS_CARD else MLP
BUSY = (
    ("transformers:ResNetForImageClassification", None),
    ("transformers:BertModel", 128),
    ("transformers:GPT2Model", 128),
    ("autosplit.examples.unet:unet?size=256", None),
)
SIMULATED_BUSY = (
    ("autosplit.examples.mlp:mlp?depth=4&width=1024", None),
    ("autosplit.examples.unet:unet?size=64&levels=2&channels=8", None),
)
SHARES = (0.1, 0.3, 0.6, 1.0) if IS_CARD else (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CAPS = (0.15,)
"""Caps of each of several accelerators, as shares of all weights."""
BUSES = (("none", 0.0, False), ("10 GB/s shared", 1e10, False), ("10 GB/s, peer to peer", 1e10, True))
COUNT = 100 if IS_CARD else 10


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
    is compute without copies.
    """
    lines = [
        row("model", "batch", "eager alone", "graph alone", "compiled alone", "ours", "limit", "ours / best alone"),
        "|---" * 8 + "|",
    ]
    device = accelerator(IS_CARD)
    for spec, seq_len in BUSY if IS_CARD else SIMULATED_BUSY:
        for batch in (1, 8):
            traced = autosplit.trace(spec, batch=batch, seq_len=seq_len)
            inputs, graph = traced.example_inputs, placed(traced, device, record=True)
            eager, recorded = alone_per_s(placed(traced, device, record=False), inputs, COUNT), alone_per_s(graph, inputs, COUNT)
            compiled = alone_per_s(placed(traced, device, record=True, compiles=True), inputs, COUNT) if IS_CARD else 0.0
            ours, limit = ours_per_s(graph, inputs, COUNT), computes_per_s(graph, COUNT)
            best = max(eager, recorded, compiled)
            lines.append(row(spec, batch, eager, recorded, compiled or "–", ours, limit, ours / best))
    return lines


def one_accelerator() -> list[str]:
    """A model on one accelerator under caps, as shares of its weights.

    The rule of accelerate is a formula: weights fill the device in order, and each later layer is copied before it computes, for
    each request; the copy of the answer is left out.
    """
    traced = autosplit.trace(LARGE, seq_len=128) if IS_CARD else autosplit.trace(LARGE)
    case = card_case(traced) if IS_CARD else simulated_case(traced, 1)
    streamed, on_core = case.run_per_s(case.streamed()), case.run_per_s(case.on_core())
    lines = [row("cap", "plan", "predicted", "run", "all streamed", "all on the core", "accelerate's rule"), "|---" * 7 + "|"]
    for share in SHARES:
        room = int(share * traced.graph.weight_bytes)
        plan = case.planned(room)
        rates = 1 / plan.prediction.bottleneck_s, case.run_per_s(plan)
        others = streamed if case.least_bytes <= room else "no room", on_core, case.rule_per_s(room)
        lines.append(row(f"{share:.0%}", words(plan, case.names[0]), *rates, *others))
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
        (f"{LARGE} on one accelerator", one_accelerator),
        ("Several accelerators", several_accelerators),
    )
    wanted = sys.argv[1:] or [heading for heading, _ in parts[: 2 if IS_CARD else None]]
    for heading, table in (part for part in parts if part[0] in wanted):
        told = " ".join((table.__doc__ or "").split())
        page = with_section(page, "\n".join([f"## {heading}, {where}", "", told, "", *table()]))
        TABLE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()

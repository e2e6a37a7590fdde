"""Several models on one host: by how much each slows the others down, and how well mixes predict the rounds between them.

    python -m benchmarks.sharing [--mixes NAME,...] [--rounds 5] [--seconds 30] [--note quiet]

Each mix is three models on two cores. ``alone`` is the slowdown of a model that has the host for itself, over its prediction: the
error of its profile and the work of the host. ``beside`` is its slowdown beside the other two. The rest is what sharing costs.
The factors are those of all rates: predicted from the profiles, predicted by the mixes beside, and the median of the rounds.
Each mix is added to benchmarks/sharing.json as it is done; benchmarks/sharing.md is made from the newest run of each.
"""

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import autosplit
from autosplit.devices.discovering import describe
from autosplit.tables import number_text
from benchmarks.models import keep_in

RESULTS, TABLE, STORE = Path("benchmarks/sharing.json"), Path("benchmarks/sharing.md"), Path("autosplit-run/profiles")
DEVICES = "cpu:0,cpu:1"
GOAL = 0.05
"""Median error that is wished for on a quiet machine."""

MODELS = {
    "unet": "autosplit.examples.unet:unet?levels=3&size=64",
    "mlp": "autosplit.examples.mlp:mlp?depth=8&width=512",
    "deep": "autosplit.examples.mlp:mlp?depth=12&width=256",
    "bert": "transformers:BertModel?hidden_size=256&num_hidden_layers=4&num_attention_heads=4&intermediate_size=1024",
    "mobilenet": "transformers:MobileNetV2Model",
}


@dataclass(frozen=True, slots=True)
class Mix:
    """Three models with their rates, on one backend."""

    backend: str
    rates: dict[str, float]


MIXES = {
    "balanced": Mix("eager", {"unet": 20.0, "mlp": 200.0, "bert": 30.0}),
    "rare and frequent": Mix("eager", {"mobilenet": 2.0, "mlp": 300.0, "deep": 300.0}),
    "large": Mix("eager", {"mobilenet": 10.0, "unet": 20.0, "bert": 10.0}),
    "ONNX Runtime": Mix("onnxruntime", {"unet": 30.0, "mlp": 200.0, "bert": 60.0}),
    "OpenVINO": Mix("openvino", {"unet": 30.0, "mlp": 200.0, "mobilenet": 40.0}),
}


def judge(mix: Mix, rounds: int, seconds: float) -> dict[str, Any]:
    """Run each model alone, then all together."""
    setup = autosplit.Setup(backends=mix.backend, store=STORE, progress=False)
    budget = autosplit.Budget(search_s=seconds, num_rounds=rounds)
    traced = {name: autosplit.trace(MODELS[name]) for name in mix.rates}
    alone = {}
    for name, rate in mix.rates.items():
        one = autosplit.share({name: traced[name]}, {name: rate}, DEVICES, setup=setup, budget=replace(budget, num_rounds=1))
        alone[name] = one.sharing.tenants[0].slowdown
    found = autosplit.share(traced, mix.rates, DEVICES, setup=setup, budget=budget)
    sharing = found.sharing
    as_alone = replace(sharing, tenants=tuple(replace(tenant, slowdown=1.0) for tenant in sharing.tenants))
    return {
        "models": ", ".join(f"{name} {rate:g}/s" for name, rate in mix.rates.items()),
        "alone": alone,
        "beside": {tenant.name: tenant.slowdown for tenant in sharing.tenants},
        "from_profiles": as_alone.saturation,
        "predicted": sharing.saturation,
        "rounds": found.rounds,
        "latencies_s": {row["model"]: (row["latency_s"], row["measured_latency_s"]) for row in found.rows()},
        "cpu": describe().facts["cpu"],
    }


def table(runs: dict[str, dict[str, Any]]) -> str:
    """The results as a document."""
    lines = ["| mix | slowdown alone | slowdown beside the others | from profiles | by the mixes beside | measured | error |"]
    lines.append("|---|---|---|---|---|---|---|")
    errors = []
    for name, run in runs.items():
        measured = median(run["rounds"])
        errors.append(abs(run["predicted"] / measured - 1))
        slow = [", ".join(f"{model} {by:.2f}" for model, by in run[kind].items()) for kind in ("alone", "beside")]
        spread = f"{number_text(measured)} ({number_text(min(run['rounds']))} to {number_text(max(run['rounds']))})"
        factors = f"{number_text(run['from_profiles'])} | {number_text(run['predicted'])} | {spread}"
        lines.append(f"| {name}: {run['models']} | {slow[0]} | {slow[1]} | {factors} | {run['predicted'] / measured - 1:+.1%} |")
    machines = sorted({f"{run['cpu']}, {run['note'] or 'no note'}" for run in runs.values()})
    head = f"`python -m benchmarks.sharing` made this table ({'; '.join(machines)}); the first lines of its source say how."
    goal = f"The median error is {median(errors):.1%}; the goal on a quiet machine is {GOAL:.0%}."
    return f"# Several models on one host\n\n{head} {goal}\n\n" + "\n".join(lines) + "\n"


def main() -> None:
    """Run the mixes and write the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", default=",".join(MIXES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0, help="budget; a round lasts a fifteenth of it, at most 2 s")
    parser.add_argument("--note", default="", help="state of the machine, such as quiet")
    given = parser.parse_args()
    for name in given.mixes.split(","):
        row = {"mix": name, **judge(MIXES[name], given.rounds, given.seconds), "note": given.note}
        print(json.dumps(row), flush=True)
        keep_in(RESULTS, row)
    TABLE.write_text(table({row["mix"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))}), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Whole models on each backend against their modules, on requests with hard values; and the tables of faults that are shipped.

    python -m benchmarks.conformance [MODEL ...] [--draws 20] [--tables]
    python -m benchmarks.conformance MODEL ... --price

Ops that a backend computes otherwise than eager run in eager, as in a plan. A row is written to ``benchmarks/conformance.json``
when its model is done, and all rows to ``docs/accuracy.md``. ``--tables`` writes the known faults of operators into the package.
``--price`` prints the seconds for trying the ops of each model, with nothing known and with what the first time left behind.
"""

import argparse
import json
import os
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from autosplit.backends import conformance, faultstore
from autosplit.backends.base import Runnable, get_backend
from autosplit.backends.eager import program_runnable
from autosplit.backends.hardvalues import NUM_DRAWS, draw
from autosplit.compat.torchparts import pytree
from autosplit.deploying.service import as_call
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.differing import difference
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import StageProgram, split
from autosplit.tracing.valueranges import input_limits
from benchmarks.models import MODELS

SMALL = "hidden_size=64&num_hidden_layers=2&num_attention_heads=4"
TEXT = f"{SMALL}&intermediate_size=128&vocab_size=200"
GROUPED = f"{TEXT}&num_key_value_heads=2"

ARCHITECTURES = {
    **{
        name: f"transformers:{name}?{TEXT}"
        for name in ("BertModel", "RobertaModel", "ElectraModel", "MPNetModel", "GPTNeoXModel")
    },
    **{name: f"transformers:{name}?{GROUPED}" for name in ("LlamaModel", "MistralModel", "Qwen2Model", "GemmaModel", "PhiModel")},
    **{name: f"transformers:{name}?{SMALL}&intermediate_size=128" for name in ("ViTModel", "DeiTModel", "BeitModel")},
    "GPT2Model": "transformers:GPT2Model?n_embd=64&n_layer=2&n_head=4&vocab_size=200",
    "DistilBertModel": "transformers:DistilBertModel?dim=64&n_layers=2&n_heads=4&hidden_dim=128&vocab_size=200",
    "OPTModel": "transformers:OPTModel?hidden_size=64&num_hidden_layers=2&num_attention_heads=4&ffn_dim=128&vocab_size=200",
    "T5EncoderModel": "transformers:T5EncoderModel?d_model=64&d_kv=16&d_ff=128&num_layers=2&num_heads=4&vocab_size=200",
    "MobileNetV2Model": "transformers:MobileNetV2Model?image_size=64",
    "ResNetModel": "transformers:ResNetModel?depths=[1,1,1,1]",
    "Dinov2Model": f"transformers:Dinov2Model?{SMALL}",
}
"""Twenty architectures of transformers, small."""

BACKENDS = ("eager", "onnxruntime", "openvino")
RESULTS, PAGE, MARK = Path("benchmarks/conformance.json"), Path("docs/accuracy.md"), "<!-- conformance -->"
TOLERANCE = 1e-3
"""Largest relative error of a request that counts as right."""


def requests(traced: Traced, number: int) -> list[torch.Tensor]:
    """Inputs of one draw: hard floats, ids from all of the table, and masks of 0 and 1 that mask the first row whole."""
    limits = input_limits(traced.program.graph)
    made = []
    for place, name in enumerate(traced.graph.inputs):
        spec = traced.specs[name]
        if spec.torch_dtype.is_floating_point or spec.torch_dtype == torch.bool or name in limits:
            made.append(draw(spec.shape, spec.torch_dtype, "finite", number + 100 * place * NUM_DRAWS, limits=limits.get(name)))
        else:
            made.append(draw(spec.shape, torch.bool, "finite", number).to(spec.torch_dtype))
    return made


def compiled(traced: Traced, backend: str) -> tuple[set[str], list[tuple[StageProgram, Runnable]]]:
    """The ops that run in eager instead, and the model as stages."""
    refused = conformance.refused(traced, backend)
    label = {op.name: "eager" if op.name in refused else backend for op in traced.graph.ops}
    stages = traced.graph.runs(label, label)
    parts = []
    for ops, program in zip(stages, split(traced, stages), strict=True):
        one = label[ops[0]]
        parts.append((program, program_runnable(program, 1) if one == "eager" else get_backend(one).compile(program, 1)))
    return set(refused), parts


def answer(traced: Traced, parts: Sequence[tuple[StageProgram, Runnable]], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The model's outputs for one request, made by its stages one after another."""
    held = dict(zip(traced.graph.inputs, inputs, strict=True))
    for program, run in parts:
        outputs = run([held[spec.name] for spec in program.inputs])
        held |= {spec.name: value.clone() for spec, value in zip(program.outputs, outputs, strict=True)}
    return [held[name] for name in traced.graph.outputs]


def distance(found: Any, right: Any) -> float:
    """The largest relative error of an answer against another one, which may be in float64."""
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(right), strict=True)
    return max(difference(ours.to(theirs.dtype), theirs)[1] for ours, theirs in pairs if isinstance(theirs, torch.Tensor))


def in_float64(module: Any, traced: Traced, given: Sequence[Sequence[torch.Tensor]]) -> list[Any]:
    """The answers of a copy of the module in float64; none if the module cannot compute in it."""
    exact, calls = deepcopy(module).double(), [pytree.tree_map(_double, as_call(traced, inputs)) for inputs in given]
    try:
        return [exact(*args, **kwargs) for args, kwargs in calls]
    except RuntimeError:
        return []


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def compare(name: str, spec: str, draws: int) -> list[dict[str, Any]]:
    """One row for each backend."""
    torch.manual_seed(0)
    model = load_model(spec)
    traced, rows = trace(model), []
    with torch.inference_mode():
        given = [requests(traced, number) for number in range(draws)]
        calls = [as_call(traced, inputs) for inputs in given]
        own = [model.module(*args, **kwargs) for args, kwargs in calls]  # type: ignore[operator]
        exact = in_float64(model.module, traced, given)
        for backend in BACKENDS:
            refused, parts = compiled(traced, backend)
            found = [traced.unflatten_outputs(answer(traced, parts, inputs)) for inputs in given]
            errors = [distance(ours, right) for ours, right in zip(found, own, strict=True)]
            right = sum(one <= (0.0 if backend == "eager" else TOLERANCE) for one in errors)
            row = {"model": name, "backend": backend, "ops": len(traced.graph.ops), "in eager": len(refused)}
            row |= {"right": f"{right} of {draws}", "largest error": max(errors)}
            rows.append({**row, "from f64": max(map(distance, found, exact), default=None)})
    return rows


def price(name: str, spec: str) -> None:
    """Print the seconds for trying the ops of a model on each backend: the first time, which starts processes, and once more."""
    traced = trace(load_model(spec))
    for backend in BACKENDS[1:]:
        cases = {case.key: case for _, case, _ in conformance.needed_cases(traced, backend)}
        for state in ("cold", "known"):
            begun = time.perf_counter()
            known = faultstore.known_faults(backend, cases)
            took_s, load = time.perf_counter() - begun, os.getloadavg()[0]
            print(
                f"{name} on {backend}, {state}: {took_s:.2f} s for {len(known)} of {len(cases)} cases, load {load:.0f}",
                flush=True,
            )


def write_page(rows: Sequence[dict[str, Any]]) -> None:
    """Put the rows into the page, between the marks."""
    names = list(dict.fromkeys(row["model"] for row in rows))
    lines = ["| model | ops | eager | ONNX Runtime | in eager | OpenVINO | in eager |", f"|{'---|' * 7}"]
    for name in names:
        by = {row["backend"]: row for row in rows if row["model"] == name}
        told = [_told(by[one]) for one in BACKENDS]
        moved = [str(by[one]["in eager"]) for one in BACKENDS]
        lines.append(f"| {name} | {by['eager']['ops']} | {told[0]} | {told[1]} | {moved[1]} | {told[2]} | {moved[2]} |")
    before, _, after = PAGE.read_text(encoding="utf-8").split(MARK)
    PAGE.write_text(f"{before}{MARK}\n" + "\n".join(lines) + f"\n{MARK}{after}", encoding="utf-8")


def _told(row: Mapping[str, Any]) -> str:
    errors = [row["largest error"], row.get("from f64")]
    return ", ".join([row["right"], *(f"{one:.1g}" for one in errors if one is not None)])


def main() -> None:
    """Compare the named models, or all, and write the results."""
    known = {**ARCHITECTURES, **MODELS}
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="*", choices=[*known, []], help="all by default")
    parser.add_argument("--draws", type=int, default=20, help="0 to compare nothing")
    parser.add_argument("--tables", action="store_true")
    parser.add_argument("--price", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.price:
        with (
            TemporaryDirectory() as empty,
            patch.dict(os.environ, AUTOSPLIT_CACHE=empty),
            patch.object(faultstore, "SHIPPED", Path(empty)),
        ):
            for name in given.models or known:
                price(name, known[name])
        return
    rows = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else []
    for name in (given.models or known) if given.draws else ():
        fresh = compare(name, known[name], given.draws)
        rows = [row for row in rows if row["model"] != name] + fresh
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
        print(*fresh, sep="\n", flush=True)
    if given.draws:
        write_page(rows)
    if given.tables:
        models = [trace(load_model(known[name])) for name in given.models or known]
        for backend in faultstore.TRIED:
            needed = {case.key: case for traced in models for _, case, _ in conformance.needed_cases(traced, backend)}
            print(f"{backend}: {len(faultstore.known_faults(backend, needed))} of {len(needed)} cases are known", flush=True)
            text = faultstore.as_text(backend, faultstore.table(backend))
            (faultstore.SHIPPED / f"{backend}.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

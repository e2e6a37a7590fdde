"""Requests of many sizes: padded to the longest, the module at exact sizes, and a service of variants that joins what waits.

    python -m benchmarks.shapes [--models bert,distilbert,whisper,resnet] [--small] [--rounds 5] [--seconds 20] [--minutes 60]
        [--backends openvino] [--in-flight 1,16]
    python -m benchmarks.shapes --first-plan --models distilbert   # processor seconds to a plan, for a range and for one size
    python -m benchmarks.shapes --architectures   # which architectures of transformers take --seq-len 8..256
    python -m benchmarks.shapes --write-table

Each model runs under two histograms: log-normal sizes (mean 60 of at most 512 tokens; mean 4 of at most 16 rows) and flat ones.
The same requests go to every way, in interleaved rounds, with 1, 4, 16 and 64 in flight. Ours: a program for each variant and one
program for every size, which autosplit.measure chooses between by its times; each on replicas and on all cores together, which
autosplit.run chooses between. Rounds are kept in benchmarks/shapes.json as they end, so a run that was interrupted goes on, and
benchmarks/shapes.md is written of them.
"""

import argparse
import json
import os
import random
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache, partial
from itertools import product
from math import inf, log
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple
from unittest.mock import patch

import psutil
import torch

import autosplit
from autosplit.backends.base import installed
from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import deploy
from autosplit.deploying.service import as_call
from autosplit.devices.limits import affinity
from autosplit.errors import AutosplitError
from autosplit.files import write_atomic
from autosplit.planning.baselines import ALL_CORES, REPLICAS
from autosplit.scratch import scratch_folder
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.buckets import Buckets, choose_buckets, fit_times
from autosplit.shapes.service import ShapedService
from autosplit.shapes.timing import MOST_DYNAMIC, most_variants
from autosplit.tracing.family import Family, resized
from autosplit.tracing.loading import load_model
from autosplit.values.machine import Machine, parse_device, union
from autosplit.values.plan import UNKNOWN, Plan, Stage
from autosplit.values.shapes import Shapes, Traffic

RESULTS, TABLE = Path("benchmarks/shapes.json"), Path("benchmarks/shapes.md")
NUM_REQUESTS = 512
MOST_CHARACTERS = 300
"""Most characters of a reason in the table."""

NUM_TIMED = 4
"""Sizes at which the module is timed, for the choice of buckets."""

PADDED, EAGER, ONNX, OPENVINO, OURS = "padded to the longest", "torch eager", "ONNX Runtime dynamic", "OpenVINO dynamic", "ours"

ONE_PROGRAM = "one program"

Submit = Callable[[dict[str, torch.Tensor]], "Future[Any]"]


class Subject(NamedTuple):
    """A model, the dimension whose size changes, its smallest and largest size, the mean of the log-normal histogram."""

    spec: str
    dim: str
    least: int
    most: int
    mean: float
    batches: tuple[int, ...] = (1,)
    """Rows of the variants, where requests of one row are joined."""


SMALL_BERT = (
    "transformers:BertModel?hidden_size=64&num_hidden_layers=2&num_attention_heads=2&intermediate_size=128&vocab_size=100"
)
SUBJECTS = {
    "bert": Subject("transformers:BertModel", "seq", 4, 512, 60, (1, 4)),
    "distilbert": Subject("transformers:DistilBertModel", "seq", 4, 512, 60, (1, 4)),
    "whisper": Subject("transformers:WhisperEncoder", "batch", 1, 8, 2),
    "resnet": Subject("transformers:ResNetForImageClassification", "batch", 1, 16, 4),
}
SMALL = {
    "bert": Subject(SMALL_BERT, "seq", 4, 64, 12, (1, 4)),
    "mlp": Subject("autosplit.examples.mlp:mlp?depth=4&width=256", "batch", 1, 16, 4),
}


WIDE = "hidden_size=64&num_hidden_layers=2&num_attention_heads=2&intermediate_size=128&vocab_size=100"
ARCHITECTURES = {
    **dict.fromkeys(
        ("BertModel", "RobertaModel", "XLMRobertaModel", "CamembertModel", "ElectraModel", "AlbertModel", "MPNetModel"), WIDE
    ),
    **dict.fromkeys(("DebertaV2Model", "RoFormerModel", "NystromformerModel"), WIDE),
    **dict.fromkeys(("ConvBertModel", "GPTNeoXModel"), WIDE),
    **dict.fromkeys(("LlamaModel", "Qwen2Model", "MistralModel"), f"{WIDE}&num_key_value_heads=2"),
    "SqueezeBertModel": f"{WIDE}&embedding_size=64",
    "FNetModel": "hidden_size=64&num_hidden_layers=2&intermediate_size=128&vocab_size=100",
    "DistilBertModel": "dim=64&n_layers=2&n_heads=2&hidden_dim=128&vocab_size=100",
    "GPT2Model": "n_embd=64&n_layer=2&n_head=2&vocab_size=100",
    "OPTModel": "hidden_size=64&num_hidden_layers=2&num_attention_heads=2&ffn_dim=128&vocab_size=100&word_embed_proj_dim=64",
    "BloomModel": "hidden_size=64&n_layer=2&n_head=2&vocab_size=100",
    "T5EncoderModel": "d_model=64&num_layers=2&num_heads=2&d_kv=32&d_ff=128&vocab_size=100",
    "XLNetModel": "d_model=64&n_layer=2&n_head=2&d_inner=128&vocab_size=100",
    "LongformerModel": f"{WIDE}&attention_window=16",
}
"""Small models of the architectures of transformers, as in a spec. Only tracing and the check of padding matter."""

ARCHITECTURES_KEY, FIRST_PLAN_KEY = "architectures", "first plan"


def judge_architectures(kept: dict[str, Any]) -> None:
    """Trace each architecture that was not tried yet for --seq-len 8..256, and keep what comes of it."""
    found = kept.setdefault(ARCHITECTURES_KEY, {})
    for name, settings in ARCHITECTURES.items():
        if name in found:
            continue
        try:
            family = autosplit.trace(f"transformers:{name}?{settings}", sizes={"seq": "8..256"})
            state, why = "exact sizes only" if family.unpaddable else "padded", family.unpaddable.get("seq", "")
        except AutosplitError as failure:
            state, why = "refused", str(failure)
        found[name] = [state, re.sub(r"/\S*/site-packages/", "", " ".join(why.split()))[:MOST_CHARACTERS]]
        write_atomic(RESULTS, json.dumps(kept, indent=1) + "\n")
        print(name, *found[name], flush=True)


def architectures_table(found: dict[str, Any]) -> list[str]:
    """The section on architectures."""
    counts = Counter(state for state, _ in found.values())
    lines = ["## Architectures of transformers with `--seq-len 8..256`", ""]
    lines += [f"Of {len(found)}: {', '.join(f'{count} {state}' for state, count in counts.most_common())}.", ""]
    lines += ["| model | lengths | why |", "|---|---|---|"]
    return [*lines, *(f"| {name} | {state} | {why} |" for name, (state, why) in found.items()), ""]


def sizes_of(subject: Subject, histogram: str) -> list[int]:
    """The sizes of the requests, always the same."""
    draw, found = random.Random(0), list[int]()
    while len(found) < NUM_REQUESTS:
        drawn = draw.lognormvariate(log(subject.mean) - 0.5, 1.0) if histogram == "log-normal" else draw.uniform(
            subject.least, subject.most + 1
        )  # fmt: skip
        if subject.least <= int(drawn) <= subject.most:
            found.append(int(drawn))
    return found


class Prepared(NamedTuple):
    """A model with its family, a function that makes a request, and the buckets for a histogram."""

    module: Any
    family: Family
    request: Callable[[int], dict[str, torch.Tensor]]

    def call(self, inputs: dict[str, torch.Tensor]) -> Any:
        """The module's own answer to a request."""
        args, kwargs = as_call(self.family.variants[0], list(inputs.values()))
        return self.module(*args, **kwargs)


@cache
def prepared(subject: Subject) -> Prepared:
    """Trace the model for its range of sizes."""
    ranges = {subject.dim: range(subject.least, subject.most + 1)}
    if subject.dim != "batch":
        ranges = {"batch": range(1, subject.batches[-1] + 1), **ranges}
    family = autosplit.trace(subject.spec, sizes=ranges)
    [traced, *_], module = family.variants, load_model(subject.spec).module
    examples = dict(zip(traced.graph.inputs, traced.example_inputs, strict=True))

    def request(size: int) -> dict[str, torch.Tensor]:
        sizes = {**dict.fromkeys(ranges, 1), subject.dim: size}
        return {name: resized(value, family.dims.get(name, {}), sizes) for name, value in examples.items()}

    return Prepared(module, family, request)


def buckets_for(subject: Subject, ready: Prepared, sizes: list[int], backend: str) -> tuple[Buckets, Buckets]:
    """The buckets for a histogram, for variants on a backend and for one program, from times of the module at few sizes."""
    steps = [subject.least + round((subject.most - subject.least) * (n / (NUM_TIMED - 1)) ** 2) for n in range(NUM_TIMED)]
    measured: dict[tuple[int, ...], float] = {(size,): _timed_s(partial(ready.call, ready.request(size))) for size in steps}
    traffic = Traffic((subject.dim,), {(size,): float(count) for size, count in sorted(Counter(sizes).items())})
    choose = partial(choose_buckets, fit_times(measured), traffic, {subject.dim: ready.family.allowed[subject.dim]})
    most, _ = most_variants(ready.family, cores(), backend)
    return choose(most=max(1, most // len(subject.batches))), choose(most=MOST_DYNAMIC, each_size=True)


def _timed_s(call: Callable[[], Any]) -> float:
    times_s = []
    with torch.inference_mode():
        for _ in range(4):
            begun_s = time.perf_counter()
            call()
            times_s.append(time.perf_counter() - begun_s)
    return min(times_s)


def cores() -> Machine:
    """The cores of this process."""
    return Machine.of([parse_device(f"cpu:{core}") for core in affinity()])


def deployed(family: Family, backend: str, stack: ExitStack, dynamic: bool, joined: bool) -> ShapedService:
    """One stage: a replica on each core, or one with all cores (``joined``); ``dynamic`` for one program for every size."""
    machine = cores()
    devices = [union(machine.devices)] if joined else machine.devices
    traced, names = family.variants[0], tuple(device.name for device in devices)
    stage = Stage("all", tuple(op.name for op in traced.graph.ops), names, backend, threads=len(devices[0].cores))
    workspace, host = stack.enter_context(Workspace()), stack.enter_context(HostManager())
    shapes = Shapes({}, {}, {}, dynamic=(backend,) if dynamic else ())
    plan = Plan(traced.source, traced.graph.hash, "", (stage,), UNKNOWN, shapes=shapes)
    engine = deploy(host, traced.graph.name, family, plan, machine, workspace)
    return stack.enter_context(ShapedService(family, engine))


def alone(run: Callable[[dict[str, torch.Tensor]], Any], stack: ExitStack) -> Submit:
    """A function on all cores, called with one request after the other."""
    pool = stack.enter_context(ThreadPoolExecutor(1))

    def called(inputs: dict[str, torch.Tensor]) -> Any:
        with torch.inference_mode():
            return run(inputs)

    return lambda inputs: pool.submit(called, inputs)


def exported(ready: Prepared, subject: Subject) -> torch.export.ExportedProgram:
    """The module with a dynamic axis, as both runtimes take it."""
    example, axes = ready.request(subject.most // 2 + 1), ready.family.dims
    args, kwargs = as_call(ready.family.variants[0], list(example.values()))
    collection: Any = torch.export.ShapesCollection
    dims, size = collection(), torch.export.Dim(subject.dim, min=subject.least, max=subject.most)
    for name, tensor in example.items():
        dims[tensor] = {axis: size for axis, dim in axes.get(name, {}).items() if dim == subject.dim}
    return torch.export.export(ready.module, tuple(args), dict(kwargs), dynamic_shapes=dims, strict=False)


def dynamic(program: torch.export.ExportedProgram, runtime: str, folder: Path) -> Callable[[dict[str, torch.Tensor]], Any]:
    """The exported module, by a runtime's own ways."""
    if runtime == ONNX:
        import onnxruntime

        path = folder / "dynamic.onnx"
        converted = torch.onnx.export(program, dynamo=True, verbose=False)
        assert converted is not None
        converted.save(path, external_data=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = len(affinity())
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        given = [one.name for one in session.get_inputs()]
        return lambda inputs: session.run(None, {name: value.numpy() for name, value in zip(given, inputs.values(), strict=True)})
    import openvino

    settings = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": str(len(affinity())), "INFERENCE_PRECISION_HINT": "f32"}
    compiled = openvino.Core().compile_model(openvino.convert_model(program), "CPU", settings)
    infer = compiled.create_infer_request()
    return lambda inputs: list(infer.infer([value.numpy() for value in inputs.values()]).values())


def peers(subject: Subject, ready: Prepared, backends: list[str], stack: ExitStack) -> dict[str, Submit]:
    """The ways that are the same for every histogram, by name: the module at exact sizes, and padding to the longest."""
    found: dict[str, Submit] = {}
    folder = stack.enter_context(Workspace()).folder
    torch.set_num_threads(len(affinity()))
    found[EAGER] = alone(ready.call, stack)
    program = cache(partial(exported, ready, subject))
    for name in (ONNX, OPENVINO):
        try:
            found[name] = alone(dynamic(program(), name, folder), stack)
        except Exception as failure:  # a runtime that cannot is left out, and said
            print(f"{name} is left out: {str(failure).splitlines()[0][:200]}", flush=True)
    for backend in backends:
        longest = ready.family.only([{**dict.fromkeys(ready.family.allowed, 1), subject.dim: subject.most}])
        found[f"{PADDED} ({backend})"] = _service(longest, backend, stack)
    return found


def ours(
    subject: Subject, ready: Prepared, buckets: tuple[Buckets, Buckets], backends: list[str], stack: ExitStack
) -> dict[str, Submit]:
    """Our ways by name: a program for each variant, and one program for every size, on replicas or on all cores together."""
    found: dict[str, Submit] = {}
    rows = subject.batches if subject.dim != "batch" else (0,)
    for backend, one_program, joined in product(backends, (False, True), (False, True)):
        grid = buckets[one_program].grid[subject.dim]
        sizes = [{**({"batch": count} if count else {}), subject.dim: size} for count in rows for size in grid]
        name = ", ".join([backend, *[ONE_PROGRAM] * one_program, ALL_CORES if joined else REPLICAS])
        found[f"{OURS} ({name})"] = _service(ready.family.only(sizes), backend, stack, one_program, joined)
    return found


def _service(family: Family, backend: str, stack: ExitStack, dynamic: bool = False, joined: bool = False) -> Submit:
    service = deployed(family, backend, stack, dynamic, joined)

    def submit(inputs: dict[str, torch.Tensor]) -> "Future[Any]":
        args, kwargs = as_call(family.variants[0], list(inputs.values()))
        return service.submit(*args, **kwargs)

    return submit


def load(submit: Submit, requests: list[dict[str, torch.Tensor]], in_flight: int, seconds: float) -> tuple[float, float]:
    """Requests per second and the 99th percentile of their latency, with ``in_flight`` of them in flight."""
    latencies, lock = list[float](), threading.Lock()
    under_way: deque[Future[Any]] = deque()
    begun_s, count = time.perf_counter(), 0
    slots = threading.Semaphore(in_flight)

    def done(sent_s: float, _: object) -> None:
        with lock:
            latencies.append(time.perf_counter() - sent_s)
        slots.release()

    while time.perf_counter() < begun_s + seconds or count < in_flight:
        slots.acquire()
        future, sent_s = submit(requests[count % len(requests)]), time.perf_counter()
        future.add_done_callback(partial(done, sent_s))
        under_way.append(future)
        count += 1
    for future in under_way:
        future.result()
    return count / (time.perf_counter() - begun_s), quantiles(latencies, n=100)[98] if len(latencies) > 1 else latencies[0]


def measure(name: str, subject: Subject, given: argparse.Namespace, kept: dict[str, Any], until_s: float) -> None:
    """Run the rounds that are missing, and keep each as it ends. None is prepared or repeated after ``until_s``."""
    entries = {histogram: kept.setdefault(f"{name}, {histogram}", {"rounds": []}) for histogram in ("log-normal", "flat")}
    backends, missing = given.backends.split(","), [one for one in entries if len(entries[one]["rounds"]) < given.rounds]
    if not missing:
        return
    begun_s, ready = time.monotonic(), prepared(subject)
    with ExitStack() as stack:
        same = peers(subject, ready, backends, stack)
        print(f"{name}: {time.monotonic() - begun_s:.0f} s to trace it and open its peers", flush=True)
        for histogram in missing:
            if time.monotonic() > until_s:
                print(f"{name}, {histogram}: left out, as its part of the time is over", flush=True)
                continue
            sizes = sizes_of(subject, histogram)
            buckets = buckets_for(subject, ready, sizes, backends[0])
            entries[histogram]["buckets"] = f"{buckets[0].sentence}; for one program {buckets[1].sentence}"
            print(f"{name}, {histogram}: {entries[histogram]['buckets']}", flush=True)
            with ExitStack() as own:
                found = {**same, **ours(subject, ready, buckets, backends, own)}
                _rounds(f"{name}, {histogram}", found, [ready.request(size) for size in sizes], given, kept, until_s)


def _rounds(
    key: str,
    found: dict[str, Submit],
    requests: list[dict[str, torch.Tensor]],
    given: argparse.Namespace,
    kept: dict[str, Any],
    until_s: float,
) -> None:
    """Load each way in turn, in one order and then in the other."""
    rounds, counts = kept[key]["rounds"], [int(count) for count in given.in_flight.split(",")]
    while not rounds or (len(rounds) < given.rounds and time.monotonic() < until_s):
        order = list(found) if len(rounds) % 2 == 0 else list(found)[::-1]
        rounds.append({way: {str(count): load(found[way], requests, count, given.seconds) for count in counts} for way in order})
        write_atomic(RESULTS, json.dumps(kept, indent=1) + "\n")
        print(
            f"{key}: round {len(rounds)} of {given.rounds}; {psutil.virtual_memory().used >> 20} MiB of memory are taken",
            flush=True,
        )


def processor_s() -> float:
    """Processor seconds of this process and of all that it started; those that have ended count for their parents."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    return sum(sum(one.cpu_times()[:4]) for one in family)


def time_first_plan(name: str, subject: Subject, backends: str, kept: dict[str, Any]) -> None:
    """Count the processor seconds up to the first plan, for requests of one size and then for the range, and keep both.

    Imports are paid before, by a small model; neither finds files of the other, nor of an earlier run.
    """
    setup = autosplit.Setup(backends=backends, store=None, progress=False)
    small = autosplit.trace(SMALL["mlp"].spec)
    autosplit.search(small, autosplit.measure(small, setup=setup), setup=setup, budget=0.0)
    ranges = {"batch": (1,), subject.dim: range(subject.least, subject.most + 1)}
    largest = {"batch": subject.most} if subject.dim == "batch" else {"seq_len": subject.most}
    taken_s = []
    for make in (partial(autosplit.trace, subject.spec, **largest), partial(autosplit.trace, subject.spec, sizes=ranges)):
        with scratch_folder() as folder, patch.dict(os.environ, AUTOSPLIT_CACHE=str(folder)):
            begun_s = processor_s()
            traced = make()
            traced_s = processor_s() - begun_s
            autosplit.search(traced, autosplit.measure(traced, setup=setup), setup=setup, budget=0.0)
            taken_s.append(processor_s() - begun_s)
        print(f"{name}: {taken_s[-1]:.1f} processor seconds to the first plan, {traced_s:.1f} of them for the trace", flush=True)
    kept.setdefault(FIRST_PLAN_KEY, {})[name] = taken_s
    write_atomic(RESULTS, json.dumps(kept, indent=1) + "\n")


def first_plan_table(found: dict[str, list[float]]) -> list[str]:
    """The section on the time of a first plan."""
    lines = ["## Time of a first plan", "", "In processor seconds of all processes.", ""]
    lines += ["| model | one size, s | range, s | range over one size (goal: at most 1.5) |"]
    lines += [
        "|---|---|---|---|",
        *(f"| {name} | {one:.0f} | {many:.0f} | {many / one:.2f} |" for name, (one, many) in found.items()),
    ]
    return [*lines, ""]


def table(kept: dict[str, Any]) -> str:
    """The page: for each model and histogram the medians of the rounds."""
    lines = ["# Requests of many sizes", "", "Written by `python -m benchmarks.shapes`; every round is in `shapes.json`.", ""]
    for key, entry in kept.items():
        if key == ARCHITECTURES_KEY:
            lines += architectures_table(entry)
            continue
        if key == FIRST_PLAN_KEY:
            lines += first_plan_table(entry)
            continue
        if not (rounds := entry["rounds"]):
            continue
        counts = list(next(iter(rounds[0].values())))
        usual = counts[-1] if "16" not in counts else "16"
        lines += [f"## {key}", "", f"{len(rounds)} interleaved rounds. The {entry['buckets']}.", ""]
        lines += [
            "| way | " + " | ".join(f"items/s, p99 ms at {count}" for count in counts) + f" | spread at {usual} |",
            "|---" * (2 + len(counts)) + "|",
        ]
        for way in sorted(rounds[0]):
            cells = [way]
            for count in counts:
                rates, tails = ([one[way][count][part] for one in rounds] for part in (0, 1))
                cells.append(f"{median(rates):.4g}, {1e3 * median(tails):.4g}")
            rates = [one[way][usual][0] for one in rounds]
            lines.append(f"| {' | '.join(cells)} | {(max(rates) - min(rates)) / median(rates):.0%} |")
        padded, exact, ours = _best(rounds, usual)
        of_padded = f"{ours / padded:.2f} times padding to the longest{' (goal: at least 2.5)' * ('log-normal' in key)}"
        of_exact = f"{ours / exact:.2f} times the best exact way (goal: not behind by more than the spread)"
        lines += ["", f"At {usual} in flight ours is {of_padded}, and {of_exact}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _best(rounds: list[dict[str, Any]], count: str) -> tuple[float, float, float]:
    """Median items per second of the best way: padded, exact and ours."""
    rates = {way: median(one[way][count][0] for one in rounds) for way in rounds[0]}
    kinds = {PADDED: 0, OURS: 2}
    found = [0.0, 0.0, 0.0]
    for way, rate in rates.items():
        kind = kinds.get(way.partition(" (")[0], 1)
        found[kind] = max(found[kind], rate)
    return found[0], found[1], found[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="names with commas between; by default all")
    parser.add_argument("--small", action="store_true", help="small models, to try the program")
    parser.add_argument("--backends", default=",".join(name for name in ("onnxruntime", "openvino") if name in installed()))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each load of each way in a round")
    parser.add_argument("--in-flight", default="1,4,16,64", help="requests in flight, with commas between")
    parser.add_argument(
        "--minutes",
        type=float,
        default=inf,
        help="shared by the models: no histogram and no further round begins after the part of its model; a later call goes on",
    )
    parser.add_argument("--architectures", action="store_true", help="only trace architectures for a range of lengths")
    parser.add_argument("--write-table", action="store_true", help="only write the page anew")
    parser.add_argument("--first-plan", action="store_true", help="only time the first plan for a range and for one size")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    subjects = SMALL if given.small else SUBJECTS
    if given.architectures:
        judge_architectures(kept)
    names = [] if given.write_table or given.architectures else given.models.split(",") if given.models else list(subjects)
    begun_s = time.monotonic()
    for place, name in enumerate(names):
        until_s = begun_s + 60 * given.minutes * (place + 1) / len(names)
        full = f"{name}{' (small)' * given.small}"
        if time.monotonic() > begun_s + 60 * given.minutes:
            print(f"{', '.join(names[place:])}: left out, as the {given.minutes:g} minutes are over", flush=True)
            break
        if given.first_plan:
            time_first_plan(full, subjects[name], given.backends, kept)
        else:
            measure(full, subjects[name], given, kept, until_s)
    TABLE.write_text(table(kept), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Generation of text beside other programs on the same weights: prefill, decode with 1, 4 and 16 sequences, memory.

    python -m benchmarks.generation [--models 25M,100M] [--peers-python PYTHON] [--way W]... [--rounds 3] [--minutes 12]
    python -m benchmarks.generation --write-table

The environment of PYTHON holds the other programs: ``pip install torch transformers onnx-ir onnxruntime-genai openvino-genai
xllamacpp gguf``. One that is missing, or refuses a model, is left out and named. Models have random weights. Every way has a
process of its own on the same cores; only one works at a time, in interleaved rounds. Rounds are kept in
benchmarks/generation.json as they end, so a run that was interrupted goes on, and benchmarks/generation.md is written of them.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

import torch

from autosplit.devices.discovering import describe
from autosplit.devices.limits import affinity
from autosplit.files import write_atomic
from autosplit.generating.bounds import memory_bytes_per_s
from autosplit.scratch import scratch_folder
from autosplit.tracing.loading import load_model
from benchmarks.generation_peers import WAYS
from benchmarks.pages import table

RESULTS, TABLE = Path("benchmarks/generation.json"), Path("benchmarks/generation.md")
LLAMA = "transformers:LlamaForCausalLM?vocab_size=32000&head_dim=64&tie_word_embeddings=True&max_position_embeddings=1024"
MODELS = {
    "25M": f"{LLAMA}&hidden_size=384&num_hidden_layers=8&num_attention_heads=6&num_key_value_heads=2&intermediate_size=1024",
    "100M": f"{LLAMA}&hidden_size=768&num_hidden_layers=12&num_attention_heads=12&num_key_value_heads=4&intermediate_size=2048",
    "500M": f"{LLAMA}&hidden_size=1536&num_hidden_layers=18&num_attention_heads=24&num_key_value_heads=8&intermediate_size=4096",
    "gpt2": "transformers:GPT2LMHeadModel",
}
BATCHES = (1, 4, 16)
NUM_PROMPT, NUM_NEW = 128, 49
"""Tokens of a prompt, and new tokens; the first of them belongs to prefill."""

NUM_ALONE = 5
"""Requests of one sequence in a round, of which the medians count: one prefill of 45 ms differs by a quarter from the next."""

END_S = 30.0
"""Seconds that a process may take to end."""


GENAI = "onnxruntime-genai"
OURS = {
    "autosplit, onnxruntime": "onnxruntime/workers",
    "autosplit in the caller, onnxruntime": "onnxruntime/caller",
    "autosplit, eager": "eager/workers",
}
"""Ways of ours, as ``benchmarks.generation_ours`` takes them."""
BANDWIDTH = "bandwidth"


@contextmanager
def process(words: list[str], cores: list[int]) -> Iterator["subprocess.Popen[str]"]:
    """A process that answers lines with lines, on these cores only."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores)), "TOKENIZERS_PARALLELISM": "false"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    pinned = ["taskset", "-c", ",".join(map(str, cores)), *words]
    with subprocess.Popen(pinned, text=True, env=environment, **pipes) as found:  # type: ignore[call-overload]
        try:
            yield found
        finally:
            found.stdin.close()
            try:
                found.wait(END_S)
            except subprocess.TimeoutExpired:
                found.kill()


def asked(way: "subprocess.Popen[str]", request: dict[str, Any] | None = None) -> dict[str, Any]:
    """The answer to a request, or the first words of a process. Raises: RuntimeError: it ended."""
    assert way.stdin is not None and way.stdout is not None
    if request is not None:
        way.stdin.write(json.dumps(request) + "\n")
        way.stdin.flush()
    line = way.stdout.readline()
    if not line:
        raise RuntimeError(f"{way.args} ended")
    found: dict[str, Any] = json.loads(line)
    return found


def save_model(spec: str, folder: Path) -> int:
    """Save the module, with a tokenizer of made-up words, for all ways; return the bytes of weights that a step reads."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    module: Any = load_model(spec).module
    # A trace needs no cache, and without one transformers computes whole sequences at each token.
    module.config.use_cache = module.generation_config.use_cache = True
    module.save_pretrained(folder)
    words = {f"w{number}": number for number in range(module.config.vocab_size)}
    tokenizer: Any = Tokenizer(models.WordLevel(words, unk_token="w0"))
    special = {"unk_token": "w0", "bos_token": "w1", "eos_token": "w2", "pad_token": "w2"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    tables = {id(part.weight): part.weight for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    head = module.get_output_embeddings().weight
    looked_up = sum(weight.nbytes for key, weight in tables.items() if key != id(head))
    return sum(weight.nbytes for weight in module.parameters()) - looked_up


def measure(name: str, given: argparse.Namespace, kept: dict[str, Any], until_s: float) -> None:
    """Run the rounds that are missing, and keep each as it ends; none begins after ``until_s``."""
    entry = kept.setdefault(name, {"rounds": [], "failures": {}, "versions": {}})
    if len(entry["rounds"]) >= given.rounds or time.monotonic() > until_s:
        return
    cores, random_ids = affinity()[: given.threads], random.Random(0)
    with ExitStack() as stack:
        folder = stack.enter_context(scratch_folder())
        entry["weight_bytes"], entry["threads"] = save_model(MODELS[name], folder), given.threads
        entry["num_alone"] = NUM_ALONE
        entry["cpu"] = describe().facts["cpu"]
        ways = {}
        for way in [one for one in (*OURS, *WAYS) if not given.ways or one in given.ways]:
            own = [sys.executable, "-m", "benchmarks.generation_ours", OURS.get(way, "")]
            words = own if way in OURS else [given.peers_python, "-m", "benchmarks.generation_peers", way]
            running = stack.enter_context(process([*words, str(folder), str(given.threads)], cores))
            said = asked(running)
            if "version" in said:
                ways[way], entry["versions"][way] = running, said["version"]
                asked(running, {"prompts": [[5] * NUM_PROMPT], "new": 3})
            else:
                entry["failures"][way] = said["failure"]
            print(f"{name}: {way}: {said}", flush=True)
        while len(entry["rounds"]) < given.rounds and time.monotonic() < until_s:
            os.sched_setaffinity(0, cores)
            found: dict[str, Any] = {BANDWIDTH: memory_bytes_per_s(given.threads)}
            vocabulary = range(10, 30_000)
            for batch in BATCHES:
                answers: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
                for _ in range(NUM_ALONE if batch == 1 else 1):
                    prompts = [random_ids.choices(vocabulary, k=NUM_PROMPT) for _ in range(batch)]
                    for way in list(ways)[:: -1 if len(entry["rounds"]) % 2 else 1]:
                        answers[way].append(asked(ways[way], {"prompts": prompts, "new": NUM_NEW}))
                for way, each in answers.items():
                    rates = [one["tokens_per_s"] for one in each if one["tokens_per_s"] is not None]
                    middle = {"first_s": median(one["first_s"] for one in each), "tokens_per_s": median(rates) if rates else None}
                    found.setdefault(way, {})[str(batch)] = {**each[-1], **middle}
            entry["rounds"].append(found)
            write_atomic(RESULTS, json.dumps(kept, indent=1) + "\n")
            print(f"{name}: round {len(entry['rounds'])} of {given.rounds}", flush=True)


def section(name: str, entry: dict[str, Any]) -> list[str]:
    """The section on a model."""
    rounds = entry["rounds"]
    names = [way for way in rounds[0] if way != BANDWIDTH]
    reference = next(way for way in WAYS if way in names)

    def middle(way: str, batch: int, part: str) -> float:
        """The median of a part of the answers; 0 where rounds have none, because a sequence ended before another one began."""
        found = [one[way][str(batch)][part] for one in rounds]
        return 0.0 if None in found else median(found)

    rates = {way: [middle(way, batch, "tokens_per_s") for batch in BATCHES] for way in names}
    first_s = {way: middle(way, 1, "first_s") for way in names}
    bandwidth = median(one[BANDWIDTH] for one in rounds)
    bound = bandwidth / entry["weight_bytes"]
    rows = []
    for way in names:
        most = rates[way][-1]
        memory_mb = max(answer["memory_bytes"] for answer in rounds[-1][way].values()) / 1e6
        same = sum(_same(one[way]["1"]["ids"], one[reference]["1"]["ids"]) for one in rounds) / len(rounds)
        spread = [one[way][str(BATCHES[-1])]["tokens_per_s"] for one in rounds] if most else [1.0]
        cells = [
            f"{NUM_PROMPT / first_s[way]:.0f}",
            f"{1e3 * first_s[way]:.0f}",
            *(f"{one:.1f}" if one else "-" for one in rates[way]),
            f"{1e3 * BATCHES[-1] / most:.0f}" if most else "-",
            f"{middle(way, BATCHES[-1], 'all_s'):.2f}",
            f"{rates[way][0] / bound:.0%}",
            f"{memory_mb:.0f}",
            f"{same:.0f}",
            f"{(max(spread) - min(spread)) / median(spread):.0%}",
        ]
        rows.append([f"{way} {entry['versions'][way]}", *cells])
    counts = [f"decode tokens/s, {batch} sequence{'s' * (batch > 1)}" for batch in BATCHES]
    titles = ["way", "prefill tokens/s", "first token, ms", *counts, f"time per token at {BATCHES[-1]}, ms"]
    titles += [f"all of {BATCHES[-1]}, s", "of the bound", "memory, MB", "same tokens", f"spread at {BATCHES[-1]}"]
    lines = [f"## {name}", "", f"{len(rounds)} interleaved rounds on {entry['threads']} of the cores of {entry['cpu']}, "]
    lines[-1] += f"each with {(alone := entry.get('num_alone', 1))} request{'s' * (alone > 1)} of one sequence. "
    lines[-1] += f"Memory is read at {bandwidth / 1e9:.1f} GB/s, so one sequence decodes at most {bound:.1f} tokens/s."
    lines += ["", table(titles, rows), ""]
    if set(OURS) & set(names):
        lines += [_verdict(rates, {way: NUM_PROMPT / one for way, one in first_s.items()}), ""]
    lines += [f"{way} is left out: {why}" for way, why in entry["failures"].items()]
    return lines


def _same(ids: list[int], others: list[int]) -> int:
    """How many tokens are equal before the first that differs."""
    return next((number for number, pair in enumerate(zip(ids, others, strict=False)) if pair[0] != pair[1]), len(ids))


def _verdict(rates: dict[str, list[float]], prefill: dict[str, float]) -> str:
    """Our rates over those of the others in the same precision."""
    ours, others = ([way for way in rates if (way in OURS) is wanted and "F16" not in way] for wanted in (True, False))
    said = []
    for number, batch in enumerate(BATCHES):
        rate = max(rates[way][number] for way in ours)
        best = max(rates[way][number] for way in others if way != GENAI)
        said.append(f"with {batch} {rate / best:.2f} times the best of the other programs")
        if GENAI in rates:
            said[-1] += f" and {rate / rates[GENAI][number]:.2f} times {GENAI}"
    first = max(prefill[way] for way in ours) / max(prefill[way] for way in others)
    return f"Decode of autosplit on its best backend: {'; '.join(said)}. Prefill: {first:.2f} times the best."


def page(kept: dict[str, Any]) -> str:
    """The page of all models."""
    lines = ["# Generation", "", "Written by `python -m benchmarks.generation`; every round is in `generation.json`.", ""]
    lines += [
        f"A prompt has {NUM_PROMPT} tokens, and {NUM_NEW - 1} tokens are decoded after the first. Rates and times are medians "
    ]
    lines[-1] += (
        "of the rounds. The bound is the rate at which memory gives the weights of a step. Same tokens: new tokens equal to "
    )
    lines[-1] += (
        f"those of {next(iter(WAYS))} (without it, of the next other program) before the first that differs, with one sequence."
    )
    lines[-1] += " A decode rate counts the tokens of the time in which all sequences have their first token and none its last."
    lines[-1] += " Of several requests of one sequence in a round, the medians count."
    lines[-1] += " Memory is that of the last round, of a way with all its processes."
    for name, entry in kept.items():
        if entry["rounds"]:
            lines += ["", *section(name, entry)]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="25M,100M", help=f"names with commas between, of {', '.join(MODELS)}")
    parser.add_argument("--peers-python", default=sys.executable)
    parser.add_argument("--way", action="append", dest="ways", help="only these, one at a time; all of 500M need 25 GB of memory")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=inf, help="begin no round after this time; a later call goes on")
    parser.add_argument("--threads", type=int, default=1, help="threads of each way, on as many cores")
    parser.add_argument("--write-table", action="store_true", help="only write the page anew")
    given = parser.parse_args()
    kept: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    until_s = time.monotonic() + 60 * given.minutes
    for name in [] if given.write_table else given.models.split(","):
        measure(name, given, kept, until_s)
    TABLE.write_text(page(kept), encoding="utf-8")


if __name__ == "__main__":
    main()

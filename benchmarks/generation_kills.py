"""Kill the workers of a generator: ``python -m benchmarks.generation_kills [--sequences N] [--mean-s S] [--new N] [--json]``.

First N sequences run while workers are killed at random, then one sequence runs again and again, and the worker of each stage
is killed at each of its tokens. Every answer must hold the tokens that it has without kills; the exit code is 1 if one does not.
Where kills come so fast that a pipeline gives up, the rows say how much ended before, and why it did; the code is 1 then, too.
"""

import argparse
import json
import logging
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import Future
from contextlib import suppress
from itertools import pairwise, product
from typing import Any

import torch
import transformers

import autosplit
from autosplit.devices.limits import affinity
from autosplit.errors import WorkerError
from autosplit.generating.generators import Generator
from autosplit.generating.steps import step_family
from autosplit.running.engine import Engine
from autosplit.values.plan import UNKNOWN, Plan, Stage

SLOTS, LENGTH, CHUNK = 8, 64, 24
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def opened() -> Generator:
    """A Llama of 4 layers with random weights, on two worker processes of one core each."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=4, eos_token_id=None
    )
    family = step_family(transformers.LlamaForCausalLM(config).eval(), SLOTS, LENGTH, CHUNK)
    ops = [op.name for op in family.graph.ops]
    at = max(number for number, op in enumerate(family.graph.ops) if "layers.1.mlp" in op.module) + 1
    cores = [f"cpu:{core}" for core in affinity()[:2]]
    stages = tuple(Stage(core, tuple(some), (core,)) for core, some in zip(cores, (ops[:at], ops[at:]), strict=True))
    return autosplit.open_generator(family, Plan(family.variants[0].source, family.graph.hash, "", stages, UNKNOWN))


def at_random(generator: Generator, engine: Engine, count: int, mean_s: float) -> dict[str, Any]:
    """Sequences of mixed lengths, half of them drawn, while a worker is killed every ``mean_s`` seconds on average."""
    numbers = random.Random(0)
    prompts = [[numbers.randrange(512) for _ in range(numbers.randint(1, 32))] for _ in range(count)]
    settings = [
        {"max_new_tokens": numbers.randint(8, 32), "seed": number, "temperature": float(number % 2)} for number in range(count)
    ]

    def run() -> list[list[int] | str]:
        futures = list[Future[list[int]]]()
        with suppress(WorkerError):  # the pipeline has given up
            for prompt, some in zip(prompts, settings, strict=True):
                futures.append(generator.submit(prompt, **some))
        return [str(failure) if (failure := one.exception()) else one.result() for one in futures]

    wanted, kills, over = run(), [0], threading.Event()

    def strike() -> None:
        while not over.wait(numbers.expovariate(1 / mean_s)):
            with suppress(ProcessLookupError, IndexError):  # killed a moment ago and not replaced yet; given up
                os.kill(numbers.choice(engine.pids), signal.SIGKILL)
                kills[0] += 1

    restarts, begun_s, thread = engine.restarts, time.monotonic(), threading.Thread(target=strike)
    thread.start()
    found = run()
    over.set()
    thread.join()
    seconds, ended = time.monotonic() - begun_s, sum(isinstance(one, list) for one in found)
    counts = {"sequences": ended, "kills": kills[0], "restarts": engine.restarts - restarts, "seconds": seconds}
    lost = [number for number, one in enumerate(found) if one != wanted[number]]
    if engine.failure is not None:
        return counts | {
            "wrong": [f"sequence {one}" for one in lost if isinstance(found[one], list)],
            "gave_up": str(engine.failure),
        }
    return counts | {"wrong": [f"sequence {one}: {found[one]}" for one in lost]}


def at_each_token(generator: Generator, engine: Engine, new: int) -> dict[str, Any]:
    """One sequence for each stage and token, whose worker is killed as soon as the token is there."""
    wanted = generator.submit(PROMPT, max_new_tokens=new).result()
    pauses_s, wrong = list[float](), list[str]()
    for stage, place in product(range(len(engine.pids)), range(new - 1)):
        times_s = [time.monotonic()]

        def told(token: int, stage: int = stage, place: int = place, times_s: list[float] = times_s) -> None:
            times_s.append(time.monotonic())
            if len(times_s) == place + 2:
                os.kill(engine.pids[stage], signal.SIGKILL)

        try:
            if generator.submit(PROMPT, max_new_tokens=new, on_token=told).result() != wanted:
                wrong.append(f"stage {stage}, token {place}")
        except WorkerError as failure:
            return {"kills": len(pauses_s) + 1, "wrong": wrong, "gave_up": str(failure)}
        pauses_s.append(max(after - before for before, after in pairwise(times_s)))
    ordered = sorted(pauses_s)
    return {"kills": len(ordered), "wrong": wrong, "median_pause_s": ordered[len(ordered) // 2], "longest_pause_s": ordered[-1]}


def main() -> int:
    """Run both, and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=100)
    parser.add_argument("--mean-s", type=float, default=0.5, help="mean seconds between kills at random")
    parser.add_argument("--new", type=int, default=16, help="tokens of the sequence that is killed at each of them")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("autosplit").setLevel(logging.ERROR)  # each kill is a warning
    rows = dict[str, dict[str, Any]]()
    with opened() as generator:
        assert isinstance(generator.pipeline, Engine)
        rows["at random"] = at_random(generator, generator.pipeline, given.sequences, given.mean_s)
    with opened() as generator:  # the first one may have given up
        assert isinstance(generator.pipeline, Engine)
        rows["at each token of each stage"] = at_each_token(generator, generator.pipeline, given.new)
    if given.json:
        print(json.dumps(rows, indent=1))
    else:
        for name, row in rows.items():
            print(f"{name}: {', '.join(f'{key} {value}' for key, value in row.items())}")
    return int(any(row["wrong"] or "gave_up" in row for row in rows.values()))


if __name__ == "__main__":
    sys.exit(main())

"""Any sets of ops on a device beside the best chain, predicted and measured: ``python -m benchmarks.anysets [ROUNDS]``.

The first core computes no Fourier transform, as an accelerator without them. Both plans are loaded side by side and run in
interleaved rounds. The processor time of the busiest core is printed too: other programs on the machine change it little.
"""

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from statistics import median

import autosplit
from autosplit.commands.console import say
from autosplit.deploying.bench import Bench, Contender
from autosplit.devices.discovering import as_machine
from autosplit.values.constraints import Constraints

SPEC = "autosplit.examples.spectral:spectral"
DEVICES = "cpu:0,cpu:1"
RULES = Constraints(forbids={"*fft*": ("cpu:0",)})
CHAIN, ANY_SETS = "best chain", "any sets"
NUM_ITEMS = 80


def busy_s(contender: Contender) -> Counter[str]:
    """Processor seconds of the workers on each device since they started."""
    found, tick_s = Counter[str](), 1 / os.sysconf("SC_CLK_TCK")
    for (_, setting), pid in zip(contender.plan.workers, contender.pipeline.pids, strict=True):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[setting.device] += tick_s * (int(fields[11]) + int(fields[12]))
    return found


def main(num_rounds: int = 15) -> None:
    """Measure the model, plan it twice, and print the plans with their throughput and the ratio of the rounds."""
    traced, setup = autosplit.trace(SPEC, batch=4), autosplit.Setup(backends=("eager",), progress=False)
    profile = autosplit.measure(traced, DEVICES, setup=setup)
    asked = {CHAIN: RULES, ANY_SETS: replace(RULES, contiguous=False)}
    budget = autosplit.Budget(search_s=0)
    plans = {
        name: autosplit.search(traced, profile, DEVICES, demands, setup=setup, budget=budget).plan
        for name, demands in asked.items()
    }
    busiest_s: dict[str, list[float]] = {name: [] for name in plans}
    with Bench(as_machine(DEVICES)) as bench:
        for name, plan in plans.items():
            bench.load(name, plan, traced)
        for number in range(num_rounds):
            for name, contender in bench.loaded.items():
                before, _ = busy_s(contender), contender.pipeline.stats(clear=True)
                bench.run_round([name], number, NUM_ITEMS)
                num_requests = contender.pipeline.stats().num_requests
                busiest_s[name].append(max((busy_s(contender) - before).values()) / num_requests)
        found = {name: contender.outcome() for name, contender in bench.loaded.items()}
    for name, plan in plans.items():
        outcome, taken_ms = found[name], sorted(1e3 * seconds for seconds in busiest_s[name])
        say(f"{name}: {plan}")
        say(f"  {outcome.throughput_per_s:.1f} items/s measured; largest difference from the module: {outcome.max_abs_error:g}")
        say(
            f"  busiest core: {1e3 * plan.prediction.bottleneck_s:.1f} ms a request predicted, {median(taken_ms):.1f} ms of "
            f"processor time measured [{taken_ms[0]:.1f}, {taken_ms[-1]:.1f}]"
        )
    ratio = found[ANY_SETS].against(found[CHAIN], "throughput")
    say(f"any sets against the best chain: {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] in {ratio.num_rounds} rounds")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

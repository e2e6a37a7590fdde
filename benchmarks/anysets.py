"""Any sets of ops on a device beside the best chain, predicted and measured: ``python -m benchmarks.anysets [ROUNDS]``.

The first core computes no Fourier transform, as an accelerator without them. Both plans are loaded side by side and run in
interleaved rounds.
"""

import sys
from dataclasses import replace

import autosplit
from autosplit.commands.console import say
from autosplit.deploying.bench import Bench
from autosplit.devices.discovering import as_machine
from autosplit.values.constraints import Constraints

SPEC = "autosplit.examples.spectral:spectral"
DEVICES = "cpu:0,cpu:1"
RULES = Constraints(forbids={"*fft*": ("cpu:0",)})
CHAIN, ANY_SETS = "best chain", "any sets"
NUM_ITEMS = 80


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
    with Bench(as_machine(DEVICES)) as bench:
        for name, plan in plans.items():
            bench.load(name, plan, traced)
        for number in range(num_rounds):
            bench.run_round(list(plans), number, NUM_ITEMS)
        found = {name: contender.outcome() for name, contender in bench.loaded.items()}
    for name, plan in plans.items():
        say(f"{name}: {plan}")
        outcome = found[name]
        say(f"  {outcome.throughput_per_s:.1f} items/s measured; largest difference from the module: {outcome.max_abs_error:g}")
    ratio = found[ANY_SETS].against(found[CHAIN], "throughput")
    say(f"any sets against the best chain: {ratio.median:.2f} [{ratio.low:.2f}, {ratio.high:.2f}] in {ratio.num_rounds} rounds")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

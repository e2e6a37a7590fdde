"""Plans over two hosts, predicted beside measured, on 1 Gbit/s and on 100 Mbit/s: ``python -m benchmarks.hostplans [MODEL ...]``.

Two Ray nodes in network namespaces have a core each and a limit on their cards. Three plans of each model are loaded side by side
and run in interleaved rounds: the planner's own, the planner's with a stage on each host, and the even one, whose two stages take
equally long by themselves. At the end a third host is there whose card is slow: the plan without it runs beside the best one that
must use it, and the reason is told why it is left out. ``python -m benchmarks.hostplans slow`` shows this end alone.
"""

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median

import autosplit
from autosplit.commands.console import say
from autosplit.deploying.bench import Bench
from autosplit.planning.explaining import explain
from autosplit.planning.predicting import predict
from autosplit.values.plan import UNKNOWN, Plan, Stage
from benchmarks.namespaces import contain, namespaces

MODELS = {
    "mobilenet": "transformers:MobileNetV2Model",
    "unet": "autosplit.examples.unet:unet?levels=2&size=64",
    "bert": "transformers:BertModel?num_hidden_layers=2&hidden_size=256&num_attention_heads=4&intermediate_size=1024",
    "mlp": "autosplit.examples.mlp:mlp?depth=8&width=1024",
}
NETWORKS_MBIT_PER_S = (1000.0, 100.0)
SLOW_MBIT_PER_S = 5.0
ROUNDS, ROUND_S = 5, 1.0
BUDGET = autosplit.Budget(search_s=0)


def even(traced: autosplit.Traced, profile: autosplit.Profile, hosts: autosplit.Cluster) -> Plan:
    """A stage on the first device of each of two hosts, cut where half of the model's seconds are over."""
    first, second = (next(d.name for d in hosts.machine.devices if d.host == name) for name in list(hosts.hosts)[:2])
    ops = [op.name for op in traced.graph.ops]
    passed_s = list(accumulate(profile.op_s(name, first, "eager") for name in ops))
    border = 1 + next(number for number, so_far_s in enumerate(passed_s) if so_far_s >= passed_s[-1] / 2)
    stages = Stage("stage0", tuple(ops[:border]), (first,)), Stage("stage1", tuple(ops[border:]), (second,))
    return predict(Plan(traced.source, traced.graph.hash, "", stages, UNKNOWN), traced.graph, hosts.machine, profile)


def rows(name: str, cluster: autosplit.Cluster) -> list[tuple[str, float, float]]:
    """Predicted and measured items a second of each plan of a model."""
    traced = autosplit.trace(MODELS[name])
    setup = autosplit.Setup(backends=("eager",), hosts=cluster, progress=False)
    profile = autosplit.measure(traced, setup=setup)
    both = autosplit.Constraints(num_stages=2, max_replicas=1)
    plans = {
        "planned": autosplit.search(traced, profile, setup=setup, budget=BUDGET).plan,
        "planned, a stage on each host": autosplit.search(traced, profile, None, both, setup=setup, budget=BUDGET).plan,
        "even, a stage on each host": even(traced, profile, cluster),
    }
    measured_per_s = run_side_by_side(traced, plans, cluster)
    return [(way, plan.prediction.throughput_per_s, measured_per_s[way]) for way, plan in plans.items()]


def run_side_by_side(traced: autosplit.Traced, plans: Mapping[str, Plan], cluster: autosplit.Cluster) -> dict[str, float]:
    """Items a second of each plan: the median of its rounds, which alternate with those of the others."""
    with Bench(cluster.machine, autosplit.Setup(hosts=cluster)) as bench:
        for way, plan in plans.items():
            bench.load(way, plan, traced).restart()
        for number in range(ROUNDS):
            bench.run_round(list(plans), number, max(8, round(ROUND_S * max(e.pace_per_s for e in bench.loaded.values()))))
        return {way: median(loaded.rounds_per_s) for way, loaded in bench.loaded.items()}


@contextlib.contextmanager
def opened(limits_mbit_per_s: Sequence[float]) -> Iterator[autosplit.Cluster]:
    """A cluster of hosts in namespaces, with a limit on the card of each."""
    with (
        tempfile.TemporaryDirectory(prefix="autosplit-ns-") as folder,
        namespaces(limits_mbit_per_s, Path(folder)) as (address, _),
        autosplit.Cluster(address) as cluster,
    ):
        yield cluster


def slow_host() -> None:
    """Show that a host with a slow card is left out, and why, and run that plan beside the best one that must use all hosts."""
    with opened([NETWORKS_MBIT_PER_S[0], NETWORKS_MBIT_PER_S[0], SLOW_MBIT_PER_S]) as cluster:
        traced = autosplit.trace(MODELS["unet"])
        setup = autosplit.Setup(backends=("eager",), hosts=cluster, progress=False)
        profile = autosplit.measure(traced, setup=setup)
        best = autosplit.search(traced, profile, setup=setup, budget=BUDGET).plan
        say(best.summary())
        wanted = autosplit.Constraints(num_stages=3, max_replicas=1)
        with_it = autosplit.search(traced, profile, None, wanted, setup=setup, budget=BUDGET).plan
        say(with_it.summary())
        say(explain(traced.graph, with_it, cluster.machine, profile, wanted).because)
        plans = {"without the slow host": best, "a stage on each host": with_it}
        for way, per_s in run_side_by_side(traced, plans, cluster).items():
            say(f"{way}: {plans[way].prediction.throughput_per_s:.4g} items/s predicted, {per_s:.4g} measured")


def main(names: list[str]) -> None:
    """Print a row for each plan, and the summary of all predictions."""
    errors = []
    titles = ["model", "network", "plan", "predicted/s", "measured/s", "error", "of even, predicted", "of even, measured", "load"]
    print(f"| {' | '.join(titles)} |\n|{'---|' * len(titles)}", flush=True)
    for mbit_per_s in NETWORKS_MBIT_PER_S:
        with opened([mbit_per_s] * 2) as cluster:
            for name in names:
                found = rows(name, cluster)
                _, even_predicted_per_s, even_measured_per_s = found[-1]
                for way, predicted_per_s, measured_per_s in found:
                    errors.append(abs(predicted_per_s / measured_per_s - 1))
                    cells = [name, f"{mbit_per_s:g} Mbit/s", way, f"{predicted_per_s:.4g}", f"{measured_per_s:.4g}"]
                    cells += [f"{predicted_per_s / measured_per_s - 1:+.1%}", f"{predicted_per_s / even_predicted_per_s:.2f}"]
                    cells += [f"{measured_per_s / even_measured_per_s:.2f}", f"{os.getloadavg()[0]:.1f}"]
                    print(f"| {' | '.join(cells)} |", flush=True)
    say(f"median error {median(errors):.1%}, worst {max(errors):.1%} of {len(errors)} predictions")
    if len(names) == len(MODELS):
        slow_host()


if __name__ == "__main__":
    contain()
    if sys.argv[1:] == ["slow"]:
        slow_host()
    else:
        main(sys.argv[1:] or list(MODELS))

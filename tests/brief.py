"""Shorter measurements, for tests that judge no seconds: a profile of one backend on two cores takes 1 s, not 4 s."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from autosplit import sharedhost
from autosplit.backends import apart
from autosplit.deploying import bench, compiling, contest, replanning, setup
from autosplit.devices import forkserver
from autosplit.generating import hostcost
from autosplit.measuring import cache_lookup, links, profiler, request_overhead, rounds, store
from autosplit.measuring.measuring_worker import Workers
from autosplit.pages import writing
from autosplit.searching import candidates, hunt, loop, precisions
from autosplit.values.links import Link
from autosplit.values.machine import Device


def measure_briefly() -> None:
    """Shorten the rounds of a profile, of the links, of a search and of a report in this process."""
    profiler.ROUND_S = 0.1
    rounds.ALONE_S, rounds.CUT_S = 0.03, 0.03
    links.MESSAGES = (6, 6, 4, 2)
    request_overhead.WARM_REQUESTS, request_overhead.COLD_REQUESTS = 32, 8
    bench.FIRST_S, contest.ALONE_S = 0.05, 0.03
    hostcost.NUM_STEPS, hostcost.WARM_UP, hostcost.NUM_STARTS = 8, 2, 1
    setup.ROUND_S, setup.LEAST_COMPARE_S, hunt.ROUND_S = 0.05, 0.5, 0.05
    loop.LEAST_PLANNING_S, candidates.EXPLAIN_S, writing.FRONT_S, precisions.BUDGET_S = 0.2, 0.0, 0.3, 0.1
    replanning.TIME_LIMIT_S, sharedhost.PART_S, sharedhost.MOST_S = 0.2, 0.3, 0.5


def keep_the_speed_of_cores() -> None:
    """Let every core run as fast as when it was measured: a neighbour on this machine ends no reuse of measurements."""
    cache_lookup.kernel_now_s = lambda cores, then_s: then_s


def measure_links_once() -> None:
    """Keep the links between the same devices: no model changes them, and a store would keep them too."""
    known: dict[tuple[tuple[Device, ...], ...], list[Link]] = {}
    measure_links = links.measure_links

    def remembered(opened: links.LinkRings, workers: Workers, others: Sequence[Device] = ()) -> list[Link]:
        devices = tuple(opened.devices), tuple(others)
        if devices not in known:
            known[devices] = measure_links(opened, workers, others)
        return known[devices]

    profiler.measure_links = remembered


def measure_side_by_side() -> None:
    """Let both processes of the tests measure at once in the user's store, which they share: no test of theirs judges seconds."""
    measuring = store.Store.measuring

    def at_once(kept: store.Store, waiting: Callable[[], None]) -> AbstractContextManager[None]:
        return nullcontext() if kept.root == store.user_root() else measuring(kept, waiting)

    store.Store.measuring = at_once


def compile_in_one_process() -> None:
    """Keep the process that compiles from workspace to workspace: each new one imports the exporter for 4 s."""
    apart.num_keeping, compiling.end_idle = 1, lambda: None
    apart.spawn_worker = lambda target, spawn=apart.spawn_worker, **named: spawn("patientcompiler:main", **named)


def load_exporters_once() -> None:
    """Fork processes that compile from one that has the exporter: each new one, after a crash, would import it for 2 s."""
    forkserver.preload("autosplit.compat.exporter", "onnxscript", "onnxscript.function_libs.torch_lib.ops")

"""Shorter measurements, for tests that judge no seconds: a profile of one backend on two cores takes 1 s in place of 4 s."""

from autosplit.backends import workspace
from autosplit.deploying import comparing, contest, setup
from autosplit.measuring import cache_lookup, links, profiler, request_overhead, rounds


def measure_briefly() -> None:
    """Shorten the rounds of a profile, of the links and of a report in this process."""
    profiler.ROUND_S = 0.15
    rounds.ALONE_S, rounds.CUT_S, profiler.CALIBRATION_S = 0.05, 0.05, 0.2
    links.MESSAGES = (6, 6, 4, 2)
    request_overhead.WARM_REQUESTS, request_overhead.COLD_REQUESTS = 32, 8
    comparing.FIRST_S, contest.ALONE_S = 0.1, 0.05
    setup.ROUND_S, setup.LEAST_COMPARE_S = 0.3, 1.0


def keep_the_speed_of_cores() -> None:
    """Let every core run as fast as when it was measured: a neighbour on this machine ends no reuse of measurements."""
    cache_lookup.kernel_now_s = lambda cores, then_s: then_s


def compile_in_one_process() -> None:
    """Keep the process that compiles from workspace to workspace: each new one imports the exporter for 4 s."""
    workspace.end_idle = lambda: None

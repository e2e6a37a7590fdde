"""Three nodes on this machine, a BERT over them, and one node killed half-way: every answer comes, right and in order.

Run with ``make demo-cluster`` or ``python -m benchmarks.clusterdemo [REQUESTS]``.
"""

import signal
import sys
import time

import psutil
import torch

import autosplit
from autosplit.commands.console import say

MODEL = "transformers:BertModel?num_hidden_layers=4&hidden_size=256&num_attention_heads=4&intermediate_size=1024"


def kill_node(pid: int) -> int:
    """Kill the node of an agent: its raylet, the agent, the workers, all that they started. Returns: killed processes."""
    raylet = psutil.Process(pid).parent()
    assert raylet is not None
    found = [*raylet.children(recursive=True), raylet]
    for process in found:
        process.send_signal(signal.SIGKILL)
    return len(found)


def main(num_requests: int = 1000) -> None:
    """Open the cluster, profile, plan, run, kill, and report."""
    begun_s = time.monotonic()

    def tell(text: str) -> None:
        say(f"{time.monotonic() - begun_s:6.1f} s  {text}")

    traced = autosplit.trace(MODEL, seq_len=64)
    tell(f"traced {traced.graph.name}: {len(traced.graph.ops)} ops")
    with autosplit.Cluster("local:3") as cluster:
        tell(f"{cluster!r}: {', '.join(device.name for device in cluster.machine.devices)}")
        setup = autosplit.Setup(backends=("eager",), hosts=cluster, progress=False)
        profile = autosplit.measure(traced, setup=setup)
        tell("; ".join(profile.notes))
        wanted = autosplit.Constraints(num_stages=3, max_replicas=1)
        plan = autosplit.search(traced, profile, None, wanted, setup=setup, budget=autosplit.Budget(search_s=0)).plan
        tell(plan.summary())
        requests = [traced.example_inputs for _ in range(num_requests)]
        expected = traced.program(*traced.example_inputs)
        with autosplit.open_pipeline(traced, plan, hosts=cluster, profile=profile) as model:
            tell(f"{num_requests} requests; after half of them, node-b is killed")
            num_right, killed_s, longest_s, last_s = 0, 0.0, 0.0, time.monotonic()
            for number, answer in enumerate(model.pipeline.stream(requests)):
                num_right += all(torch.equal(a, b) for a, b in zip(answer, expected, strict=True))
                longest_s, last_s = max(longest_s, time.monotonic() - last_s), time.monotonic()
                if number == num_requests // 2:
                    killed_s = time.monotonic()
                    tell(f"killed {kill_node(cluster.hosts['node-b'].pid)} processes")
            tell(f"{num_right} of {num_requests} answers are right and in order; the longest wait was {longest_s:.2f} s")
            for note in model.pipeline.replanned:
                tell(note)
            tell(f"{num_requests // 2 / (time.monotonic() - killed_s):.4g} answers/s after the kill, planning anew included")
            print(model.stats().frame().to_string())
    tell("closed")
    sys.exit(num_right != num_requests)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

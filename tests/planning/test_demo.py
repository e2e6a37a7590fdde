"""The last model of ``make demo``: a cap that one core cannot keep, so a split wins, beside the rules of other tools."""

import re
from pathlib import Path

from autosplit.measuring import stored_models
from autosplit.planning.caps import plan_within_caps
from autosplit.planning.peers import EVEN_BYTES, EVEN_LAYERS, FASTEST_ONLY, predicted_peers
from autosplit.planning.question import Question
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine, parse_bytes, parse_device
from autosplit.values.plan import Source

ROOT = Path(__file__).parents[2]


def test_the_demo_ends_with_a_split_that_wins() -> None:
    commands = re.search(r"^demo:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert commands is not None
    last = [line for line in commands[1].splitlines() if "autosplit auto" in line][-1]
    cap = re.search(r"--memory (\S+)", last)
    assert cap is not None and "transformers:BertModel" in last and "--peers" in last
    [(graph, profile)] = [found for name, found in stored_models(ROOT / "profiles").items() if name.startswith("BertModel")]
    machine = Machine.of(map(parse_device, ("cpu:0", "cpu:1"))).with_memory(
        dict.fromkeys(("cpu:0", "cpu:1"), parse_bytes(cap[1]))
    )
    assert graph.weight_bytes > parse_bytes(cap[1])
    question = Question(graph, profile, Source("bert"), machine, ("eager",), Constraints(), time_limit_s=5)
    plan = plan_within_caps(question)
    peers = predicted_peers(graph, plan, machine, profile).plans
    assert len(plan.stages) == 2 and FASTEST_ONLY not in peers, "its weights break the cap"
    assert peers[EVEN_LAYERS].prediction.throughput_per_s < plan.prediction.throughput_per_s
    assert peers[EVEN_BYTES].prediction.throughput_per_s < 0.9 * plan.prediction.throughput_per_s

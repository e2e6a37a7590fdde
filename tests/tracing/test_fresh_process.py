"""What a new process shows that has traced nothing before: one process for all of it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers

import autosplit

SPECS = ["autosplit.examples.mlp:mlp?depth=4&width=16", "autosplit.examples.tied:tied?vocabulary=30&width=4"]

FRESH = """
import json, sys
import torch
import autosplit.compat.exporter

def parts():
    return {name for name in sys.modules if name.startswith("torch.export.")}

def memory(field):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(field))

before = parts()
torch.export.export(torch.nn.ReLU(), (torch.ones(2),))
late = sorted(parts() - before)
import autosplit, transformers
graphs = [autosplit.trace(spec).graph for spec in sys.argv[2:]]
names = [[graph.hash, *(op.signature for op in graph.ops)] for graph in graphs]
from transformers import GPT2Model

open("/proc/self/clear_refs", "w").write("5")  # the peak so far is forgotten
held = memory("VmRSS")
num_bytes = autosplit.trace("transformers:" + sys.argv[1], seq_len=8).graph.weight_bytes
print(json.dumps({"late": late, "names": names, "share": (memory("VmHWM") - held) / num_bytes, "num_bytes": num_bytes}))
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process with other hashes of strings tells of its first export, of two graphs, and of a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint") / "gpt2"
    config = transformers.GPT2Config(n_embd=1792, n_layer=1, n_head=8, vocab_size=2000, n_positions=16)
    transformers.GPT2Model(config).save_pretrained(folder)
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(folder), *SPECS],
        env={**os.environ, "PYTHONHASHSEED": "12"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_the_first_export_finds_its_part_of_torch_loaded(told: dict[str, Any]) -> None:
    assert told["late"] == []


def test_two_processes_have_the_same_graph(told: dict[str, Any]) -> None:
    graphs = [autosplit.trace(spec).graph for spec in SPECS]
    assert told["names"] == [[graph.hash, *(op.signature for op in graph.ops)] for graph in graphs]


def test_a_checkpoint_is_never_in_memory_twice(told: dict[str, Any]) -> None:
    """Loaded, traced and compared, one of 160 MB raises the peak by little more than its size, wherever its weights begin."""
    assert told["num_bytes"] > 150_000_000 and told["share"] < 1.4

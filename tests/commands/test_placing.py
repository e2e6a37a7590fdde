"""``autosplit annotate`` and ``autosplit memory`` as a person runs them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from autosplit import cli

MLP = "autosplit.examples.mlp:mlp?depth=3&width=16"


def call(*words: str) -> Result:
    return CliRunner().invoke(cli.app, list(words))


def test_ops_are_placed_drawn_written_as_a_plan_and_its_memory_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    files = ("--picture", "placed.svg", "--dot", "placed.dot", "-o", "plan.yaml")
    done = call("annotate", MLP, "--devices", "null:0,null:1", "--place", "aten.relu*=null:1,eager", "--json", *files)
    assert done.exit_code == 0, done.output
    shown = json.loads(done.stdout)
    assert shown["summary"] == "mlp: 3 ops on null:0 (eager), 2 ops on null:1 (eager), 4 copies of 256 B"
    assert shown["why"]["relu"] == "op 'relu' is on null:1 (eager) by pattern 'aten.relu*'"
    assert Path("placed.svg").read_text().startswith("<?xml") and "digraph" in Path("placed.dot").read_text()
    done = call("memory", "plan.yaml", "--json")
    assert done.exit_code == 0 and done.stderr.startswith("load …\n"), done.output
    stages = json.loads(done.stdout)["stages"]
    assert [stage["devices"] for stage in stages] == ["null:0", "null:1", "null:0", "null:1", "null:0"]
    assert stages[0] == {
        "stage": "stage0",
        "devices": "null:0",
        "weight_bytes": 1088,
        "arena_bytes": 64,
        "backend_bytes": 0,
        "ring_bytes": 1088,
        "base_bytes": 0,
        "source": "counted",
        "total_bytes": 2240,
    }


@pytest.mark.parametrize(
    "words,said",
    [
        (["--place", "relu"], "--place relu has no '='; write --place 'PATTERN=DEVICE'"),
        (["--place", "rleu=null:0", "--default", "null:3"], "(2 faults)"),
        (["--place", "relu=null:0", "--place", "relu=null:1"], "--place 'relu' is given with 'null:0' and with 'null:1'"),
        (["--picture", "placed.png"], "--picture writes SVG, not 'placed.png'"),
    ],
)
def test_bad_flags_are_one_message(words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = call("annotate", MLP, "--devices", "null:0,null:1", *words)
    assert done.exit_code == 1
    assert said in " ".join(done.output.split())
    assert list(tmp_path.iterdir()) == []

"""Names from files and peers cannot steer the terminal: control characters are shown escaped, and --json stays JSON."""

import io
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from rich.console import RenderableType
from rich.live import Live
from rich.text import Text
from test_hostile_files import WORKLOAD, with_key
from typer.testing import CliRunner, Result

from autosplit import cli
from autosplit.bundling.bundler import write_bundle
from autosplit.commands import console, watching
from autosplit.commands.report import table
from autosplit.progress import bars
from autosplit.reports.status import Beacon
from autosplit.terminal import Terminal, visible
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Stage

HOSTILE = "a\x1b]0;pwned\x07b\x1b[2Jc\rd\u202ee\u2066f\x9bg[red]h:smile:i"
"""A title, a cleared screen, a return to the first column, text from right to left, one byte that opens a sequence, markup."""
SHOWN = r"a\x1b]0;pwned\x07b\x1b[2Jc\rd\u202ee\u2066f\x9bg[red]h:smile:i"


def require_harmless(text: str) -> None:
    assert all(character.isprintable() or character == "\n" for character in text), repr(text)


@pytest.mark.parametrize(
    "view",
    [HOSTILE, table([{"device": HOSTILE, "load_s": 1.0}]), table([], HOSTILE), table([{"device": "x"}], below=HOSTILE)],
    ids=["string", "cell", "title", "below"],
)
def test_a_hostile_name_is_shown_escaped(view: RenderableType) -> None:
    screen = io.StringIO()
    Terminal(file=screen, width=200).print(view, highlight=False)
    require_harmless(screen.getvalue())
    assert SHOWN in screen.getvalue()


def test_views_of_other_modules_are_escaped_too() -> None:
    """They may hold texts of rich, which leaves out some control characters and keeps others."""
    screen = io.StringIO()
    terminal = Terminal(file=screen, width=200)
    terminal.print(Text(HOSTILE))
    with Live(Text(HOSTILE), console=terminal, auto_refresh=False), bars(terminal) as report:
        report("run", 0.5, HOSTILE)
    require_harmless(screen.getvalue())
    assert r"\x1b[2J" in screen.getvalue() and r"\u202e" in screen.getvalue()


def test_rich_draws_bars_with_control_sequences_of_its_own_alone() -> None:
    screen = io.StringIO()
    with bars(Terminal(file=screen, force_terminal=True, width=200)) as report:
        report("run", 0.5, HOSTILE)
    assert SHOWN in screen.getvalue() and "\x1b[2K" in screen.getvalue(), "rich erases a line before it draws it again"
    assert not any(sequence in screen.getvalue() for sequence in ("\x1b]", "\x1b[2J", "\x07", "\u202e", "\u2066", "\x9b"))


def test_half_of_a_surrogate_pair_can_be_printed() -> None:
    assert visible("a\ud800\tb\n") == "a\\ud800\tb\n"


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """A function that runs a command in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for module in (console, watching):
        monkeypatch.setattr(module, "out", Terminal(width=400))
    monkeypatch.setattr(console, "err", Terminal(stderr=True, width=400))
    return lambda *words: CliRunner().invoke(cli.app, list(words))


def machine(folder: Path) -> list[str]:
    """A device shares the memory of another one."""
    (folder / "machine.yaml").write_text(yaml.dump({"devices": [{"name": "null:0", "shares": HOSTILE}]}))
    return ["search", "model", "--machine", "machine.yaml"]


def plan(folder: Path) -> list[str]:
    """The name of a file."""
    return ["run", HOSTILE]


def workload(folder: Path) -> list[str]:
    """The name of a file, as the name of the workload."""
    place = folder / f"{HOSTILE}.json"
    place.write_text(WORKLOAD)
    return ["search", str(place), "--format", "dnn-partitioning"]


def report(folder: Path) -> list[str]:
    """A field of a run's report, with --verbose, whose traceback holds the name too."""
    (folder / "run.json").write_text(json.dumps({"schema": HOSTILE}))
    return ["report", "run.json", "--verbose"]


def bundle(folder: Path) -> list[str]:
    """Every name in the manifest of a bundle, whose key fits what it says."""
    mlp = trace(load_model("autosplit.examples.mlp:mlp?depth=1&width=8"))
    whole = Stage("s0", tuple(op.name for op in mlp.graph.ops), ("cpu:0",))
    write_bundle({"net": (mlp, Plan(mlp.source, mlp.graph.hash, "", (whole,), UNKNOWN))}, folder / "bundle")
    path = folder / "bundle" / "manifest.json"
    path.write_text(path.read_text().replace('"net"', json.dumps(HOSTILE)).replace('"s0"', json.dumps(HOSTILE)))
    with_key(path)
    return ["bundle", "show", "bundle"]


@pytest.mark.parametrize("hostile", [machine, plan, workload, report, bundle], ids=lambda hostile: hostile.__name__)
def test_a_command_shows_hostile_names_escaped(
    hostile: Callable[[Path], list[str]], command: Callable[..., Result], tmp_path: Path
) -> None:
    done = command(*hostile(tmp_path))
    print(done.output)
    require_harmless(done.output)
    assert r"a\x1b]0;pwned\x07b" in done.output


def test_the_status_of_a_host_is_shown_escaped_and_stays_json(command: Callable[..., Result]) -> None:
    networks = {HOSTILE: {"state": "starting"}}
    beacon = Beacon(lambda: {"devices": {}, "networks": networks, "workers": []})
    done, in_json = command("status"), command("status", "--json")
    beacon.close()
    require_harmless(done.stdout)
    require_harmless(in_json.stdout)
    assert SHOWN in done.stdout and json.loads(in_json.stdout)["hosts"][0]["networks"] == networks


def test_an_error_before_the_command_begins_is_escaped(tmp_path: Path) -> None:
    (tmp_path / "options.yaml").write_text(yaml.dump({"pin": HOSTILE}))
    words = [sys.executable, "-m", "autosplit", "search", "model", "--config", "options.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "400"})
    require_harmless(done.stderr)
    assert done.returncode == 1 and SHOWN in done.stderr


def test_log_lines_are_escaped(capsys: pytest.CaptureFixture[str], command: Callable[..., Result]) -> None:
    console.LogLines().handle(logging.makeLogRecord({"msg": "stage '%s' is late", "args": (HOSTILE,)}))
    assert capsys.readouterr().err == f"stage '{SHOWN}' is late\n"

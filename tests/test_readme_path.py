"""Someone who has read only the README gets from a module of their own to a running pipeline within five minutes."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from autosplit import cli
from autosplit.measuring import store as measuring_store

ROOT = Path(__file__).parents[1]

MINE = '''
import torch


class Mine(torch.nn.Module):
    """A module of the reader: two branches, a parameter with a default, and an answer with names."""

    def __init__(self):
        super().__init__()
        self.left, self.right = torch.nn.Linear(64, 128), torch.nn.Linear(64, 128)
        self.head = torch.nn.Linear(128, 8)

    def forward(self, x, scale=2.0):
        return {"scores": self.head(self.left(x).relu() + self.right(x).tanh()) * scale}
'''

INPUTS = "import autosplit, torch\n\ninputs = (torch.randn(1, 64),)\n"
BRIEF = """
import runpy, brief
brief.measure_briefly()
brief.compile_in_one_process()
names = runpy.run_path("run.py", run_name="__main__")
"""
"""Run the script with short measurements; its names stay until Python ends."""

READER = "module(inputs[0])\nfrom mine import Mine\n\nmodule = Mine().eval()"

CHECK = """
expected = module(inputs[0])
assert torch.allclose(answer["scores"], expected["scores"], rtol=1e-3, atol=1e-5), (answer, expected)
block = result.open()
block.__enter__()(inputs[0])
print("it runs, and ends without leaving a block")
"""


@pytest.mark.timeout(300)
def test_the_readme_leads_from_a_module_to_a_running_pipeline(tmp_path: Path) -> None:
    """The README's own lines, with the reader's module after the README's, as a script in a fresh folder, which is as before."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script, num_modules = re.subn(r"^(module = .*)$", rf"\1\n{READER}", block, flags=re.MULTILINE)
    assert num_modules == 1, "the README names its module in one line"
    script = script.replace("torch.randn(1, 64)", "inputs[0]").replace("import autosplit, torch\n", INPUTS)
    script = script.replace("search_s=1,", "search_s=0.3,")
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "run.py").write_text(script + CHECK)
    path = os.pathsep.join([str(tmp_path), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", BRIEF],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 0 and done.stdout.endswith("without leaving a block\n"), done.stdout + done.stderr
    assert not list(tmp_path.glob("autosplit-*"))


@pytest.mark.timeout(300)
def test_the_commands_of_the_readme_change_no_committed_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a clone, ``git status`` is as before: what is measured goes to the user's store."""
    tracked = subprocess.run(["git", "ls-files", "profiles", "*.md", ".gitignore"], cwd=ROOT, capture_output=True, text=True)
    names = tracked.stdout.split()
    if tracked.returncode or not names:
        pytest.skip("needs a clone")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)

    def git(*words: str) -> str:
        identity = ["-c", "user.name=a reader", "-c", "user.email=reader@localhost"]
        return subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    git("init", "-q")
    git("add", "-A", "-f")
    git("commit", "-qm", "clone")
    committed = {path: path.read_bytes() for path in (ROOT / "profiles").rglob("*.json")}
    lines = re.findall(r"<!-- run -->\n```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(measuring_store, "COMMITTED", tmp_path / "profiles")
    for line in "".join(lines).replace("--budget 2s", "--budget 300ms").splitlines():
        done = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert done.exit_code == 0, done.output
    assert len(lines) == 2 and git("status", "--porcelain") == ""
    assert {path: path.read_bytes() for path in (ROOT / "profiles").rglob("*.json")} == committed
    assert measuring_store.user_root().is_relative_to(os.environ["AUTOSPLIT_CACHE"]) and measuring_store.user_root().is_dir()

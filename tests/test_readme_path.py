"""Someone who has read only the README gets from a module of their own to a running pipeline within five minutes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

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
BRIEF = "import runpy, brief; brief.measure_briefly(); runpy.run_path('run.py', run_name='__main__')"
"""Run the script with short measurements."""

READER = "module(inputs[0])\nfrom mine import Mine\n\nmodule = Mine().eval()"

CHECK = """
expected = module(inputs[0])
assert torch.allclose(answer["scores"], expected["scores"], rtol=1e-3, atol=1e-5), (answer, expected)
print("it runs")
"""


@pytest.mark.timeout(300)
def test_the_readme_leads_from_a_module_to_a_running_pipeline(tmp_path: Path) -> None:
    """The README's own lines, with the reader's module after the README's, as a script in a fresh folder."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script, num_modules = re.subn(r"^(module = .*)$", rf"\1\n{READER}", block, flags=re.MULTILINE)
    assert num_modules == 1, "the README names its module in one line"
    script = script.replace("torch.randn(1, 64)", "inputs[0]").replace("import autosplit, torch\n", INPUTS)
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
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0 and done.stdout.endswith("it runs\n"), done.stdout + done.stderr

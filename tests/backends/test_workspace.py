"""A workspace writes equal weights once, and lets go of stages that nobody runs."""

import torch

from autosplit.backends.workspace import Workspace
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import WEIGHTS, load_stage, unsplit


def test_stages_with_the_same_weights_share_a_file_and_those_in_use_stay():
    layer = torch.nn.Linear(8, 8).eval()
    programs = [unsplit(trace(load_model(layer, inputs=(torch.randn(rows, 8),)))) for rows in (2, 3)]
    with Workspace() as workspace:
        first, second = map(workspace.save, programs)
        assert first != second and (first / WEIGHTS).stat().st_ino == (second / WEIGHTS).stat().st_ino
        programs[0].weights["weight"].detach().add_(1)
        changed = workspace.save(programs[0])
        assert (changed / WEIGHTS).stat().st_ino != (first / WEIGHTS).stat().st_ino
        workspace.keep_files_only([second])
        assert not first.exists() and not changed.exists()
        assert torch.equal(load_stage(second).weights["bias"], layer.bias)

"""Load exporters in the process apart before they are needed, while this process does other work."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
from torch import fx

from autosplit.backends.apart import begin_apart
from autosplit.backends.base import FileBackend, named_backend
from autosplit.tracing.splitting import StageProgram
from autosplit.tracing.tensorspec import TensorSpec


def begin_loading(backends: Sequence[str]) -> None:
    """Let the process apart load the exporters of these backends, while this one does other work."""
    found = [name for name in backends if isinstance(named_backend(name), FileBackend) and not named_backend(name).native]
    if found := [name for name in found if named_backend(name).missing() is None]:
        begin_apart(_load_exporters, found, doing="while exporters were loaded")


def _load_exporters(folder: Path, backends: Sequence[str]) -> None:
    """Write the files of a stage with one op for each backend, which loads all that larger stages need."""
    module, spec = fx.GraphModule(torch.nn.Module(), fx.Graph()), TensorSpec("x", (1,), (1,), "float32")
    x = module.graph.placeholder("x")
    module.graph.output((module.graph.call_function(torch.ops.aten.relu.default, (x,), name="y"),))
    module.recompile()
    program = StageProgram("first", module, (spec,), (replace(spec, name="y"),))
    for name in backends:  # no stage is saved there, so no export of an earlier process is taken
        cast(FileBackend, named_backend(name)).write(program, folder, "f32")

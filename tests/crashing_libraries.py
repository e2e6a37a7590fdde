"""An operator whose module makes the compiled libraries of its stages end each process that opens them."""

import subprocess
from pathlib import Path

import torch
from torch import nn

from autosplit.backends import apart, inductor
from autosplit.tracing.splitting import StageProgram

SOURCE = b"#include <csignal>\n__attribute__((constructor)) static void end() { raise(SIGSEGV); }"


@torch.library.custom_op("crashing::open", mutates_args=())
def opened(x: torch.Tensor) -> torch.Tensor:
    return x + 1


opened.register_fake(torch.empty_like)


class Opening(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return opened(x) * 2


def _crashing_library(program: StageProgram, folder: Path, options: object) -> Path:
    library = folder / "stage.so"
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c++", "-", "-o", library], input=SOURCE, check=True)
    return library


if apart._is_apart:
    inductor.compile_library = _crashing_library  # type: ignore[assignment]

"""A module that makes TorchInductor's compiler write one file at once, in the process in which compilers run."""

import time
from pathlib import Path

from autosplit.backends import apart, inductor
from autosplit.tracing.splitting import StageProgram


def _quick_library(program: StageProgram, folder: Path) -> Path:
    time.sleep(0.3)  # the caller looks at it meanwhile
    (folder / "source.cpp").write_text("it goes with its folder")
    library = folder / "stage.so"
    library.write_text("compiled")
    return library


if apart._is_apart:
    inductor.compile_library = _quick_library  # type: ignore[assignment]

"""Exporters and compilers speak to the screen; a stage that converts well should not."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch._inductor")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings, prints and log lines below ERROR for as long as the context lasts; errors are raised as ever."""
    levels = {name: logging.getLogger(name).level for name in LOGGERS}
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)

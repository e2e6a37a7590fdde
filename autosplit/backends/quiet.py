"""Keep exporters and compilers from printing while a stage is converted."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch._inductor")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings, prints and log lines below ERROR; exceptions pass."""
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

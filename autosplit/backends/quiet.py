"""Keep exporters and compilers from printing while a stage is converted."""

import contextlib
import io
import logging
import threading
import warnings
from collections.abc import Iterator

LOGGERS = ("torch.onnx", "torch.export", "onnxscript", "onnx_ir", "torch._inductor")

_LOCK = threading.Lock()
_inside = 0
"""Blocks of ``quiet`` that are open, in all threads."""
_restoring = contextlib.ExitStack()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings, prints and log lines below ERROR, of all threads; exceptions pass.

    Stages are converted side by side. The first block that opens redirects, and the last one that closes restores: if each
    restored the stream that it found, the program's stdout could stay the buffer of another thread.
    """
    global _inside
    with _LOCK:
        if not _inside:
            _restoring.enter_context(_held_back())
        _inside += 1
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside:
                _restoring.close()


@contextlib.contextmanager
def _held_back() -> Iterator[None]:
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

"""torch.onnx's table of what each torch op becomes, made once a process.

``torch.onnx.export`` makes it anew at every call, and reads the sources of its functions for half a second. It is the same each
time unless a caller adds translations to it, which is why others get their own.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_PATCHING = threading.Lock()


@contextlib.contextmanager
def kept_translations() -> Iterator[None]:
    """Let ``torch.onnx.export`` take the table that was made first, as long as the context lasts.

    A version of torch that makes it in another place makes it each time.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        make: Any = vars(ONNXRegistry)["from_torchlib"]
    except (ImportError, KeyError):
        yield
        return
    with _PATCHING:
        setattr(ONNXRegistry, "from_torchlib", functools.partial(_made, make.__get__(None, ONNXRegistry)))  # noqa: B010
        try:
            yield
        finally:
            setattr(ONNXRegistry, "from_torchlib", make)  # noqa: B010


@functools.cache
def _made(make: Callable[..., Any], **options: Any) -> Any:
    return make(**options)

"""Make torch.onnx's table of translations once a process; ``torch.onnx.export`` makes it at every call, in half a second.

Other callers keep their own tables, because they may add translations.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

_PATCHING = threading.Lock()


@contextlib.contextmanager
def kept_translations() -> Iterator[None]:
    """Let ``torch.onnx.export`` reuse the table; nothing happens in a version of torch that makes it in another place."""
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

"""Loads the part of torch that the first export would load; where it has another name, that export takes longer."""

import contextlib

with contextlib.suppress(ImportError):
    import torch.export._trace  # noqa: F401

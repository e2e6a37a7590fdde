"""Weights by their content, so that parts, backends and networks of one bundle share one copy of equal bytes."""

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from autosplit.bundling.manifest import WEIGHTS, StoredWeight
from autosplit.files import content_hash
from autosplit.tracing.tensorspec import extent_bytes, spec_of
from autosplit.tracing.weightsfile import bytes_of, weight_starts, write_weights


class WeightPool:
    """The weights of a bundle that is being made; a content is named by its SHA-256."""

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}

    def add(self, tensor: torch.Tensor) -> str:
        """Take in a tensor unless its bytes are there, and return the name of its content. Its memory must stay as it is."""
        tensor = tensor.detach()
        data = bytes_of(tensor) if extent_bytes(spec_of("", tensor)) else b""
        content = hashlib.sha256(data).hexdigest()[:32]
        self._tensors.setdefault(content, tensor)
        return content

    def add_all(self, weights: Mapping[str, torch.Tensor]) -> tuple[StoredWeight, ...]:
        """Take in the weights of a part, by their names there."""
        return tuple(
            StoredWeight(self.add(tensor), replace(spec_of(name, tensor), offset_bytes=0)) for name, tensor in weights.items()
        )

    def write(self, folder: Path) -> tuple[str, dict[str, int]]:
        """Write the weights file; return its key, and the place of each content in it, in bytes from its start."""
        specs = [replace(spec_of(content, tensor), offset_bytes=0) for content, tensor in self._tensors.items()]
        key = content_hash(sorted(self._tensors))
        write_weights(folder / WEIGHTS, key, self._tensors, specs)
        return key, weight_starts(folder / WEIGHTS)

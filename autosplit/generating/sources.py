"""Prompts of an encoder: the ids of a text, or the features of a sound, as rows of an input of a step."""

import wave
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from autosplit.errors import UsageError, raise_faults

Array = np.ndarray[Any, Any]

WINDOW, STRIDE = 5, 2
"""Frames of a sound that a row of Whisper's encoder is made of, and frames from one row to the next one: two convolutions of
three frames each, the second one with a stride of 2."""

SAMPLES_PER_S, SAMPLES = 16_000, 160
"""Samples of a sound in a second, and in a frame: those of ``WhisperFeatureExtractor``."""


@dataclass(frozen=True, slots=True)
class Source:
    """The kind of prompts of a model with an encoder.

    Attributes:
        max_rows: rows that the encoder makes of a prompt: of a text at most, of a sound always.
        num_beside: tokens of answers that a step with rows of sources holds beside them, one for each sequence in the caches.
        num_start: tokens with which an answer begins, before the new ones.
        start: these tokens. None, behind the first one, is the language of a sound: the first step takes the likeliest of the
            tokens of languages.
        vocabulary: ids of a text are below it; 0 for sounds.
        num_bins: features of a frame of a sound; 0 for texts.
    """

    max_rows: int
    num_beside: int
    num_start: int
    start: tuple[int | None, ...] = ()
    vocabulary: int = 0
    num_bins: int = 0

    @property
    def is_text(self) -> bool:
        """Whether a prompt is ids."""
        return self.vocabulary > 0

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row: none for an id, bins by frames for a sound."""
        return () if self.is_text else (self.num_bins, WINDOW)

    def num_rows(self, num_tokens: int) -> int:
        """The rows of a usual prompt: of a text as many as it has tokens."""
        return min(num_tokens, self.max_rows) if self.is_text else self.max_rows

    def empty(self, num_rows: int) -> Array:
        """So many rows of zeros: int64 ids, or float32 features."""
        return np.zeros((num_rows, *self.row_shape), np.int64 if self.is_text else np.float32)

    def rows(self, prompt: Sequence[int] | torch.Tensor) -> Array:
        """The rows of a prompt.

        Args:
            prompt: ids ``[length]``; or a sound, float32: samples from -1 to 1, or features ``[num_bins, frames]``.
        Raises: UsageError: with every fault.
        """
        return self._ids(prompt) if self.is_text else self._windows(prompt)

    def _ids(self, prompt: Sequence[int] | torch.Tensor) -> Array:
        ids = ids_of(prompt)
        faults = id_faults(ids, self.vocabulary)
        if len(ids) > self.max_rows:
            faults.append(
                f"it has {len(ids)} tokens, and the caches hold {self.max_rows}; open with max_length={len(ids)} or more "
                f"(--generate max_length={len(ids)})"
            )
        raise_faults(UsageError, "the prompt cannot be taken", faults)
        return np.array(ids, np.int64)

    def _windows(self, prompt: Sequence[int] | torch.Tensor) -> Array:
        """The frames around each row, ``[max_rows, num_bins, WINDOW]``; zeros stand for those before and after the sound."""
        shape = (self.num_bins, STRIDE * self.max_rows)
        if isinstance(prompt, torch.Tensor) and prompt.is_floating_point() and prompt.dim() == 1:
            prompt = self._features(prompt)
        if not isinstance(prompt, torch.Tensor) or prompt.shape != shape or not prompt.is_floating_point():
            given = f"{prompt.dtype} {list(prompt.shape)}" if isinstance(prompt, torch.Tensor) else f"{prompt!r:.60}"
            raise UsageError(
                f"a prompt is the features of a sound {list(shape)}, or its samples, but is {given}; cut or pad the features as "
                "the feature extractor of the model does, and give one sound at a time"
            )
        frames = np.pad(prompt.detach().float().numpy(), ((0, 0), (STRIDE, WINDOW - 2 * STRIDE)))
        windows = np.lib.stride_tricks.sliding_window_view(frames, WINDOW, axis=1)[:, ::STRIDE]
        return np.ascontiguousarray(windows.transpose(1, 0, 2))

    def _features(self, samples: torch.Tensor) -> torch.Tensor:
        """The features of a sound, with silence behind it. Raises: UsageError: it is longer than the window of the encoder."""
        from transformers import WhisperFeatureExtractor

        most = SAMPLES * STRIDE * self.max_rows
        if len(samples) > most:
            longest_s, lasts_s = most / SAMPLES_PER_S, len(samples) / SAMPLES_PER_S
            raise UsageError(f"the sound lasts {lasts_s:.4g} s, and the model takes {longest_s:.4g} s at a time; cut it")
        extract: Any = WhisperFeatureExtractor(feature_size=self.num_bins)
        given = {"sampling_rate": SAMPLES_PER_S, "max_length": most, "return_tensors": "pt"}
        found: torch.Tensor = extract(samples.detach().numpy(), **given).input_features[0]
        return found


def read_sound(path: Path) -> torch.Tensor:
    """The samples of a WAV file, the mean of its channels, float32. Raises: UsageError: it is none, or of another rate."""
    try:
        with wave.open(str(path)) as file:
            num_channels, num_bytes, rate, *_ = file.getparams()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as failure:
        raise UsageError(f"sound '{path}' cannot be read: {str(failure) or 'it ends too soon'}; give a WAV file") from None
    if (num_bytes, rate) != (2, SAMPLES_PER_S):
        raise UsageError(
            f"sound '{path}' has samples of {8 * num_bytes} bits, {rate} a second, and 16 bits and {SAMPLES_PER_S} are needed; "
            f"convert it: ffmpeg -i IN -ar {SAMPLES_PER_S} -c:a pcm_s16le OUT.wav"
        )
    whole = data[: len(data) // (2 * num_channels) * 2 * num_channels]
    return torch.from_numpy(np.frombuffer(whole, "<i2").reshape(-1, num_channels).mean(1).astype(np.float32) / 2**15)


def ids_of(prompt: Sequence[int] | torch.Tensor) -> list[int]:
    """The ids of a prompt, a list, a tensor or an array, as a list. Raises: UsageError: it holds something else."""
    if isinstance(prompt, torch.Tensor | np.ndarray):
        prompt = torch.as_tensor(prompt)
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise UsageError(f"a prompt is ids [N], but is {prompt.dtype} {list(prompt.shape)}; give one prompt at a time")
        return list(map(int, prompt.tolist()))
    if not isinstance(prompt, Sequence) or isinstance(prompt, str):
        raise UsageError(f"a prompt is ids, but is {prompt!r:.40}; give a list of integers for each prompt, or call stream_text")
    return [int(token) if isinstance(token, Integral) else token for token in prompt]


def id_faults(ids: Sequence[int], vocabulary: int) -> list[str]:
    """The faults of ids: there are none, or some are unknown."""
    faults, strange = list[str](), [token for token in ids if not isinstance(token, int) or not 0 <= token < vocabulary]
    if not ids:
        faults.append("it is empty; give at least one token, such as the one that begins a text")
    if strange:
        others = f" ({len(strange)} such tokens)" * (len(strange) > 1)
        faults.append(f"{strange[0]!r:.40} is no token id; ids are 0 to {vocabulary - 1}{others}")
    return faults

"""Text to token ids and back: the tokenizer in the folder of a checkpoint, and text that grows with its tokens."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from autosplit.errors import MissingExtraError, ModelError, UsageError
from autosplit.parsing import shown
from autosplit.tracing.modelspec import parse_options

FILE = "tokenizer.json"
"""The file without which a folder has no tokenizer; no vocabulary of another form is read."""

INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
"""Decoders write it for bytes that are no whole character yet."""


class Texts:
    """Text to token ids and back, by a tokenizer of transformers.

    Args:
        tokenizer: of a checkpoint.
        ends: ids of tokens that end an answer.

    Attributes:
        ends: as given.
    """

    def __init__(self, tokenizer: Any, ends: Sequence[int] = ()) -> None:
        self._tokenizer, self.ends = tokenizer, tuple(ends)

    def ids(self, text: str) -> list[int]:
        """The tokens of a text, with those that the model wants at its beginning."""
        found: list[int] = self._tokenizer(text)["input_ids"]
        return found

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """The tokens of a conversation, by the template of the checkpoint, up to where the assistant goes on.

        Args:
            messages: each with ``role`` and ``content``.
        Raises: UsageError: there is no template, or it refuses the messages.
        """
        from jinja2 import TemplateError

        if not self._tokenizer.chat_template:
            raise UsageError("the tokenizer of the model has no chat template; send a prompt in place of messages")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except TemplateError as failure:
            raise UsageError(f"the chat template of the model refuses the messages: {failure}") from None
        found: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def reader(self, stops: str | Sequence[str] = ()) -> "TextReader":
        """Reads the tokens of one answer. Raises: UsageError: a text that ends it is empty, or no text."""
        stops = (stops,) if isinstance(stops, str) else tuple(stops)
        for stop in stops:
            if not isinstance(stop, str) or not stop:
                raise UsageError(f"stop has {stop!r:.40}, and texts are needed; leave it out, or give ids of tokens as eos")
        return TextReader(self, stops)

    def decoded(self, ids: Sequence[int], stops: Sequence[str] = ()) -> str:
        """The text of tokens, without special ones, up to the first of some texts."""
        found: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        for stop in stops:
            found = found.partition(stop)[0]
        return found


class TextReader:
    """The text of an answer as its tokens come.

    Text is held back while it may go on otherwise: a character whose bytes are not all there, and the beginning of a text that
    ends the answer.

    Args:
        texts: decodes the tokens.
        stops: texts that end the answer; none of them stands in it.

    Attributes:
        is_stopped: whether one of them came; further tokens give no text.
    """

    def __init__(self, texts: Texts, stops: Sequence[str]) -> None:
        self._texts, self._stops = texts, tuple(stops)
        self._context: list[int] = []
        """The tokens of the last text that was given out: how a token is written may depend on those before it."""
        self._ids: list[int] = []
        self._held = ""
        self.is_stopped = False

    def whole(self, pieces: Iterator[str]) -> Iterator[str]:
        """The texts of all tokens as they were added, and what was held back, but no empty ones."""
        yield from filter(None, pieces)
        if text := self.end():
            yield text

    def add(self, token: int) -> str:
        """The further text after a token."""
        if self.is_stopped or token in self._texts.ends:
            return ""
        self._ids.append(token)
        text = self._fresh()
        if text.endswith(INCOMPLETE):
            return ""
        self._context, self._ids = self._ids, []
        return self._released(text)

    def end(self) -> str:
        """The text that was held back, after the last token."""
        if self.is_stopped:
            return ""
        text = self._released(self._fresh())
        return text + self._held if not self.is_stopped else text

    def _fresh(self) -> str:
        """The text of the tokens of which none was given out."""
        return self._texts.decoded(self._context + self._ids)[len(self._texts.decoded(self._context)) :]

    def _released(self, text: str) -> str:
        """The text that no stop begins in; the rest is held back."""
        text = self._held + text
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.is_stopped, self._held = True, ""
            return text[: min(found)]
        num_held = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]


def load_texts(spec: str) -> Texts | None:
    """The tokenizer in the folder of a spec ``transformers:/path/to/checkpoint``; None if there is none.

    Answers end at the tokens that ``generation_config.json`` names, or else at the tokenizer's own.

    Raises: ModelError: it cannot be read. MissingExtraError: no transformers.
    """
    folder = Path(parse_options(spec)[0].removeprefix("transformers:"))
    if not spec.startswith("transformers:") or not (folder / FILE).is_file():
        return None
    try:
        from transformers import AutoTokenizer, GenerationConfig
    except ImportError:
        raise MissingExtraError(
            f"the tokenizer of '{folder}' needs transformers: pip install 'autosplit[transformers]'"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        settings = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    except Exception as failure:  # a malformed file may raise anything
        raise ModelError(f"the tokenizer in '{folder}' cannot be read: {shown(str(failure))}") from failure
    ends = tokenizer.eos_token_id if settings is None or settings.eos_token_id is None else settings.eos_token_id
    return Texts(tokenizer, () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends))


def required(texts: Texts | None) -> Texts:
    """The tokenizer. Raises: UsageError: there is none."""
    if texts is None:
        raise UsageError(
            f"the model has no tokenizer at hand, so a prompt is ids of tokens; texts need 'transformers:/path/to/checkpoint', a "
            f"folder with {FILE}"
        )
    return texts


def with_stops(
    texts: Texts | None, stops: str | Sequence[str], note: Callable[[int], object] | None
) -> Callable[[int], object] | None:
    """The function for new tokens, which also ends a sequence at one of these texts. Raises: UsageError: no tokenizer."""
    if not stops:
        return note
    reader = required(texts).reader(stops)

    def noted(token: int) -> bool:
        reader.add(token)
        return (note is not None and note(token) is True) or reader.is_stopped

    return noted


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of a text that begin a stop, which is not in the text.

    >>> _overlap("one stage, st", "stop")
    2
    """
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)

"""Completions as OpenAI's interface writes them: requests and answers.

https://platform.openai.com/docs/api-reference/completions, and ``/chat``. Beside it, a prompt and a ``stop`` may be token ids,
``top_k``, ``repetition_penalty`` and ``ignore_eos`` are known, and each choice has its ``token_ids``.
"""

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, ValidationError
from starlette.exceptions import HTTPException

from autosplit.errors import UsageError
from autosplit.generating.sampling import MAX_SEED, Sampling
from autosplit.parsing import parse_json, shown

MAX_CHOICES = 128
"""Most answers to one prompt, as in OpenAI's interface."""

MAX_STOPS = 16
"""Most texts or tokens that end an answer."""

NUM_NEW = 16
"""New tokens of a completion that names no ``max_tokens``; a chat may fill the cache."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "logprobs": (False,),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "min_p": (0, 0.0),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
}
"""Parameters that nothing here follows, with the values that ask for nothing."""

CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
"""Status of an error to its code, as far as OpenAI has one."""


class ParameterError(UsageError):
    """A parameter of a request is not understood; ``parameter`` is its name, and ``code`` is OpenAI's name of the error."""

    def __init__(self, message: str, parameter: str, code: str | None = None) -> None:
        super().__init__(message)
        self.parameter, self.code = parameter, code


def _text_of(content: Any) -> Any:
    """The content of a message as one text, of which it may have several parts."""
    if not isinstance(content, list):
        return content
    parts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError("the content of a message must be a text, or parts of the type 'text'")
    return "".join(map(str, parts))


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Message(_Part):
    role: str
    content: Annotated[str, BeforeValidator(_text_of)]
    name: str | None = None


def _without_none(message: Any) -> Any:
    """A message without its empty fields: an answer that a program sends back has some, such as ``refusal``."""
    return {name: value for name, value in message.items() if value is not None} if isinstance(message, dict) else message


_Count = Annotated[int, Field(ge=1)]


class _StreamOptions(_Part):
    include_usage: bool = False


class Asked(_Part):
    """A request: the parameters of both calls, of which None counts as left out."""

    model_config = ConfigDict(extra="allow")
    is_chat: ClassVar[bool]

    model: str | None = None
    max_tokens: _Count | None = None
    n: Annotated[_Count, Field(le=MAX_CHOICES)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None
    stop: str | int | Annotated[list[str | int], Field(max_length=MAX_STOPS)] | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None
    user: str | None = None
    _id: str = PrivateAttr(default_factory=lambda: uuid.uuid4().hex)
    _created_s: int = PrivateAttr(default_factory=lambda: int(time.time()))

    @property
    def most_new(self) -> int | None:
        """New tokens of each answer; None for the default."""
        return self.max_tokens

    @property
    def stops(self) -> list[str | int]:
        """The texts and tokens that end an answer."""
        return self.stop if isinstance(self.stop, list) else [] if self.stop is None else [self.stop]

    @property
    def stop_texts(self) -> tuple[str, ...]:
        """The texts that end an answer."""
        return tuple(stop for stop in self.stops if isinstance(stop, str))

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """The tokens that end an answer."""
        return tuple(stop for stop in self.stops if isinstance(stop, int))

    def sampled(self, num_prompt: int, max_length: int, ends: Sequence[int]) -> Sampling:
        """The sampling of a sequence after so many tokens, those of its prompt as a rule, where sequences of ``max_length`` fit.

        Raises: ParameterError: they do not fit. UsageError: with every value that is beyond its limits.
        """
        room = max_length - num_prompt + 1
        most = max(1, room if self.is_chat else min(NUM_NEW, room))
        num_new = most if self.most_new is None else self.most_new
        if num_new > room:  # clients look for this code, or for the first words
            fits = f"and {num_new} new ones are asked for; at most {room} fit." if room > 0 else "so no new one fits."
            message = f"This model's maximum context length is {max_length} tokens. The prompt has {num_prompt}, {fits}"
            raise ParameterError(message, "messages" if self.is_chat else "prompt", "context_length_exceeded")
        names = ("top_p", "top_k", "repetition_penalty")
        return Sampling(
            num_new,
            (*ends, *self.stop_ids),
            temperature=1.0 if self.temperature is None else self.temperature,
            seed=secrets.randbelow(MAX_SEED) if self.seed is None else self.seed % MAX_SEED,
            **{name: getattr(self, name) for name in names if getattr(self, name) not in (None, -1)},  # -1: vLLM's top_k of all
        )


class Completion(Asked):
    """Prompts to go on with."""

    is_chat = False
    prompt: str | list[str] | list[int] | list[list[int]]

    @property
    def prompts(self) -> list[Any]:
        """Each prompt: a text or token ids."""
        is_one = isinstance(self.prompt, str) or any(isinstance(one, int) for one in self.prompt)
        return [self.prompt] if is_one else list(self.prompt)


class Chat(Asked):
    """A conversation to go on with."""

    is_chat = True
    messages: Annotated[list[Annotated[_Message, BeforeValidator(_without_none)]], Field(min_length=1)]
    max_completion_tokens: _Count | None = None

    @property
    def most_new(self) -> int | None:
        """New tokens of the answer; None for the default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a choice: its further tokens, their text, and why it ends ('' if it does not end yet)."""

    index: int
    token_ids: tuple[int, ...] = ()
    text: str = ""
    reason: str = ""


def read_completion(body: bytes | bytearray, *, is_chat: bool) -> Asked:
    """The request in a body. Raises: ParameterError, UsageError: it is not understood; a parameter is not supported, by name."""
    try:
        data = parse_json(body.decode())
    except ValueError as failure:
        raise UsageError(f"the request is not JSON: {failure}") from None
    try:
        asked: Asked = (Chat if is_chat else Completion).model_validate(data)
    except ValidationError as failure:
        raise _parameter_error(failure) from None
    for name, value in (asked.model_extra or {}).items():
        if value is not None and not any(value == one and type(value) is type(one) for one in NEUTRAL.get(name, ())):
            message = f"parameter {shown(name)} is not supported with the value {shown(value)}; leave it out"
            raise ParameterError(message, name[:100], "unsupported_parameter")
    if isinstance(asked, Completion) and not asked.prompts:
        raise ParameterError("there is no prompt; give a text or ids of tokens", "prompt")
    if "" in asked.stops:
        raise ParameterError("a text in 'stop' is empty; leave it out", "stop")
    return asked


def answer(asked: Asked, pieces: Sequence[Piece], num_prompt: int) -> dict[str, Any]:
    """The answer in one: a piece for each choice; ``num_prompt`` counts the tokens of all of them."""
    choices = []
    for piece in pieces:
        said = {"message": {"role": "assistant", "content": piece.text}} if asked.is_chat else {"text": piece.text}
        choices.append(_choice(piece, said))
    num_new = sum(len(piece.token_ids) for piece in pieces)
    return {**_head(asked, is_chunk=False), "choices": choices, "usage": _usage(num_prompt, num_new)}


def chunk(asked: Asked, piece: Piece, *, is_first: bool = False) -> dict[str, Any]:
    """A piece of a streamed answer; the first one of a chat has the role of the speaker."""
    delta = {**({"role": "assistant"} if is_first else {}), "content": piece.text}
    return {
        **_head(asked, is_chunk=True),
        "choices": [_choice(piece, {"delta": delta} if asked.is_chat else {"text": piece.text})],
    }


def usage_chunk(asked: Asked, num_prompt: int, num_new: int) -> dict[str, Any]:
    """The last piece of a stream, with its tokens."""
    return {**_head(asked, is_chunk=True), "choices": [], "usage": _usage(num_prompt, num_new)}


def error_content(error: HTTPException, failure: BaseException | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape; ``failure`` is its cause, None for an unknown path."""
    status = error.status_code
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    code = "unknown_url" if failure is None else getattr(failure, "code", None) or CODES.get(status)
    return {"error": {"message": error.detail, "type": kind, "param": getattr(failure, "parameter", None), "code": code}}


def _head(asked: Asked, *, is_chunk: bool) -> dict[str, Any]:
    kind = "chat.completion" + ".chunk" * is_chunk if asked.is_chat else "text_completion"
    name = f"{'chatcmpl' if asked.is_chat else 'cmpl'}-{asked._id}"
    return {"id": name, "object": kind, "created": asked._created_s, "model": asked.model}


def _choice(piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
    reason = piece.reason or None
    return {"index": piece.index, **said, "token_ids": list(piece.token_ids), "logprobs": None, "finish_reason": reason}


def _usage(num_prompt: int, num_new: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _parameter_error(failure: ValidationError) -> ParameterError:
    """Every fault in one sentence, with the name of the first parameter."""
    faults: dict[str, list[str]] = {}
    for fault in failure.errors(include_url=False, include_input=False):
        place = fault["loc"] if fault["loc"][:1] == ("messages",) else fault["loc"][:1]
        found = faults.setdefault(".".join(map(str, place)), [])
        found += [fault["msg"]] * (fault["msg"] not in found)  # a union has a fault for each of its kinds
    text = "; ".join(f"parameter {shown(name)}: {', or: '.join(messages)}" for name, messages in faults.items())
    return ParameterError(text if "" not in faults else "the request must be a JSON object", next(iter(faults)).partition(".")[0])

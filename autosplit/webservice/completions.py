"""Completions as OpenAI's interface writes them: requests and answers.

https://platform.openai.com/docs/api-reference/completions, and ``/chat``. Beside it, a prompt and a ``stop`` may be token ids,
``top_k``, ``repetition_penalty`` and ``ignore_eos`` are known, and each choice has its ``token_ids``.
"""

import secrets
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
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


class _Body(BaseModel):
    """The parameters of both calls; None counts as left out."""

    model_config = ConfigDict(extra="allow", strict=True)

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


class _Completion(_Body):
    prompt: str | list[str] | list[int] | list[list[int]]


class _Chat(_Body):
    messages: Annotated[list[Annotated[_Message, BeforeValidator(_without_none)]], Field(min_length=1)]
    max_completion_tokens: _Count | None = None


@dataclass(frozen=True)
class Asked:
    """The contents of a request.

    Attributes:
        model: the name of the model; None for the only one.
        num_choices: answers to each prompt.
        prompts: each a text or token ids; none for a chat.
        messages: of a chat, each with ``role`` and ``content``.
        max_tokens: new tokens of each answer; None for the default.
        sampling: further fields of ``Sampling``.
        stop_ids: tokens that end an answer.
        has_ends: whether the model's own last tokens end an answer, too.
        stop_texts: texts that end an answer.
        is_streamed: whether tokens are sent as they come.
        has_usage: whether a stream ends with the number of its tokens.
        id, created_s: of the answer; seconds since 1970.
    """

    model: str | None
    num_choices: int
    prompts: tuple[str | list[int], ...]
    messages: tuple[Mapping[str, str], ...]
    max_tokens: int | None
    sampling: Mapping[str, Any]
    stop_ids: tuple[int, ...]
    has_ends: bool
    stop_texts: tuple[str, ...]
    is_streamed: bool
    has_usage: bool
    id: str
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def is_chat(self) -> bool:
        """Whether it is a conversation."""
        return bool(self.messages)

    def sampled(self, num_prompt: int, max_length: int, ends: Sequence[int]) -> Sampling:
        """The sampling of a sequence after so many tokens, those of its prompt as a rule, where sequences of ``max_length`` fit.

        Raises: ParameterError: they do not fit. UsageError: with every value that is beyond its limits.
        """
        room = max_length - num_prompt + 1
        most = max(1, room if self.is_chat else min(NUM_NEW, room))
        num_new = most if self.max_tokens is None else self.max_tokens
        if num_new > room:  # clients look for this code, or for the first words
            fits = f"and {num_new} new ones are asked for; at most {room} fit." if room > 0 else "so no new one fits."
            message = f"This model's maximum context length is {max_length} tokens. The prompt has {num_prompt}, {fits}"
            raise ParameterError(message, "messages" if self.is_chat else "prompt", "context_length_exceeded")
        return Sampling(num_new, (*ends, *self.stop_ids), **self.sampling)


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
        found: Any = (_Chat if is_chat else _Completion).model_validate(data)
    except ValidationError as failure:
        raise _parameter_error(failure) from None
    extra: Mapping[str, Any] = found.model_extra
    for name, value in extra.items():
        if value is not None and not any(value == one and type(value) is type(one) for one in NEUTRAL.get(name, ())):
            message = f"parameter {shown(name)} is not supported with the value {shown(value)}; leave it out"
            raise ParameterError(message, name[:100], "unsupported_parameter")
    prompts = () if is_chat else found.prompt if _holds(found.prompt, str) or _holds(found.prompt, list) else [found.prompt]
    if not is_chat and not prompts:
        raise ParameterError("there is no prompt; give a text or ids of tokens", "prompt")
    stops = found.stop if isinstance(found.stop, list) else [] if found.stop is None else [found.stop]
    if "" in stops:
        raise ParameterError("a text in 'stop' is empty; leave it out", "stop")
    names = ("top_p", "top_k", "repetition_penalty")
    return Asked(
        found.model,
        found.n or 1,
        tuple(prompts),
        tuple(message.model_dump(exclude_none=True) for message in found.messages) if is_chat else (),
        found.max_completion_tokens if is_chat and found.max_completion_tokens is not None else found.max_tokens,
        {
            "temperature": 1.0 if found.temperature is None else found.temperature,
            "seed": secrets.randbelow(MAX_SEED) if found.seed is None else found.seed % MAX_SEED,
            **{name: getattr(found, name) for name in names if getattr(found, name) not in (None, -1)},  # -1: vLLM's top_k of all
        },
        tuple(stop for stop in stops if isinstance(stop, int)),
        not found.ignore_eos,
        tuple(stop for stop in stops if isinstance(stop, str)),
        bool(found.stream),
        found.stream_options is not None and found.stream_options.include_usage,
        f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4().hex}",
    )


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
    return {"id": asked.id, "object": kind, "created": asked.created_s, "model": asked.model}


def _choice(piece: Piece, said: dict[str, Any]) -> dict[str, Any]:
    reason = piece.reason or None
    return {"index": piece.index, **said, "token_ids": list(piece.token_ids), "logprobs": None, "finish_reason": reason}


def _usage(num_prompt: int, num_new: int) -> dict[str, int]:
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def _holds(prompt: Any, kind: type) -> bool:
    """Whether a prompt is a list of such values."""
    return isinstance(prompt, list) and all(isinstance(one, kind) for one in prompt)


def _parameter_error(failure: ValidationError) -> ParameterError:
    """Every fault in one sentence, with the name of the first parameter."""
    faults: dict[str, list[str]] = {}
    for fault in failure.errors(include_url=False, include_input=False):
        place = fault["loc"] if fault["loc"][:1] == ("messages",) else fault["loc"][:1]
        found = faults.setdefault(".".join(map(str, place)), [])
        found += [fault["msg"]] * (fault["msg"] not in found)  # a union has a fault for each of its kinds
    text = "; ".join(f"parameter {shown(name)}: {', or: '.join(messages)}" for name, messages in faults.items())
    return ParameterError(text if "" not in faults else "the request must be a JSON object", next(iter(faults)).partition(".")[0])

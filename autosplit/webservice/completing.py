"""The routes of OpenAI's completions: a request becomes sequences of a generator, whose tokens travel as they come."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from autosplit.errors import RefusedError, UsageError
from autosplit.generating.generators import Generator
from autosplit.generating.sequences import Generation, new_generation
from autosplit.parsing import shown
from autosplit.running.request import monotonic_deadline
from autosplit.webservice.bodies import Bodies
from autosplit.webservice.completions import (
    Asked,
    Chat,
    Completion,
    ParameterError,
    Piece,
    answer,
    chunk,
    error_content,
    read_completion,
    usage_chunk,
)
from autosplit.webservice.connections import MODEL, cancelled_with_caller
from autosplit.webservice.failures import as_http
from autosplit.webservice.repository import Repository, ServedModel

NO_TOKENIZER = "model '{}' has no tokenizer at hand; send the ids of the tokens, and read 'token_ids' of the answer"


class CompletionAnswers:
    """The answers to one request, each a sequence whose tokens come to the event loop.

    Args:
        generator: runs them.
        asked: the contents of the request.
        end_s: monotonic seconds at which they must have ended.
    """

    def __init__(self, generator: Generator, asked: Asked, end_s: float) -> None:
        self._generator, self._asked, self._texts, self._end_s = generator, asked, generator.texts, end_s
        self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue[tuple[int, int | None]]()
        self._futures = list[Future[list[int]]]()
        self.num_prompt = 0

    def begin(self, model: str, queue_s: float) -> None:
        """In another thread: find the tokens of the prompts, and submit all of them at once.

        Args:
            model: its name, for messages.
            queue_s: seconds in which there must be room for each of them.
        Raises: as ``new_generation`` and ``Generator.submit_all``. ParameterError: a text, and no tokenizer. UsageError: the chat
            template refuses the messages.
        """
        asked, num_each = self._ids(model), self._asked.n or 1
        capacity, left_s = self._generator.capacity, max(1e-3, self._end_s - time.monotonic())
        deadline_ns, generations = monotonic_deadline(left_s), list[Generation]()
        for index, prompt in enumerate(prompt for prompt in asked for _ in range(num_each)):
            sampling = self._asked.sampled(capacity.num_before(len(prompt)), capacity.max_length, self._ends).of(index)
            generations.append(
                new_generation(prompt, None, sampling, capacity, partial(self._put, index), deadline_ns=deadline_ns)
            )
        self._futures = [one.future for one in generations]
        for index, future in enumerate(self._futures):
            future.add_done_callback(partial(self._end, index))
        self._generator.submit_all(generations, min(queue_s, left_s))
        self.num_prompt = sum(map(len, asked))

    async def pieces(self) -> AsyncIterator[Piece]:
        """The answers as they come. Raises: the error of the first sequence that fails. TimeoutError: a step takes too long."""
        readers = [self._texts.reader(self._asked.stop_texts) if self._texts else None for _ in self._futures]
        running = set(range(len(self._futures)))
        while running:
            index, token = await asyncio.wait_for(self._events.get(), self._end_s - time.monotonic())
            if index not in running:  # it ended at a text, and had further tokens under way
                continue
            reader = readers[index]
            if token is not None:
                text = reader.add(token) if reader else ""
                stopped = reader is not None and reader.is_stopped
                if stopped:
                    self._futures[index].cancel()
                    running.remove(index)
                yield Piece(index, (token,), text, "stop" if stopped else "")
                continue
            running.remove(index)
            last = self._futures[index].result()[-1]
            ends = {*self._ends, *self._asked.stop_ids}
            text = reader.end() if reader else ""
            yield Piece(index, (), text, "stop" if last in ends or (reader is not None and reader.is_stopped) else "length")

    def cancel(self) -> None:
        """End all sequences that still run."""
        for future in self._futures:
            future.cancel()

    @property
    def _ends(self) -> Sequence[int]:
        """Tokens with which the model itself ends an answer."""
        return self._texts.ends if self._texts and not self._asked.ignore_eos else ()

    def _put(self, index: int, token: int | None) -> None:
        """In any thread: hand a token to the loop, or None after the last one."""
        with suppress(RuntimeError):  # the server has ended, and its loop with it
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, token))

    def _end(self, index: int, future: "Future[list[int]]") -> None:
        self._put(index, None)

    def _ids(self, model: str) -> list[list[int]]:
        asked, texts = self._asked, self._texts
        prompts = asked.prompts if isinstance(asked, Completion) else []
        if texts is None and (asked.is_chat or asked.stop_texts or any(isinstance(one, str) for one in prompts)):
            name = "messages" if asked.is_chat else "stop" if asked.stop_texts else "prompt"
            raise ParameterError(NO_TOKENIZER.format(model), name)
        if texts is not None and isinstance(asked, Chat):
            return [texts.chat_ids([message.model_dump(exclude_none=True) for message in asked.messages])]
        return [texts.ids(one) if texts and isinstance(one, str) else list(map(int, one)) for one in prompts]


class Completions:
    """The routes, over the models of a repository that generate.

    Args:
        bodies: reads the bodies of requests within the limits of the server.
        counters: gets the counts of tokens.
    """

    def __init__(self, repository: Repository, bodies: Bodies, counters: CollectorRegistry) -> None:
        self._repository, self._bodies = repository, bodies
        self._tokens = Counter("autosplit_tokens", "Tokens of prompts and of answers.", ["model", "kind"], registry=counters)
        self._first_s = Histogram(
            "autosplit_first_token_seconds", "From the body of a request to its first new token.", ["model"], registry=counters
        )

    async def models(self, request: Request) -> Response:
        """The models that generate."""
        return JSONResponse({"object": "list", "data": [_about(one) for one in self._repository.served if one.generator]})

    async def model(self, request: Request) -> Response:
        """One of them."""
        return JSONResponse(_about(self._model(request.path_params["model"])))

    async def completions(self, request: Request) -> Response:
        """Go on with prompts."""
        return await self._answered(request, is_chat=False)

    async def chat(self, request: Request) -> Response:
        """Go on with a conversation."""
        return await self._answered(request, is_chat=True)

    async def _answered(self, request: Request, *, is_chat: bool) -> Response:
        with cancelled_with_caller(request):
            async with self._bodies.read(request) as body:
                asked = read_completion(body, is_chat=is_chat)
                begun_s, model = time.monotonic(), self._model(asked.model)
                request.scope[MODEL] = asked.model = model.name
                answers = await self._begun(asked, model, begun_s + self._bodies.limits.request_s)
            pieces = self._counted(answers.pieces(), model.name, begun_s)
            if asked.stream:
                return StreamingResponse(
                    _events(asked, answers, pieces),
                    media_type="text/event-stream",
                    headers={"cache-control": "no-store"},
                    background=BackgroundTask(answers.cancel),  # a caller may leave before the first event
                )
            try:
                found = [piece async for piece in pieces]
            finally:
                answers.cancel()
            return JSONResponse(answer(asked, _joined(found), answers.num_prompt))

    async def _begun(self, asked: Asked, model: ServedModel, end_s: float) -> CompletionAnswers:
        """The sequences of a request, under way, on the newest version of its model."""
        while True:
            assert model.generator is not None
            answers = CompletionAnswers(model.generator, asked, end_s)
            try:
                await run_in_threadpool(answers.begin, model.name, self._bodies.limits.queue_s)
            except BaseException as failure:
                answers.cancel()
                newer = self._repository.get(model.name)
                if not isinstance(failure, RefusedError) or newer is None or newer is model or newer.generator is None:
                    raise
                model = newer
                continue
            self._tokens.labels(model.name, "prompt").inc(answers.num_prompt)
            return answers

    async def _counted(self, pieces: AsyncIterator[Piece], model: str, begun_s: float) -> AsyncIterator[Piece]:
        """The same pieces, counted. Raises: HTTPException: the time of the request is over."""
        is_first, tokens = True, self._tokens.labels(model, "new")
        try:
            async for piece in pieces:
                if is_first:
                    self._first_s.labels(model).observe(time.monotonic() - begun_s)
                    is_first = False
                tokens.inc(len(piece.token_ids))
                yield piece
        except TimeoutError as failure:  # DeadlineError too
            raise HTTPException(504, f"no answer within {self._bodies.limits.request_s:g} s") from failure

    def _model(self, name: str | None) -> ServedModel:
        """The model of this name, or the only one.

        Raises: HTTPException: it is not in service. ParameterError: no name, and several models. UsageError: no generator.
        """
        generators = [one for one in self._repository.served if one.generator]
        model = generators[0] if name is None and len(generators) == 1 else self._repository.get(name or "")
        if model is None:
            known = ", ".join(one.name for one in generators) or "none"
            if name is None:
                raise ParameterError(f"the request names no model; the models that generate are: {known}", "model")
            raise HTTPException(404, f"model {shown(name)} is not in service; the models that generate are: {known}")
        if model.generator is None:
            raise UsageError(f"model '{name}' does not generate; send its tensors to /v2/models/{name}/infer")
        return model


async def _events(asked: Asked, answers: CompletionAnswers, pieces: AsyncIterator[Piece]) -> AsyncIterator[str]:
    """A streamed answer, as server-sent events. A failure is the last one, as the status has been sent."""
    num_new, spoke = 0, set[int]()
    try:
        async for piece in pieces:
            num_new += len(piece.token_ids)
            yield _event(chunk(asked, piece, is_first=piece.index not in spoke))
            spoke.add(piece.index)
        if asked.stream_options is not None and asked.stream_options.include_usage:
            yield _event(usage_chunk(asked, answers.num_prompt, num_new))
        yield "data: [DONE]\n\n"
    except Exception as failure:
        yield _event(error_content(as_http(failure), failure))
    finally:
        answers.cancel()


def _event(content: object) -> str:
    return f"data: {json.dumps(content)}\n\n"


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """One piece for each choice."""
    found: dict[int, Piece] = {}
    for piece in pieces:
        before = found.get(piece.index, Piece(piece.index))
        token_ids = before.token_ids + piece.token_ids
        found[piece.index] = Piece(piece.index, token_ids, before.text + piece.text, piece.reason)
    return [found[index] for index in sorted(found)]


def _about(model: ServedModel) -> dict[str, object]:
    assert model.generator is not None
    longest = model.generator.capacity.max_length  # under the name that vLLM gives it
    return {"id": model.name, "object": "model", "created": model.created_s, "owned_by": "autosplit", "max_model_len": longest}

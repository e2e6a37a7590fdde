"""The routes of the Open Inference Protocol, version 2, with Triton's calls for its repository of models, and OpenAI's routes.

An error is a status and ``{"error": SENTENCE}``, or OpenAI's form of it below ``/v1/``. Each answer of a guarded route has the
header ``x-request-id``: the caller's own, or a new one.
"""

import asyncio
import hmac
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from autosplit.errors import RefusedError, UsageError
from autosplit.parsing import json_safe, shown
from autosplit.serving.hostmanager import HostManager
from autosplit.serving.metrics import HostMetrics
from autosplit.versions import version_of
from autosplit.webservice.bodies import Bodies
from autosplit.webservice.completing import Completions
from autosplit.webservice.completions import error_content
from autosplit.webservice.connections import MODEL, cancelled_with_caller
from autosplit.webservice.failures import as_http
from autosplit.webservice.limits import ServerLimits
from autosplit.webservice.repository import Repository, ServedModel
from autosplit.webservice.tensors import JSON_LENGTH, InferRequest, metadata, read_request, write_answer

log = logging.getLogger(__name__)

PAGE = Path(__file__).with_name("livepage.html").read_text(encoding="utf-8")
"""The page at "/": one HTML file without a build step. It asks for the token, if the server wants one."""

OPEN_PATHS = ("/", "/health", "/v2/health/live", "/v2/health/ready")
"""Paths that need no token: their answers hold nothing on models or requests."""


@dataclass(eq=False)
class Application:
    """The state of one server: its models, its limits, and counts of its requests.

    Attributes:
        host: runs the models.
        limits: most bytes, seconds and connections.
        token: the token that callers must send; '' for none.
        ending: set once the server ends, so that endless answers end too.
    """

    host: HostManager
    repository: Repository
    limits: ServerLimits
    token: str = ""
    ending: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        """Make the counters."""
        self.bodies = Bodies(self.limits)
        self.counters = kept = CollectorRegistry()
        self.completing = Completions(self.repository, self.bodies, kept)
        kept.register(HostMetrics(self.host.health))
        self.requests = Counter("autosplit_http_requests", "Inference requests, by status.", ["model", "status"], registry=kept)
        self.seconds = Histogram("autosplit_http_request_seconds", "From the head to the answer.", ["model"], registry=kept)

    def starlette(self) -> Starlette:
        """The routes."""
        models = ("/v2/models/{model}", "/v2/models/{model}/versions/{version}")
        routes = [Route(f"{path}/infer", self.guarded(self.infer, is_counted=True), methods=["POST"]) for path in models]
        routes += [  # after those of inference, because each request tries the routes in their order
            Route("/", self.page),
            Route("/events", self.guarded(self.events)),
            Route("/metrics", self.guarded(self.metrics)),
            Route("/v2", self.guarded(self.server)),
            Route("/v2/health/live", self.guarded(self.live)),
            Route("/v2/health/ready", self.guarded(self.ready)),
            Route("/health", self.guarded(self.ready)),  # where vLLM and llama.cpp answer
            Route("/v2/repository/index", self.guarded(self.index), methods=["POST"]),
            Route("/v2/repository/models/{model}/load", self.guarded(self.load), methods=["POST"]),
            Route("/v2/repository/models/{model}/unload", self.guarded(self.unload), methods=["POST"]),
        ]
        for path, route in {"/v1/completions": self.completing.completions, "/v1/chat/completions": self.completing.chat}.items():
            routes += [Route(path, self.guarded(route, is_counted=True), methods=["POST"])]
        routes += [
            Route("/v1/models", self.guarded(self.completing.models)),
            Route("/v1/models/{model}", self.guarded(self.completing.model)),
        ]
        for path in models:
            routes += [Route(path, self.guarded(self.model)), Route(f"{path}/ready", self.guarded(self.model_ready))]
        return Starlette(routes=routes, exception_handlers={HTTPException: _no_route})

    def guarded(
        self, route: Callable[[Request], Awaitable[Response]], *, is_counted: bool = False
    ) -> Callable[[Request], Awaitable[Response]]:
        """The route behind the token, with its errors as answers; those of inference are counted."""

        async def answer(request: Request) -> Response:
            given = request.headers.get("x-request-id", "")
            name = given if 0 < len(given) <= 100 and given.isprintable() else uuid.uuid4().hex
            begun_s, status = time.perf_counter(), 499
            try:
                try:
                    self._require_token(request)
                    response = await route(request)
                except Exception as failure:
                    error = as_http(failure, loading=route == self.load)
                    if error.status_code >= 500:
                        log.debug("request %s failed", name, exc_info=failure)
                    content = error_content(error, failure) if _is_openai(request) else {"error": error.detail}
                    response = JSONResponse(content, error.status_code, error.headers)
                status = response.status_code
                response.raw_headers.append((b"x-request-id", name.encode("latin-1")))
                return response
            finally:
                elapsed_s = time.perf_counter() - begun_s
                if is_counted:  # all models that are not in service count as one: names cannot fill the memory
                    model = request.scope.get(MODEL, "unknown")
                    self.requests.labels(model, status).inc()
                    self.seconds.labels(model).observe(elapsed_s)
                level = logging.WARNING if status >= 500 else logging.INFO
                if log.isEnabledFor(level):
                    path = request.scope["path"]
                    record = {"id": name, "method": request.method, "path": path, "status": status, "seconds": elapsed_s}
                    log.log(level, "%s", json.dumps(record))

        return answer

    def _require_token(self, request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        is_open = not self.token or request.scope["path"] in OPEN_PATHS
        if not is_open and not hmac.compare_digest(given, self.token.encode()):
            raise HTTPException(401, "give the server's token as 'Authorization: Bearer TOKEN'", {"www-authenticate": "Bearer"})

    async def page(self, request: Request) -> Response:
        """The live page. It holds no data; its script asks for events with the token."""
        return HTMLResponse(PAGE, headers={"content-security-policy": "default-src 'self' 'unsafe-inline'"})

    async def events(self, request: Request) -> Response:
        """The health of the host and the counts of requests, every second, as server-sent events."""

        async def told() -> AsyncIterator[str]:
            while not self.ending.is_set():
                health = await run_in_threadpool(self.host.health)
                models = [
                    {
                        "name": one.name,
                        "version": one.version,
                        "network": one.networks[0],
                        "ready": self.repository.is_ready(one),
                        "sequences": one.num_sequences,
                    }
                    for one in self.repository.served
                ]
                yield f"data: {json.dumps(json_safe({**health, 'models': models, 'unix_s': time.time()}))}\n\n"
                try:
                    await asyncio.wait_for(self.ending.wait(), 1.0)
                except TimeoutError:
                    continue

        return StreamingResponse(told(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def metrics(self, request: Request) -> Response:
        """Counters of the host and of the server for Prometheus."""
        return Response(await run_in_threadpool(generate_latest, self.counters), media_type=CONTENT_TYPE_LATEST)

    async def server(self, request: Request) -> Response:
        """Name, version and extensions of the server."""
        extensions = ["binary_tensor_data", "model_repository"]
        return JSONResponse({"name": "autosplit", "version": version_of("autosplit"), "extensions": extensions})

    async def live(self, request: Request) -> Response:
        """That the server answers."""
        return JSONResponse({"live": True})

    async def ready(self, request: Request) -> Response:
        """Whether each copy of each stage of each model is at work."""
        served = self.repository.served
        is_ready = bool(served) and not self.ending.is_set() and all(map(self.repository.is_ready, served))
        return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)

    async def index(self, request: Request) -> Response:
        """The models: in service, or only as a plan file."""
        served = {model.name: model for model in self.repository.served}
        rows = []
        for name in dict.fromkeys([*served, *self.repository.files()]):
            model = served.get(name)
            state = "UNAVAILABLE" if model is None else "READY" if self.repository.is_ready(model) else "UNREADY"
            rows.append({"name": name, "version": str(model.version) if model else "", "state": state, "reason": ""})
        return JSONResponse(rows)

    async def load(self, request: Request) -> Response:
        """Load a model, or a new version of it."""
        await asyncio.wrap_future(self.repository.load(request.path_params["model"]))
        return JSONResponse({})

    async def unload(self, request: Request) -> Response:
        """Take a model out of service after its last answer."""
        await asyncio.wrap_future(self.repository.unload(request.path_params["model"]))
        return JSONResponse({})

    async def model(self, request: Request) -> Response:
        """The tensors of a model."""
        model = self._model(request)
        about = {"name": model.name, "versions": [str(model.version)], "platform": "autosplit"}
        return JSONResponse(
            {**about, "inputs": metadata(model.inputs, model.free), "outputs": metadata(model.outputs, model.free)}
        )

    async def model_ready(self, request: Request) -> Response:
        """Whether each copy of each stage of a model is at work."""
        model = self._model(request)
        is_ready = self.repository.is_ready(model)
        return JSONResponse({"name": model.name, "ready": is_ready}, 200 if is_ready else 503)

    async def infer(self, request: Request) -> Response:
        """One request to a model. A caller that leaves cancels it."""
        model, json_bytes = self._model(request), _json_bytes(request)
        request.scope[MODEL] = model.name
        if model.generator is not None:
            raise UsageError(f"model '{model.name}' generates, and has no tensors; send its prompts to /v1/completions")
        num_before = -(json_bytes or 0) % 8  # binary data then begin where an item of any dtype may, and need no copy
        with cancelled_with_caller(request):
            async with self.bodies.read(request, num_before) as body:
                data = memoryview(body)[num_before:]
                return await self._infer(model, read_request(data, json_bytes, model.inputs, model.outputs, model.free))

    async def _infer(self, model: ServedModel, given: InferRequest) -> Response:
        begun_s = time.monotonic()
        while True:
            left_s = self.limits.request_s - (time.monotonic() - begun_s)
            if left_s <= 0:
                raise HTTPException(504, f"no answer within {self.limits.request_s:g} s")
            try:
                run = model.service.pipeline.run_async if model.service else partial(self.host.run_async, model.networks[0])
                async with asyncio.timeout(left_s):
                    tensors = await run(given.tensors, deadline_s=left_s, timeout_s=min(self.limits.queue_s, left_s))
                break
            except TimeoutError as failure:  # DeadlineError too
                raise HTTPException(504, f"no answer within {self.limits.request_s:g} s") from failure
            except (RefusedError, UsageError):  # a new version may have taken its place meanwhile
                newer = self.repository.get(model.name)
                if newer in (None, model):
                    raise
                model = newer or model
        answer = {"model_name": model.name, "model_version": str(model.version), **({"id": given.id} if given.id else {})}
        content, json_bytes = write_answer(answer, model.outputs, tensors, given.outputs)
        if json_bytes is None:
            return Response(content, media_type="application/json")
        return Response(content, headers={JSON_LENGTH: str(json_bytes)}, media_type="application/octet-stream")

    def _model(self, request: Request) -> ServedModel:
        """The model that a path names. Raises: HTTPException: it is not in service, or not in this version."""
        name, wanted = request.path_params["model"], request.path_params.get("version")
        model = self.repository.get(name)
        if model is None:
            known = ", ".join(model.name for model in self.repository.served)
            raise HTTPException(404, f"model {shown(name)} is not in service; the models are: {known or 'none'}")
        if wanted not in (None, str(model.version)):
            raise HTTPException(404, f"model '{name}' has version {model.version}, and not {shown(wanted)}")
        return model


async def _no_route(request: Request, failure: Exception) -> Response:
    """The answer to a path or a method that no route has."""
    assert isinstance(failure, HTTPException)
    text = f"{request.method} {shown(request.url.path)}: {failure.detail}"
    content = error_content(HTTPException(failure.status_code, text)) if _is_openai(request) else {"error": text}
    return JSONResponse(content, failure.status_code, failure.headers)


def _is_openai(request: Request) -> bool:
    """Whether a path is one of OpenAI's interface, which has its own form of errors."""
    path: str = request.scope["path"]
    return path.startswith("/v1/")


def _json_bytes(request: Request) -> int | None:
    """Bytes of JSON before binary data, as the header says; None for all. Raises: UsageError: the header is no number."""
    text = request.headers.get(JSON_LENGTH)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise UsageError(f"the header {JSON_LENGTH} is {shown(text)}, and not a number of bytes")
    return int(text)

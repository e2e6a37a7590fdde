"""Traces of requests for OpenTelemetry, by its own middleware where that is installed."""

import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
from servedplans import Served, beside, good, listening

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def ask(served: Served) -> None:
    application = beside(served)
    with listening(application) as url:
        asked = replace(served, application=application, url=url)
        assert asked.call("POST", "/v2/models/mlp/infer", good(), {"traceparent": PARENT})[0] == 200


def test_requests_pass_the_middleware(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = list[str]()

    def middleware(application: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        async def traced(scope: Any, receive: Any, send: Any) -> None:
            paths.append(scope["path"])
            await application(scope, receive, send)

        return traced

    module = ModuleType("opentelemetry.instrumentation.asgi")
    module.OpenTelemetryMiddleware = middleware  # type: ignore[attr-defined]
    for name in ("opentelemetry", "opentelemetry.instrumentation"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ask(served)
    assert paths == ["/v2/models/mlp/infer"]


def test_a_request_is_a_span_of_its_callers_trace(served: Served) -> None:
    pytest.importorskip("opentelemetry.instrumentation.asgi", reason="opentelemetry-instrumentation-asgi is not installed")
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason="opentelemetry-sdk is not installed")
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    ask(served)
    whole = [span for span in spans.get_finished_spans() if span.kind == trace.SpanKind.SERVER]
    assert len(whole) == 1 and whole[0].name.startswith("POST")
    assert f"{whole[0].context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{whole[0].parent.span_id:016x}" == PARENT.split("-")[2]
    assert 200 in whole[0].attributes.values()

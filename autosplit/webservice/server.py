"""WebServer: serves an application until SIGTERM or Ctrl-C."""

import contextlib
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from autosplit.errors import UsageError
from autosplit.webservice.application import Application
from autosplit.webservice.connections import limited_protocol


class _Server(uvicorn.Server):
    """uvicorn's server, which ends endless answers too."""

    def __init__(self, config: uvicorn.Config, application: Application, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._application, self._started = application, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._application.ending.set()
        await super().shutdown(sockets)


class WebServer:
    """A server that has its port from the start; it listens while ``serve`` runs, and refuses connections before.

    The caller closes the host and the repository afterwards.

    Args:
        application: the Starlette application to serve.
        started: called once requests are taken.
        host: name or number of a network interface; the loopback interface by default, which other machines do not reach.
        port: number of the port; 0 for any free one.
        certificate: file of a TLS certificate, with its chain; None for plain HTTP.
        key: file of its private key.
    Raises: UsageError: the port is taken, or the certificate cannot be read.
    """

    def __init__(
        self,
        application: Application,
        started: Callable[[], None],
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
        certificate: Path | None = None,
        key: Path | None = None,
    ) -> None:
        limits = application.limits
        settings: dict[str, Any] = {
            "http": limited_protocol(limits),
            "ws": "none",
            "log_config": None,
            "access_log": False,
            "lifespan": "off",
            "ssl_certfile": certificate,
            "ssl_keyfile": key,
            "proxy_headers": False,
            "server_header": False,
            "timeout_keep_alive": max(1, round(limits.idle_s)),
            "timeout_graceful_shutdown": max(1, round(limits.drain_s)),
        }
        config = uvicorn.Config(_with_traces(application.starlette()), **settings)
        try:
            config.load()
        except OSError as failure:
            raise UsageError(f"the certificate '{certificate}' cannot be used: {failure}") from None
        self._socket = socket.socket()
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended lately do not count
            self._socket.bind((host, port))
        except (OSError, OverflowError) as failure:
            self._socket.close()
            place = f"{host}:{port}"
            raise UsageError(f"cannot listen at {place}: {failure}; choose another --port or --host") from None
        scheme = "http" if certificate is None else "https"
        self.url = f"{scheme}://{host}:{self._socket.getsockname()[1]}"
        self._server = _Server(config, application, started)

    def serve(self) -> None:
        """Take requests until SIGTERM, Ctrl-C or ``stop``, then refuse new ones and finish the others within ``limits.drain_s``.

        A second signal ends it at once.
        """
        with self._socket, contextlib.suppress(KeyboardInterrupt):  # uvicorn raises the signals again that it was sent
            self._server.run([self._socket])

    def close(self) -> None:
        """Give the port back, also where ``serve`` never ran."""
        self._socket.close()

    def stop(self) -> None:
        """End as after SIGTERM; from any thread."""
        self._server.should_exit = True


def _with_traces(application: ASGIApp) -> ASGIApp:
    """Traces each request for OpenTelemetry, if opentelemetry-instrumentation-asgi is installed."""
    try:
        from opentelemetry.instrumentation.asgi import OpenTelemetryMiddleware
    except ModuleNotFoundError:
        return application
    traced: ASGIApp = OpenTelemetryMiddleware(application)
    return traced

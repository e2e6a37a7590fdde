"""Connections: idle ones are closed, and none is taken above the limit.

uvicorn limits the requests at work. It waits without limit for the head of a request, whose size it does not limit either, so
idle connections would take all descriptors of the process.
"""

import asyncio
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from autosplit.webservice.limits import ServerLimits

MAX_HEAD_BYTES = 64 << 10
"""Largest request line with headers."""

KEPT_FILES = 192
"""Files that the process may open beside connections: those of models, which are loaded while it serves."""

CONNECTION = "autosplit.connection"
"""Key of a request's connection in its ASGI scope."""

MODEL = "autosplit.model"
"""Key of the name of a request's model in its ASGI scope, once it is known to be in service."""

_FULL = b'{"error":"the server has no connection left; try again later"}'
_REFUSAL = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%s" % (len(_FULL), _FULL)
)


class LimitedConnection(HttpToolsProtocol):
    """A connection that is refused beyond the limit, and ends if a request's head is too large or does not come in time.

    Attributes:
        work: the task of the present request; a connection that is lost cancels it.
    """

    limits: ClassVar[ServerLimits]
    open_connections: ClassVar[set["LimitedConnection"]]
    work: "asyncio.Task[Any] | None" = None

    def connection_made(self, transport: Any) -> None:
        """Take the connection, or answer with status 503."""
        self._patience: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        if len(self.open_connections) >= self.limits.connections:
            transport.write(_REFUSAL)
            transport.close()
            return
        self.open_connections.add(self)
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Pass data on, unless the connection was refused."""
        if self not in self.open_connections:
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._patience is not None and self._head_bytes > MAX_HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        """Wait for the head of the next request."""
        super().on_message_begin()
        cast(dict[str, Any], self.scope)[CONNECTION] = self
        if self._patience is None:
            self._wait_for_head()

    def on_headers_complete(self) -> None:
        """The head of the request has come."""
        self._stop_waiting()
        super().on_headers_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave a place for another connection, and end the request."""
        self._stop_waiting()
        if self in self.open_connections:
            self.open_connections.remove(self)
            super().connection_lost(exc)
        if self.work is not None:
            self.work.cancel()

    def _wait_for_head(self) -> None:
        self._head_bytes = 0
        self._patience = asyncio.get_running_loop().call_later(self.limits.idle_s, self.transport.abort)

    def _stop_waiting(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


def limited_protocol(limits: ServerLimits) -> type[LimitedConnection]:
    """The protocol of one server's connections; each server counts its own, and leaves ``KEPT_FILES`` of its files to others."""
    num_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if num_files != resource.RLIM_INFINITY:
        limits = replace(limits, connections=min(limits.connections, max(1, num_files - KEPT_FILES)))
    return type("Connection", (LimitedConnection,), {"limits": limits, "open_connections": set()})


@contextmanager
def cancelled_with_caller(request: Request) -> Iterator[None]:
    """A block that ends once the caller has left. Raises: HTTPException: the caller left, so no answer is sent."""
    connection: LimitedConnection = request.scope[CONNECTION]
    connection.work = asyncio.current_task()
    try:
        yield
    except asyncio.CancelledError:
        if connection in connection.open_connections:  # the server ends
            raise
        raise HTTPException(499, "the caller left") from None
    finally:
        connection.work = None

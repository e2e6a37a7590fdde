"""Read the bodies of requests, within limits for each and for all together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import Request

from autosplit.webservice.failures import RETRY_S
from autosplit.webservice.limits import ServerLimits

_CLOSE = {"connection": "close"}


class Bodies:
    """The bodies of one server; ``num_bytes`` counts those that are held now."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits, self.num_bytes = limits, 0

    @asynccontextmanager
    async def read(self, request: Request, num_before: int = 0) -> AsyncIterator[bytearray]:
        """Read a body, which counts until the block ends; ``num_before`` zero bytes come first and choose its alignment.

        Raises: HTTPException: it is too large, comes too slowly, or the bodies of all requests are too large; the caller left.
        """
        limits, body, counted = self.limits, bytearray(num_before), 0
        announced = request.headers.get("content-length", "0")
        try:
            counted = self._count(int(announced) if announced.isdecimal() else 0, counted)
            try:
                async with asyncio.timeout(limits.body_s):
                    is_more = True
                    while is_more:
                        event = await request.receive()
                        if event["type"] == "http.disconnect":
                            raise HTTPException(499, "the caller left")
                        counted = self._count(len(body) - num_before + len(event["body"]), counted)
                        body += event["body"]
                        is_more = event["more_body"]
            except TimeoutError:
                message = f"{len(body) - num_before} bytes of the body came within {limits.body_s:g} s, and more were announced"
                raise HTTPException(408, message, _CLOSE) from None
            yield body
        finally:
            self.num_bytes -= counted

    def _count(self, num_bytes: int, counted: int) -> int:
        """Count a body as this large, if it was counted as smaller; return its counted bytes."""
        limits = self.limits
        if num_bytes > limits.body_bytes:
            message = f"the body has {num_bytes} bytes or more, and at most {limits.body_bytes} are taken"
            raise HTTPException(413, message, _CLOSE)
        more = max(0, num_bytes - counted)
        if self.num_bytes + more > limits.bodies_bytes:
            message = f"the bodies of all requests have {limits.bodies_bytes} bytes, which is the limit; try again later"
            raise HTTPException(429, message, {"retry-after": RETRY_S, **_CLOSE})
        self.num_bytes += more
        return counted + more

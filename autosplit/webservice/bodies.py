"""Bodies: reads the bodies of requests, within limits for each and for all together."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from autosplit.webservice.failures import RETRY_S
from autosplit.webservice.limits import ServerLimits

_CLOSE = {"connection": "close"}


class Bodies:
    """Reads bodies for one server; ``num_bytes`` counts those that are held now."""

    def __init__(self, limits: ServerLimits) -> None:
        self._limits, self.num_bytes = limits, 0

    @asynccontextmanager
    async def read(self, request: Request) -> AsyncIterator[bytearray]:
        """The body of a request, which counts until the block ends.

        Raises: HTTPException: it is too large, comes too slowly, or the bodies of all requests are too large; the caller left.
        """
        limits, body, held = self._limits, bytearray(), 0

        def hold(num_bytes: int) -> None:
            """Count the body as this large, if it was smaller."""
            nonlocal held
            if num_bytes > limits.body_bytes:
                message = f"the body has {num_bytes} bytes or more, and at most {limits.body_bytes} are taken"
                raise HTTPException(413, message, _CLOSE)
            more = max(0, num_bytes - held)
            if self.num_bytes + more > limits.bodies_bytes:
                message = f"the bodies of all requests have {limits.bodies_bytes} bytes, which is the limit; try again later"
                raise HTTPException(429, message, {"retry-after": RETRY_S, **_CLOSE})
            self.num_bytes += more
            held += more

        try:
            announced = request.headers.get("content-length", "0")
            hold(int(announced) if announced.isdecimal() else 0)
            try:
                async with asyncio.timeout(limits.body_s):
                    async for chunk in request.stream():
                        hold(len(body) + len(chunk))
                        body += chunk
            except TimeoutError:
                message = f"{len(body)} bytes of the body came within {limits.body_s:g} s, and more were announced"
                raise HTTPException(408, message, _CLOSE) from None
            except ClientDisconnect:
                raise HTTPException(499, "the caller left") from None
            yield body
        finally:
            self.num_bytes -= held

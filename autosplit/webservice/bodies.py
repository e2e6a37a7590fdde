"""Read the bodies of requests, within limits for each and for all together."""

import asyncio

from starlette.exceptions import HTTPException
from starlette.requests import Request

from autosplit.webservice.failures import RETRY_S
from autosplit.webservice.limits import ServerLimits

_CLOSE = {"connection": "close"}


class Bodies:
    """The bodies of one server; ``num_bytes`` counts those that are held now."""

    def __init__(self, limits: ServerLimits) -> None:
        self.limits, self.num_bytes = limits, 0


class Body:
    """The body of one request, which counts until the ``with`` block ends."""

    def __init__(self, bodies: Bodies) -> None:
        self._bodies, self._num_bytes = bodies, 0

    def __enter__(self) -> "Body":
        return self

    def __exit__(self, *_: object) -> None:
        self._bodies.num_bytes -= self._num_bytes

    async def read(self, request: Request, num_before: int = 0) -> bytearray:
        """Read the body, behind ``num_before`` zero bytes, which let a caller choose how it is aligned.

        Raises: HTTPException: it is too large, comes too slowly, or the bodies of all requests are too large; the caller left.
        """
        limits, body = self._bodies.limits, bytearray(num_before)
        announced = request.headers.get("content-length", "0")
        self._count(int(announced) if announced.isdecimal() else 0)
        try:
            async with asyncio.timeout(limits.body_s):
                while True:
                    event = await request.receive()
                    if event["type"] == "http.disconnect":
                        raise HTTPException(499, "the caller left")
                    chunk = event["body"]
                    self._count(len(body) - num_before + len(chunk))
                    body += chunk
                    if not event["more_body"]:
                        return body
        except TimeoutError:
            message = f"{len(body) - num_before} bytes of the body came within {limits.body_s:g} s, and more were announced"
            raise HTTPException(408, message, _CLOSE) from None

    def _count(self, num_bytes: int) -> None:
        """Count the body as this large, if it was smaller."""
        bodies, limits = self._bodies, self._bodies.limits
        if num_bytes > limits.body_bytes:
            message = f"the body has {num_bytes} bytes or more, and at most {limits.body_bytes} are taken"
            raise HTTPException(413, message, _CLOSE)
        more = max(0, num_bytes - self._num_bytes)
        if bodies.num_bytes + more > limits.bodies_bytes:
            message = f"the bodies of all requests have {limits.bodies_bytes} bytes, which is the limit; try again later"
            raise HTTPException(429, message, {"retry-after": RETRY_S, **_CLOSE})
        bodies.num_bytes += more
        self._num_bytes += more

"""Receive whole buffers and texts from a socket, within a time limit, and say why a connection ended."""

import socket
import time

MAX_TEXT_BYTES = 64 * 1024


def receive_into(sock: socket.socket, buffer: memoryview, until_s: float | None = None) -> None:
    """Fill the buffer.

    Args:
        until_s: time of ``time.monotonic`` at which all of it must be there. Without it, the socket's time limit holds for
            each piece of the buffer.
    Raises: ConnectionError: the other end closed. TimeoutError: the time limit passed.
    """
    while len(buffer):
        if until_s is not None:
            sock.settimeout(seconds_until(until_s))
        num_bytes = sock.recv_into(buffer)
        if not num_bytes:
            raise ConnectionError("it closed the connection")
        buffer = buffer[num_bytes:]


def receive_text(sock: socket.socket, num_bytes: int, until_s: float | None = None) -> str:
    """Receive a text. Raises: ConnectionError: it is longer than ``MAX_TEXT_BYTES``; errors as ``receive_into``."""
    if num_bytes > MAX_TEXT_BYTES:
        raise ConnectionError(f"it sent a text of {num_bytes} bytes, and {MAX_TEXT_BYTES} are allowed")
    text = memoryview(bytearray(num_bytes))
    receive_into(sock, text, until_s)
    return bytes(text).decode(errors="replace")


def seconds_until(until_s: float) -> float:
    """Seconds that are left until a time of ``time.monotonic``. Raises: TimeoutError: it has passed."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time limit has passed")
    return left_s


def reason_of(failure: BaseException, limit_s: float) -> str:
    """Why a connection ended, as the rest of a sentence; ``limit_s`` is the socket's time limit."""
    if isinstance(failure, TimeoutError):
        return f"it was silent for {limit_s:g} s"
    if not isinstance(failure, OSError):
        return f"the connection failed with {type(failure).__name__}: {failure}"
    return str(failure) if type(failure) is ConnectionError else (failure.strerror or str(failure)).lower()

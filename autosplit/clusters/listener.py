"""Listener: accepts connections, lets each prove the secret of the run in a thread, and hands on those that did.

Strangers cannot end it, nor keep honest hosts out: they hold at most ``MAX_UNPROVED`` connections, each for at most ``PROOF_S``,
and the newest connection takes the place of the oldest. An honest host has proved the secret after one round trip.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

from autosplit.clusters.handshake import LET_IN, welcome

MAX_UNPROVED = 64
"""Most connections in the middle of the handshake, and so most threads that serve strangers."""

RETRY_S = 0.05
"""Seconds between two attempts to accept where the system has no descriptor, buffer or thread left."""

log = logging.getLogger(__name__)


class Listener:
    """Listens on a free port of an address until ``close``.

    Args:
        address: of this host.
        secret: each connection must prove that it knows it.
        serve: takes a connection that did, and its greeting, in a thread for this connection. Where it raises an exception,
            the connection is closed.

    Attributes:
        address: the host and the port.
    """

    def __init__(self, address: str, secret: bytes, serve: Callable[[socket.socket, dict[str, Any]], None]) -> None:
        self._secret, self._serve = secret, serve
        self._socket = socket.create_server((address, 0))
        self.address: tuple[str, int] = self._socket.getsockname()
        self._unproved: dict[socket.socket, None] = {}
        """Connections in the middle of the handshake, the oldest first. The thread of a connection closes it and takes it out."""
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="autosplit-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the listener, and connections in the middle of the handshake; those that were handed on go on."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # closing alone does not wake the thread
        self._thread.join()
        self._socket.close()
        while self._end_oldest():
            pass

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._socket.accept()
            except Exception:  # no descriptor or buffer is left, or the connection broke before it was accepted
                if not self._end_oldest():
                    self._closed.wait(RETRY_S)
                continue
            if len(self._unproved) >= MAX_UNPROVED:
                self._end_oldest()
            self._unproved[sock] = None
            try:
                threading.Thread(target=self._welcome, args=(sock,), name="autosplit-welcome", daemon=True).start()
            except Exception:  # no thread is left
                del self._unproved[sock]
                sock.close()
                self._closed.wait(RETRY_S)

    def _end_oldest(self) -> bool:
        """End the oldest connection in the middle of the handshake and wait until it is closed; False if there is none."""
        with self._changed:
            oldest = next(iter(self._unproved), None)
            if oldest is None:
                return False
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # wakes its thread
            self._changed.wait_for(lambda: oldest not in self._unproved)
        return True

    def _welcome(self, sock: socket.socket) -> None:
        try:
            hello = welcome(sock, self._secret)
        except Exception as failure:  # the greeting of an unknown caller may raise anything
            log.debug("a connection did not prove the secret of the run: %s", str(failure))  # a record keeps no frames alive
            hello = None
            sock.close()
        with self._changed:
            del self._unproved[sock]
            self._changed.notify()
        if hello is None:
            return
        try:
            sock.sendall(LET_IN)
            self._serve(sock, hello)
        except Exception as failure:
            log.warning("a connection was closed: %s: %s", type(failure).__name__, str(failure))
            sock.close()

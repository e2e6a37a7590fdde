"""Connection: frames of tensors between two hosts over one TCP connection, into slots that the receiver has ready.

::

    sender      REQUEST 7  REQUEST 8             REQUEST 9
    receiver                          CREDIT 1                  (a slot is free again)

The layout of the tensors is known to both ends, so a frame is a header of 32 bytes and the bytes of the tensors. A sender
needs a credit for each frame with tensors, and has as many as the receiver has slots. Nothing that comes in is unpickled. An
end that is idle sends a frame every ``BEAT_S``. An end that hears nothing for ``SILENCE_S`` gives the connection up. So does an
end that reads a frame against these rules, or that fails in any other way.
"""

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch

from autosplit.clusters.sockets import MAX_TEXT_BYTES, reason_of, receive_into, receive_text
from autosplit.compat.futures import SafeCondition
from autosplit.tracing.tensorspec import TensorSpec, extent_bytes, laid_out, storage_bytes, view_storage

REQUEST, ERROR, CANCEL, BROKEN, CREDIT, BEAT = range(6)
"""Kinds of frames: tensors; the text of an error in their place; a request to end; a lost host; free slots; a sign of life."""

BEAT_S, SILENCE_S = 0.5, 5.0
SMALL_BYTES = 64 * 1024
"""Tensors up to this size are written by the thread that posts them."""

MOST_PARTS = 512
"""Most buffers of one call of the kernel, which takes 1024."""

MOST_PRIORITY = 2**31 - 1
MOST_LEFT_S = 2.0**62 / 1e9
"""The latest deadline, in 146 years: see ``monotonic_deadline``."""

_HEADER = struct.Struct("<BxHiqdQ")
_TO_RECEIVER, _WITH_TEXT = (REQUEST, ERROR, CANCEL), (ERROR, BROKEN)


class Frame(NamedTuple):
    """A header: for REQUEST the variant, the number, the priority and the seconds until the deadline (0: none); the bytes that
    follow."""

    kind: int
    variant: int = 0
    priority: int = 0
    number: int = 0
    left_s: float = 0.0
    num_bytes: int = 0


class FrameBuffer:
    """Memory for the tensors of one frame.

    Args:
        layouts: the layouts of the tensors for each variant.

    Attributes:
        tensors: variant to the tensors, views of the memory that are made once.
        buffers: variant to the bytes of each tensor.
    """

    def __init__(self, layouts: Sequence[Sequence[TensorSpec]]) -> None:
        most_bytes = [max(map(storage_bytes, specs)) for specs in zip(*layouts, strict=True)]
        memory = [torch.empty(num_bytes, dtype=torch.uint8) for num_bytes in most_bytes]
        tensors = cache(lambda variant: tuple(map(view_storage, memory, layouts[variant])))
        self.tensors: Callable[[int], tuple[torch.Tensor, ...]] = tensors
        self.buffers = cache(lambda variant: tuple(map(bytes_of, tensors(variant), layouts[variant])))


def bytes_of(tensor: torch.Tensor, spec: TensorSpec) -> memoryview:
    """The bytes of a tensor from its first to its last element in the layout of its spec, copied if its own layout differs."""
    tensor = laid_out(tensor, spec, anywhere=True)
    num_elements = extent_bytes(spec) // tensor.itemsize
    flat = tensor.as_strided((num_elements,), (1,), tensor.storage_offset())
    return flat.view(torch.uint8).numpy().data if num_elements else memoryview(b"")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A frame that waits to be sent: its content, its deadline in monotonic nanoseconds, and a callback for when it is sent."""

    kind: int
    number: int = 0
    priority: int = 0
    deadline_ns: int = 0
    tensors: Sequence[torch.Tensor] = ()
    variant: int = 0
    text: bytes = b""
    """Sent up to ``MAX_TEXT_BYTES``."""
    sent: Callable[[], None] | None = None


class Receiver:
    """The receiving end's reactions; called in the connection's reading thread, which must not wait for long.

    Where a reaction raises an exception, the connection ends, and ``lost`` is called with the reason.
    """

    def request(self, connection: "Connection", frame: Frame, slot: FrameBuffer) -> None:
        """Tensors came. The slot is this receiver's until it calls ``connection.release(slot)``."""

    def error(self, connection: "Connection", frame: Frame, text: str) -> None:
        """A request failed before it came here."""

    def cancel(self, connection: "Connection", frame: Frame) -> None:
        """A request is not wanted any more."""

    def broken(self, connection: "Connection", text: str) -> None:
        """The host at the other end lost its connection to another host; ``text`` has the name of that host, and the reason."""

    def lost(self, connection: "Connection", reason: str) -> None:
        """The connection ended, and not by ``close``."""


class Connection:
    """One end of a connection whose ends have proved the secret. Two threads serve it until it ends.

    Args:
        sock: the connected socket; the connection owns it.
        peer: name of the host at the other end, for messages.
        receiver: hears of all that comes.
        layouts: tensors of a request for each variant, in either direction.
        num_slots: slots of this end, which receives; 0 for the end that sends.
        num_credits: slots of the other end.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        receiver: Receiver,
        layouts: Sequence[Sequence[TensorSpec]] = ((),),
        num_slots: int = 0,
        num_credits: int = 0,
    ) -> None:
        sock.settimeout(SILENCE_S)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.peer = peer
        self._sock, self._receiver, self._layouts = sock, receiver, tuple(map(tuple, layouts))
        self._num_bytes = [sum(map(extent_bytes, specs)) for specs in layouts]
        self._free = deque(FrameBuffer(self._layouts) for _ in range(num_slots))
        self._num_slots, self._num_credits, self._credits = num_slots, num_credits, num_credits
        self._owed, self._tell_at = 0, max(1, num_slots // 2)
        """Slots that are free and that the other end does not know of, and how many of them it is told of at once."""
        self._unsent: list[memoryview] = []
        self._sending: Callable[[], None] | None = None
        self._writing = threading.Lock()
        self._queue: deque[Outgoing] = deque()
        self._changed = SafeCondition()
        self._open = True
        self._threads = [threading.Thread(target=run, name=f"autosplit-{peer}", daemon=True) for run in (self._read, self._write)]
        for thread in self._threads:
            thread.start()

    def post(self, frame: Outgoing) -> None:
        """Send a frame once all frames before it are sent; does not wait. A connection that has ended drops it."""
        with self._changed:
            if not self._open:
                return
            self._queue.append(frame)
        self._write_some()

    def release(self, slot: FrameBuffer) -> None:
        """Give a slot back, so that the other end may send one more request."""
        with self._changed:
            self._free.append(slot)
            self._owed += 1
            if self._owed < self._tell_at:  # the other end still has half of the credits
                return
        self._write_some()

    @property
    def num_queued(self) -> int:
        """Frames that wait to be sent."""
        return len(self._queue)

    def close(self) -> None:
        """End the connection without a word to its receiver; frames that were not sent are dropped."""
        self._end()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def lose(self, failure: BaseException) -> None:
        """End the connection because of a failure, and tell its receiver."""
        if self._end():
            self._receiver.lost(self, reason_of(failure, SILENCE_S))

    def _end(self) -> bool:
        """Let both threads end; return whether the connection was open."""
        with self._changed:
            was_open, self._open = self._open, False
            self._queue.clear()
            self._changed.notify()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        return was_open

    def _write_some(self) -> None:
        """Write here the bytes that the socket takes at once, which saves a wake-up. The writing thread does the rest."""
        if self._writing.acquire(blocking=False):
            try:
                while self._unsent or self._fill(most_bytes=SMALL_BYTES):
                    self._unsent = _rest(self._unsent, os.writev(self._sock.fileno(), self._unsent[:MOST_PARTS]))
                    self._note_sent()
            except BlockingIOError:
                pass
            except Exception as failure:
                self.lose(failure)
            finally:
                self._writing.release()
        with self._changed:
            if self._has_work():
                self._changed.notify()

    def _write(self) -> None:
        """The writing thread: write the remaining bytes, and a sign of life after each ``BEAT_S`` without a frame."""
        try:
            while True:
                with self._changed:
                    busy = self._changed.wait_for(self._has_work, BEAT_S)
                    if not self._open:
                        return
                with self._writing:
                    if not (self._unsent or self._fill()) and not busy:
                        self._unsent = [memoryview(_HEADER.pack(*Frame(BEAT)))]
                    while self._unsent:
                        self._unsent = _rest(self._unsent, self._sock.sendmsg(self._unsent[:MOST_PARTS]))
                    self._note_sent()
        except Exception as failure:
            self.lose(failure)

    def _has_work(self) -> bool:
        return not self._open or bool(self._unsent) or self._owed >= self._tell_at or self._next() is not None

    def _next(self) -> Outgoing | None:
        """The first frame that waits, if there is a credit for it."""
        following = self._queue[0] if self._queue else None
        return following if following is not None and (following.kind != REQUEST or self._credits > 0) else None

    def _fill(self, most_bytes: int | None = None) -> bool:
        """Take the next frame, and the credits that are owed, into ``_unsent``; whether there was any (``_writing`` is held).

        ``most_bytes``: a frame with larger tensors is left for the writing thread.
        """
        with self._changed:
            following = self._next()
            if following is not None and most_bytes is not None and self._num_bytes[following.variant] > most_bytes:
                following = None
            if following is None and self._owed < self._tell_at:
                return False
            owed, self._owed = self._owed, 0
            if following is not None:
                self._queue.popleft()
                self._credits -= following.kind == REQUEST
        parts: list[bytes | memoryview] = []
        if following is not None:
            parts += self._parts(following)
            self._sending = following.sent
        if owed:  # after the frame, for which a request waits
            parts.append(_HEADER.pack(*Frame(CREDIT, number=owed)))
        self._unsent = [memoryview(part) for part in parts if len(part)]
        return True

    def _note_sent(self) -> None:
        """Call the callback of a frame that was sent."""
        if not self._unsent and self._sending is not None:
            sent, self._sending = self._sending, None
            sent()

    def _parts(self, frame: Outgoing) -> list[bytes | memoryview]:
        left_s = 0.0 if not frame.deadline_ns else max(1e-9, (frame.deadline_ns - time.monotonic_ns()) / 1e9)
        parts: list[bytes | memoryview] = [frame.text[:MAX_TEXT_BYTES]] if frame.text else []
        if frame.kind == REQUEST:
            parts += [bytes_of(tensor, spec) for tensor, spec in zip(frame.tensors, self._layouts[frame.variant], strict=True)]
        num_bytes = sum(map(len, parts))
        priority = max(-MOST_PRIORITY, min(frame.priority, MOST_PRIORITY))
        return [_HEADER.pack(*Frame(frame.kind, frame.variant, priority, frame.number, left_s, num_bytes)), *parts]

    def _read(self) -> None:
        header = memoryview(bytearray(_HEADER.size))
        try:
            while self._open:
                receive_into(self._sock, header)
                frame = Frame(*_HEADER.unpack(header))
                self._check(frame)
                if frame.kind == CREDIT:
                    with self._changed:
                        self._credits += frame.number
                        if self._has_work():  # a wake-up for nothing takes the interpreter from the thread that waits for answers
                            self._changed.notify()
                elif frame.kind == REQUEST:
                    slot = self._free.popleft()
                    for buffer in slot.buffers(frame.variant):
                        receive_into(self._sock, buffer)
                    self._receiver.request(self, frame, slot)
                elif frame.kind == ERROR:
                    self._receiver.error(self, frame, receive_text(self._sock, frame.num_bytes))
                elif frame.kind == BROKEN:
                    self._receiver.broken(self, receive_text(self._sock, frame.num_bytes))
                elif frame.kind == CANCEL:
                    self._receiver.cancel(self, frame)
        except Exception as failure:
            self.lose(failure)
        with self._writing:  # a thread that posts may be about to write to the descriptor, whose number is free after this
            self._sock.close()

    def _check(self, frame: Frame) -> None:
        """Raises: ConnectionError: the frame is against the rules."""
        kind, num_bytes = frame.kind, frame.num_bytes
        if kind not in range(BEAT + 1):
            raise ConnectionError(f"it sent a frame of kind {kind}, which does not exist")
        if kind in _TO_RECEIVER and not self._num_slots:
            raise ConnectionError(f"it sent a frame of kind {kind} to an end without slots")
        if not 0 <= frame.left_s <= MOST_LEFT_S:
            raise ConnectionError(f"it sent a deadline in {frame.left_s:g} s, and 0 to {MOST_LEFT_S:g} s are allowed")
        if frame.variant >= len(self._layouts):
            raise ConnectionError(f"it sent tensors of variant {frame.variant}, and the last one is {len(self._layouts) - 1}")
        due_bytes = self._num_bytes[frame.variant]
        if kind == REQUEST and (num_bytes != due_bytes or not self._free):
            raise ConnectionError(f"it sent {num_bytes} bytes where {due_bytes} and a credit are due")
        if kind not in (REQUEST, *_WITH_TEXT) and num_bytes:
            raise ConnectionError(f"it sent {num_bytes} bytes with a frame of kind {kind}, which has none")
        if kind == CREDIT and not 0 < frame.number <= self._num_credits - self._credits:
            raise ConnectionError(f"it freed {frame.number} slots, and {self._num_credits - self._credits} are taken")


def _rest(parts: Sequence[memoryview], num_sent: int) -> list[memoryview]:
    """The rest of the parts after so many bytes of them were sent."""
    left = list(parts)
    while left and num_sent >= len(left[0]):
        num_sent -= len(left.pop(0))
    if left:
        left[0] = left[0][num_sent:]
    return left


def left_ns(left_s: float) -> int:
    """Seconds until a deadline, as they come in a frame, as a monotonic deadline; 0 stands for none."""
    return time.monotonic_ns() + int(left_s * 1e9) if left_s else 0

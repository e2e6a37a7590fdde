"""Bases of classes whose values are open until ``close``: the end of a ``with`` block closes them."""

from types import TracebackType
from typing import Self


class Closing:
    """``close`` is called at the end of a ``with`` block."""

    def close(self) -> None:
        """Free what it holds."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Draining(Closing):
    """``close`` is called at the end of a ``with`` block, and waits for answers unless the block failed."""

    def close(self, *, drain: bool = True) -> None:
        """Answer the requests that were taken in (``drain``) or fail them; then free what it holds."""
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close(drain=kind is None)

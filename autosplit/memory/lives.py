"""When each storage is live: from the maker of its first value to the last reader of any of its values.

A view shares the storage of its base. An op may write its result over an input that dies there, where the caller says
that this is safe; then both values have one storage.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Storages, and tensors in rings, frames and files of weights, begin at multiples of this number of bytes."""


@dataclass(frozen=True, slots=True)
class Step:
    """One op at one position: the values that it reads and writes."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Life:
    """A storage: its values, its bytes (a multiple of ALIGNMENT), and the first and the last step at which it is live."""

    values: tuple[str, ...]
    num_bytes: int
    first: int
    last: int


def aligned(num_bytes: int) -> int:
    """The bytes rounded up to a multiple of ALIGNMENT.

    >>> aligned(0), aligned(1), aligned(64), aligned(65)
    (0, 64, 64, 128)
    """
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def lives_of(
    steps: Sequence[Step],
    num_bytes: Mapping[str, int],
    *,
    given: Iterable[str] = (),
    kept: Collection[str] = (),
    views: Mapping[str, str] | None = None,
    overwrites: Mapping[str, Sequence[str]] | None = None,
) -> list[Life]:
    """The storages of a sequence of steps, in the order in which they become live.

    Args:
        num_bytes: bytes of each value. Values without bytes, such as weights, own nothing, and neither do their views.
        given: values that are there before the first step.
        kept: values that are needed after the last step.
        views: value to the value whose memory it shares.
        overwrites: value to inputs of its op that it may be written over if they die there. A value that was given, or has other
            bytes, is never written over.

    >>> chain = [Step(("x",), ("a",)), Step(("a",), ("b",))]
    >>> lives_of(chain, {"a": 100, "b": 100}, kept=["b"])
    [Life(values=('a',), num_bytes=128, first=0, last=1), Life(values=('b',), num_bytes=128, first=1, last=2)]
    >>> lives_of(chain, {"a": 100, "b": 100}, kept=["b"], overwrites={"b": ["a"]})
    [Life(values=('a', 'b'), num_bytes=128, first=0, last=2)]
    """
    views, overwrites = views or {}, overwrites or {}
    root: dict[str, str] = {}
    first: dict[str, int] = {}
    written = [(position, value) for position, step in enumerate(steps) for value in step.writes]
    for position, value in [*((0, value) for value in given), *written]:
        root[value] = root.get(views[value], views[value]) if value in views else value
        if value not in views:
            first[value] = position
    last = dict(first)
    for position, step in enumerate(steps):
        for value in (*step.reads, *step.writes):
            last[root.get(value, value)] = position
    for value in kept:
        last[root.get(value, value)] = len(steps)
    owner: dict[str, str] = {}
    fixed = set(given)
    for position, step in enumerate(steps):
        for value in step.writes:
            for source in overwrites.get(value, ()) if value in first and num_bytes.get(value) else ():
                base = root.get(source, source)
                home = owner.get(base, base)
                same = num_bytes.get(base) == num_bytes[value] == num_bytes.get(home)
                if same and base in first and home not in fixed and last[home] == position:
                    owner[value], last[home] = home, last[value]
                    break
    members: dict[str, list[str]] = {}
    for value in root:
        base = root[value]
        members.setdefault(owner.get(base, base), []).append(value)
    return [
        Life(tuple(values), aligned(num_bytes[home]), first[home], last[home])
        for home, values in sorted(members.items(), key=lambda item: first.get(item[0], 0))
        if home in first and num_bytes.get(home)
    ]

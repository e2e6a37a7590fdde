"""How far a measurement has come and how long it will take."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, slots=True)
class Progress:
    """Share done from 0 to 1, seconds left as far as is known, and what is being done."""

    done: float
    left_s: float
    what: str


@dataclass(frozen=True, slots=True)
class Step:
    """A piece of work and the seconds that it usually takes."""

    what: str
    expected_s: float


@dataclass
class Steps:
    """Counts steps off and reports after each; the expected seconds are corrected by how the finished steps went."""

    report: Callable[[Progress], None] | None = None
    _planned: list[Step] = field(default_factory=list)
    _finished: int = 0
    _started: float = field(default_factory=time.monotonic)

    def plan(self, steps: Sequence[Step]) -> None:
        """Add steps to the end."""
        self._planned += steps
        self._tell()

    def done(self, count: int = 1) -> None:
        """The next steps are finished."""
        self._finished = min(len(self._planned), self._finished + count)
        self._tell()

    def wait(self) -> None:
        """Nothing can be done until another process has measured."""
        self._tell("waiting until another process has measured")

    def finish(self) -> None:
        """Everything is finished."""
        self._finished = len(self._planned)
        self._tell()

    @property
    def progress(self) -> Progress:
        """Where the work is now."""
        total = sum(step.expected_s for step in self._planned)
        past = sum(step.expected_s for step in self._planned[: self._finished])
        pace = min(5.0, max(0.2, (time.monotonic() - self._started) / past)) if past else 1.0
        what = self._planned[self._finished].what if self._finished < len(self._planned) else "done"
        return Progress(past / total if total else 1.0, (total - past) * pace, what)

    def _tell(self, what: str = "") -> None:
        if self.report is not None:
            now = self.progress
            self.report(replace(now, what=what or now.what))

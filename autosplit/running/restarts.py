"""When a worker that died is started anew: at once, after a pause that grows, or not at all because its stage cannot run."""

from dataclasses import dataclass, replace

WINDOW_S = 60.0
"""Seconds after which a worker that is still up counts as sound: its earlier deaths are forgotten."""

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
"""Seconds before the second restart without progress, doubled for each further one up to the longest."""


@dataclass(frozen=True, slots=True)
class RestartHistory:
    """The deaths of one worker since it last made progress: ``num_fruitless`` of ``num_deaths`` were not idle."""

    num_done: int = 0
    num_deaths: int = 0
    num_fruitless: int = 0

    def after(self, num_done: int, up_s: float, idle: bool) -> "RestartHistory":
        """The history with one more death.

        Args:
            num_done: requests that the worker and its predecessors had finished.
            up_s: seconds since its stage was loaded; 0 if it died while it loaded.
            idle: whether its stage was loaded and no request was in flight, so that its death held up none.

        >>> history = RestartHistory().after(0, 0.0, idle=False).after(0, 0.0, idle=False)
        >>> history.num_fruitless, history.pause_s
        (2, 0.1)
        >>> history.after(1, 3.0, idle=False)
        RestartHistory(num_done=1, num_deaths=1, num_fruitless=0)
        """
        if num_done > self.num_done:
            return RestartHistory(num_done, 1)
        old = self if up_s < WINDOW_S else RestartHistory(self.num_done)
        return replace(old, num_deaths=old.num_deaths + 1, num_fruitless=old.num_fruitless + (not idle))

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next restart."""
        return min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0 ** (self.num_deaths - 2)) if self.num_deaths > 1 else 0.0

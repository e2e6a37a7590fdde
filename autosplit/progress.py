"""Progress of long calls: one shape of function everywhere, and bars that show it in a terminal or a notebook."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from html import escape
from importlib import import_module
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from autosplit.terminal import Terminal, visible

Progress = Callable[[str, float, str], None]
"""A function of the step (trace, profile, search, run), its share done from 0 to 1, and a text about the work."""

BESIDE = 56
"""Columns that step, bar, share and times take. The text has the rest, because rich would shrink the bar for a longer text."""

stopped = threading.Event()
"""Set by Ctrl-C. The KeyboardInterrupt itself may be lost in code that catches every exception."""


def quiet(step: str, share: float, text: str) -> None:
    """Show nothing."""


class StepTimes:
    """A progress function that passes reports on, and adds up the seconds of each text (``seconds``) and step (``steps_s``).

    Args:
        progress: the function.
        start_s: seconds before, which count as the step ``start``.
    """

    def __init__(self, progress: Progress, start_s: float = 0.0) -> None:
        self.seconds: dict[str, float] = {"start": start_s} if start_s else {}
        self.steps_s: dict[str, float] = dict(self.seconds)
        self._progress = progress
        self._step, self._text, self._since_s = "", "", time.monotonic()

    def __call__(self, step: str, share: float, text: str) -> None:
        """Count the seconds since the last report for its text and step, then pass this report on."""
        now_s = time.monotonic()
        if self._text and self._text != "done":
            self.seconds[self._text] = self.seconds.get(self._text, 0.0) + now_s - self._since_s
        self.steps_s[self._step or step] = self.steps_s.get(self._step or step, 0.0) + now_s - self._since_s
        self._step, self._text, self._since_s = step, text, now_s
        self._progress(step, share, text)


def step_times_text(seconds: Mapping[str, float]) -> str:
    """The seconds of a call in all, then of each part, the longest first.

    >>> step_times_text({"trace": 1.24, "run": 8.0})
    'took 9.2 s: run 8.0, trace 1.2'
    """
    parts = sorted(seconds.items(), key=lambda part: -part[1])
    return f"took {sum(seconds.values()):.1f} s: {', '.join(f'{name} {taken_s:.1f}' for name, taken_s in parts)}"


def between(progress: Progress, begin: float, end: float) -> Progress:
    """A progress function for a part of a step: its shares from 0 to 1 become shares from ``begin`` to ``end``."""
    return lambda step, share, text: progress(step, begin + (end - begin) * share, text)


@contextlib.contextmanager
def bars(console: Console) -> Iterator[Progress]:
    """A progress function that draws one bar a step, each ending at 100 %; without a terminal it prints the step's name.

    The function raises the KeyboardInterrupt that other code swallowed.
    """
    columns = (
        TextColumn("{task.fields[step]:>8}"),
        BarColumn(24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    tasks: dict[str, TaskID] = {}
    with RichProgress(*columns, console=console, transient=not console.is_terminal) as drawn:

        def report(step: str, share: float, text: str) -> None:
            if stopped.is_set():
                raise KeyboardInterrupt
            if step not in tasks:
                end_all()
                tasks[step] = drawn.add_task("", total=1.0, step=step)
                if not console.is_terminal:
                    console.print(f"{step} …", highlight=False)
            drawn.update(tasks[step], completed=share, description=visible(text)[: max(0, console.width - BESIDE)], refresh=True)

        def end_all() -> None:
            for task in tasks.values():
                drawn.update(task, completed=1.0, description="")

        yield report
        end_all()


@contextlib.contextmanager
def notebook_bars() -> Iterator[Progress]:
    """``bars`` in the output of a notebook's cell. Needs no ipywidgets, without which rich draws nothing and warns often."""
    notebook: Any = import_module("IPython.display")  # there wherever a notebook is, and without types
    begun_s: dict[str, float] = {}
    lines: dict[str, str] = {}
    output = notebook.display(notebook.HTML(""), display_id=True)

    def draw(step: str, share: float, text: str) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        now_s = time.monotonic()
        if lines and step not in lines:
            last = next(reversed(lines))
            lines[last] = _line(last, 1.0, now_s - begun_s[last], "")
        taken_s = now_s - begun_s.setdefault(step, now_s)
        lines[step] = _line(step, share, taken_s, text)
        output.update(notebook.HTML("<br>".join(lines.values())))

    yield draw
    if lines:
        draw(next(reversed(lines)), 1.0, "")


def _line(step: str, share: float, taken_s: float, text: str) -> str:
    """A bar in HTML, between the step on its left, and share, seconds and text on its right."""
    bar = f'<progress value="{share:.3f}" style="width:200px"></progress>'
    return f"<code>{escape(f'{step:>8}').replace(' ', '&nbsp;')} {bar} {share:.0%} {taken_s:.0f} s</code> {escape(text)}"


@contextlib.contextmanager
def progress_shown(progress: bool | Progress) -> Iterator[Progress]:
    """The progress function that a caller asked for: True draws bars in a terminal or a notebook."""
    console = Terminal(stderr=True)
    if callable(progress):
        yield progress
    elif progress and console.is_jupyter:
        with notebook_bars() as report:
            yield report
    elif progress and console.is_terminal:
        with bars(console) as report:
            yield report
    else:
        yield quiet


def announce(progress: bool | Progress, text: str) -> None:
    """Print a line on stderr before a long call, where ``progress_shown`` would draw bars."""
    console = Terminal(stderr=True)
    if progress is True and (console.is_terminal or console.is_jupyter):
        console.print(text, highlight=False, soft_wrap=console.is_terminal)

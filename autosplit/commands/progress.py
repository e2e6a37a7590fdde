"""A progress bar on stderr with the time left; nothing where stderr is no terminal, but a line for each step."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[float, str], None]
"""Takes the share done, from 0 to 1, and what is being done."""

BESIDE = 56
"""Columns that step, bar, share and times take; what is being done has the rest, for rich would shrink the bar away for more."""

stopped = threading.Event()
"""Set by Ctrl-C, for the KeyboardInterrupt may be lost in other code: a bare ``except`` catches it too."""


def _go_on() -> None:
    if stopped.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def bars(console: Console) -> Iterator[Callable[[str], Report]]:
    """A function that starts a bar of a given name and returns what moves it; both raise the KeyboardInterrupt that was lost."""
    columns = (
        TextColumn("{task.fields[step]:>8}"),
        BarColumn(24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True) as progress:

        def start(step: str) -> Report:
            _go_on()
            task: TaskID = progress.add_task("", total=1.0, step=step)
            if not console.is_terminal:
                console.print(f"{step} …", highlight=False)

            def report(share: float, text: str) -> None:
                _go_on()
                progress.update(task, completed=share, description=text[: max(0, console.width - BESIDE)])

            return report

        yield start

"""A progress bar on stderr with the time left; nothing where stderr is no terminal, but a line for each step."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

Report = Callable[[float, str], None]
"""Takes the share done, from 0 to 1, and what is being done."""


@contextlib.contextmanager
def bars(console: Console) -> Iterator[Callable[[str], Report]]:
    """A function that starts a bar of a given name and returns what moves it."""
    columns = (
        TextColumn("{task.fields[step]:>8}"),
        BarColumn(24),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, TextColumn("{task.description}", markup=False), console=console, transient=True) as progress:

        def start(step: str) -> Report:
            task: TaskID = progress.add_task("", total=1.0, step=step)
            if not console.is_terminal:
                console.print(f"{step} …", highlight=False)

            def report(share: float, text: str) -> None:
                progress.update(task, completed=share, description=text[:80])

            return report

        yield start

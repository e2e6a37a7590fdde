"""Text of unknown origin in a terminal: characters that would steer the terminal, or show text in another order, are escaped."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text


def visible(text: str) -> str:
    r"""The text with an escape for each character that is not printable, except line breaks and tabs.

    >>> print(visible("\x1b]0;title\x07 over\rwritten \u202eright to left"))
    \x1b]0;title\x07 over\rwritten \u202eright to left
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


class Terminal(Console):
    """A rich console for text of unknown origin: only rich writes control sequences, markup and emoji codes stay as they are."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(markup=False, emoji=False, **settings)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """The drawable of rich, with the text escaped."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)

    def render_str(self, text: str, **settings: Any) -> Text:
        """A string as rich's text, which would leave out a carriage return or a bell, so they are escaped before."""
        return super().render_str(visible(text), **settings)

"""What the bar shows."""

import io

from rich.console import Console

from autosplit.commands.progress import bars


def test_brackets_in_what_is_being_done_are_shown_as_they_are() -> None:
    """Rich takes them for markup, and raises MarkupError where what looks like a tag is closed and was not open."""
    out = io.StringIO()
    with bars(Console(file=out, force_terminal=True, width=120)) as start:
        start("search")(0.5, "cannot read [/tmp/model.onnx]")
    assert "cannot read [/tmp/model.onnx]" in out.getvalue()

"""What the bar shows."""

import io
import re

from rich.console import Console

from autosplit.commands.progress import bars


def test_brackets_in_what_is_being_done_are_shown_as_they_are() -> None:
    """Rich takes them for markup, and raises MarkupError where what looks like a tag is closed and was not open."""
    out = io.StringIO()
    with bars(Console(file=out, force_terminal=True, width=120)) as start:
        start("search")(0.5, "cannot read [/tmp/model.onnx]")
    assert "cannot read [/tmp/model.onnx]" in out.getvalue()


def test_a_long_text_leaves_room_for_the_bar() -> None:
    """In 80 columns the name of the step, the bar and the time left became dots."""
    out = io.StringIO()
    with bars(Console(file=out, force_terminal=True, color_system=None, width=80)) as start:
        start("search")(0.5, "measuring 6 ops on cpu:0+cpu:1 (onnxruntime): 10494 items/s predicted (optimal, gap 0.00 %)")
    assert re.search(r"  search ━{12}╸? *━* +50% 0:00:00 -:--:-- measuring 6 ops", out.getvalue())

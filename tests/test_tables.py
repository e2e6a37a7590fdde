import pytest

from autosplit.tables import bytes_text, cell, frame, html, seconds_text

ROWS = [{"op": "a<b>", "seconds": 0.123456}, {"op": "c", "seconds": 2.0}]


def test_frame_is_indexed_only_when_there_are_rows() -> None:
    assert frame(ROWS, index="op").loc["c", "seconds"] == 2.0
    assert len(frame([], index="op")) == 0 and list(frame(ROWS).columns) == ["op", "seconds"]


def test_html_escapes_and_counts_what_it_leaves_out() -> None:
    assert "a&lt;b&gt;" in html(ROWS, "x & y") and "x &amp; y" in html(ROWS, "x & y")
    assert "… 1 more rows" in html(ROWS, "t", limit=1) and "<td>c</td>" not in html(ROWS, "t", limit=1)
    assert "<table>" in html([], "nothing")


def test_cells() -> None:
    assert cell(0.123456) == "0.1235" and cell(3) == "3" and cell(None) == "None"
    assert cell(10_664.2) == "10664" and cell(9999.6) == "10000"


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (2.5 * 2**20, "2.5 MiB"), (2**31, "2.0 GiB")]
)
def test_bytes(size: float, text: str) -> None:
    assert bytes_text(size) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0.0 us"), (9.99e-4, "999.0 us"), (1e-3, "1.00 ms"), (1, "1.00 s"), (90, "90.00 s")]
)
def test_seconds(seconds: float, text: str) -> None:
    assert seconds_text(seconds) == text

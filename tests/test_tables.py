import pytest

from autosplit.tables import bytes_text, frame, html, number_text, seconds_text

ROWS = [{"op": "a<b>", "seconds": 0.123456}, {"op": "c", "seconds": 2.0}]


def test_frame_is_indexed_only_when_there_are_rows() -> None:
    assert frame(ROWS, index="op").loc["c", "seconds"] == 2.0
    assert len(frame([], index="op")) == 0 and list(frame(ROWS).columns) == ["op", "seconds"]


def test_html_shows_units_and_the_frame_keeps_raw_values() -> None:
    rows = [
        {"stage": "a", "load_s": 93.9e-6, "weight_bytes": 208 * 2**20, "items_per_s": 22.391, "spread": 0.12, "cap_bytes": None},
        {"stage": "b", "load_s": 2.5, "weight_bytes": 12, "items_per_s": float("nan"), "spread": 1, "cap_bytes": 1024},
    ]
    shown = html(rows, "stages")
    for text in ("93.9 us", "2.50 s", "208.0 MiB", "12 B", "22.39", "12.0 %", "100.0 %", "1.0 KiB", "-"):
        assert f">{text}</td>" in shown
    for heading in ("load", "weight memory", "items/s", "cap memory"):
        assert f">{heading}</th>" in shown
    assert frame(rows, index="stage").loc["a", "load_s"] == 93.9e-6


def test_html_draws_shares_as_bars_and_larger_ratios_to_scale() -> None:
    assert "#bcd9ee 25%" in html([{"busy": 0.25}], "t") and "gradient" not in html([{"load_s": 0.25}], "t")
    shown = html([{"of_plan": 2.0}, {"of_plan": 1.0}, {"of_plan": None}], "t")
    assert "#bcd9ee 100%" in shown and "#bcd9ee 50%" in shown and "#bcd9ee 0%" in shown


def test_html_sets_numbers_at_the_right_also_where_one_is_missing() -> None:
    shown = html([{"name": "a", "load_s": 0.5}, {"name": "b", "load_s": None}], "t")
    assert shown.count("text-align:right") == 3, "the heading, the number and the dash"


def test_html_escapes_and_counts_what_it_leaves_out() -> None:
    assert "a&lt;b&gt;" in html(ROWS, "x & y") and "x &amp; y" in html(ROWS, "x & y")
    assert "… 1 more rows" in html(ROWS, "t", limit=1) and ">c</td>" not in html(ROWS, "t", limit=1)
    assert "<table>" in html([], "nothing")


def test_numbers() -> None:
    assert number_text(0.123456) == "0.1235" and number_text(3) == "3"
    assert number_text(10_664.2) == "10664" and number_text(9999.6) == "10000"


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

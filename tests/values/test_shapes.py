import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.errors import UsageError
from autosplit.values.shapes import (
    MAX_EVEN,
    Traffic,
    even_traffic,
    parse_sizes,
    read_traffic,
    size_fault,
    sizes_text,
)


@given(st.one_of(st.builds(range, st.integers(1, 50), st.integers(51, 99)), st.sets(st.integers(1, 999), min_size=1)))
def test_sizes_are_what_their_text_says(sizes):
    sizes = sizes if isinstance(sizes, range) else tuple(sorted(sizes))
    assert list(parse_sizes(sizes_text(sizes))) == list(sizes)


@pytest.mark.parametrize("text", ["", "a", "9..2", "0..3", "4,2", "1..99999999999", "-3", "2..", [True], [], range(9, 0, -1)])
def test_text_that_is_no_sizes_is_refused(text):
    with pytest.raises(UsageError, match=r"16\.\.512"):
        parse_sizes(text)


def test_size_outside_is_refused_with_the_range_and_how_to_widen_it():
    assert "--seq-len 16..600" in size_fault("seq", 600, range(16, 513))
    assert "--batch 1,3,4" in size_fault("batch", 3, (1, 4)).replace("1,4,3", "1,3,4")
    assert "empty" in size_fault("batch", 0, range(1, 5))


def test_traffic_is_read_as_written(tmp_path):
    (tmp_path / "traffic.csv").write_text("seq,batch,count\n7,1,2\n20,2,1\n")
    traffic = read_traffic(tmp_path / "traffic.csv", ("batch", "seq"))
    assert traffic.counts == {(1, 7): 2, (2, 20): 1}
    assert traffic.along("seq") == {7: pytest.approx(2 / 3), 20: pytest.approx(1 / 3)}


def test_file_of_lengths(tmp_path):
    (tmp_path / "lengths.txt").write_text("7\n20\n\n7\n")
    assert read_traffic(tmp_path / "lengths.txt", ("seq",)).counts == {(7,): 2, (20,): 1}
    (tmp_path / "counted.txt").write_text("7,2.5\n20,1\n")
    assert read_traffic(tmp_path / "counted.txt", ("seq",)).counts == {(7,): 2.5, (20,): 1}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has 0 rows"),
        ("7\nx\n8,1\n", r"2 faults(.|\n)*row 2(.|\n)*row 3"),
        ("length\n7\n", "columns length"),
        ("seq,seq\n7,7\n", "columns seq, seq"),
    ],
)
def test_file_that_is_no_traffic_is_refused_with_all_faults(tmp_path, text, fault):
    (tmp_path / "traffic.csv").write_text(text)
    with pytest.raises(UsageError, match=fault):
        read_traffic(tmp_path / "traffic.csv", ("seq",))


def test_histogram_with_sizes_outside_the_range_is_refused_with_all_faults():
    with pytest.raises(UsageError, match=r"3 faults(.|\n)*'seq' is 600(.|\n)*'seq' is 700") as failure:
        Traffic(("seq",), {(600,): 1, (700,): 1, (20,): -1}).verify({"seq": range(16, 513)})
    assert "counted -1 times" in str(failure.value)
    with pytest.raises(UsageError, match="no requests"):
        Traffic(("seq",), {}).verify({"seq": range(16, 513)})
    spread = Traffic(("seq",), {(7,): 3}).verify({"batch": (1, 2), "seq": range(1, 9)})
    assert spread.counts == {(1, 7): 3, (2, 7): 3}
    with pytest.raises(UsageError, match="traffic is by seq, and the dimensions are batch"):
        Traffic(("seq",), {(1,): 1}).verify({"batch": range(1, 3)})


def test_without_traffic_all_sizes_are_alike():
    assert even_traffic({"seq": range(2, 5)}).shares == {(2,): 1 / 3, (3,): 1 / 3, (4,): 1 / 3}
    many = even_traffic({"seq": range(1, 10_000), "batch": range(1, 17)})
    assert len(many.counts) <= MAX_EVEN
    assert (9_999, 16) in many.counts

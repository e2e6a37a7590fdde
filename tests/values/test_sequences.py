from dataclasses import replace

import pytest

from autosplit.errors import UsageError
from autosplit.values.sequences import Sequences, parse_sequences


def test_text_and_back():
    found = parse_sequences("prompt=12, new=3", Sequences(max_sequences=5))
    assert found == Sequences(12, 3, 5)
    assert parse_sequences(str(found)) == found
    limited = parse_sequences("prompt=12,per_token_s=0.05,first_token_s=2")
    assert (limited.limits, parse_sequences(str(limited))) == ({"first_token_s": 2.0, "per_token_s": 0.05}, limited)
    assert [found.largest_group(groups) for groups in (1, 2, 5)] == [5, 3, 1]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("prompt", "'prompt' is not one of prompt, new, max_sequences, max_length"),
        ("prompt=1,prompt=2", "'prompt=2' is not one of"),
        ("tokens=1", "'tokens=1' is not one of"),
        ("new=-1", "'new=-1' is not one of"),
        ("new=1.5", "'new=1.5' is not one of"),
        ("per_token_s=0", "per_token_s is 0.0 s, and must be above 0 s"),
        ("new=0", "new is 0, and must be at least 1"),
        ("prompt=1025", "prompt 1025 and new 64 are beyond max_length 1024; give max_length=1088"),
        ("new=1025", "prompt 128 and new 1025 are beyond max_length 1024; give max_length=1152"),
    ],
)
def test_what_says_no_sequences(text, fault):
    with pytest.raises(UsageError, match=fault):
        parse_sequences(text)


def test_a_limit_is_a_number_of_seconds():
    with pytest.raises(UsageError, match="per_token_s is nan s, and must be above 0 s"):
        Sequences(per_token_s=float("nan"))


def test_the_last_new_token_needs_no_place():
    replace(Sequences(), prompt=1024, new=1).require_room()
    with pytest.raises(UsageError, match="prompt 1024 and new 2 are beyond max_length 1024; give max_length=1025, or fewer"):
        replace(Sequences(), prompt=1024, new=2).require_room()

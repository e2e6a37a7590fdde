import resource
import time
from pathlib import Path

import pytest

from autosplit.errors import UsageError
from autosplit.files import read_data
from autosplit.parsing import parse_json, parse_yaml, read_text, shown


def chained(first: str, pattern: str) -> str:
    """A file whose values grow ninefold from line to line: each line names the one before nine times."""
    lines = [f"a: &a {first}"]
    for before, name in zip("abcdefghi", "bcdefghij", strict=True):
        lines.append(f"{name}: &{name} " + pattern.format(", ".join([f"*{before}"] * 9)))
    return "\n".join(lines)


HOSTILE_YAML = {
    "an alias bomb": (chained("[lol]", "[{}]"), "more than 100000 values"),
    "a bomb of merge keys": (chained("{k: 1}", "{{<<: [{}]}}"), "more than 100000 values"),
    "a long list": ("- a\n" * 110_000, "more than 100000 values"),
    "a list that holds itself": ("&a [*a]", "holds itself"),
    "lists in lists": ("[" * 1_000_000, "nested more than 50"),
    "an alias of a long name": ("a: *" + "b" * 1_000_000, "undefined alias 'bbb"),
    "a long hexadecimal integer": ("a: 0x" + "f" * 5_000, "5002 characters"),
    "a long sexagesimal integer": ("a: 1" + ":59" * 200_000, "a number has 600001 characters"),
    "a long float": ("a: 1" + ":59" * 5_000 + ".5", "a number has"),
    "an integer above all limits": ("a: 99999999999999999999", "'99999999999999999999' is above"),
    "half of a surrogate pair": ('a: "\\ud800"', "invalid Unicode|surrogate"),
    "keys of equal hashes": ("\n".join(f"{(2**61 - 1) * n}: 1" for n in range(1, 10_000)), "is above"),
    "20,000 keys, the last twice": (
        "\n".join(f"k{n}: 1" for n in range(20_000)) + "\nk19999: 1",
        r"given twice: 'k19999' \(line 20001\)",
    ),
    "a key that is a list": ("? [a]\n: 1", "unhashable"),
    "a tag of Python": ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
}


@pytest.mark.parametrize(("text", "message"), HOSTILE_YAML.values(), ids=HOSTILE_YAML)
def test_hostile_yaml_is_refused_in_a_sentence_within_a_second(text: str, message: str) -> None:
    before_kib, started_s = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    with pytest.raises(ValueError, match=message) as failure:
        parse_yaml(text)
    assert time.process_time() - started_s < 3 and len(str(failure.value)) < 400
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 200 * 1024


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 1_000_000, "nested too deeply"),
        ("[" + "[]," * 2_000_000 + "[]]", "more than 2000000 lists"),
        ("[1" + "0" * 400 + "]", "401 digits"),
        ("9" * 5_000, "5000 digits"),
        (r'["\ud800"]', "half of a surrogate pair"),
        ('{"a": ', "Expecting value"),
    ],
)
def test_hostile_json_is_refused_in_a_sentence(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as failure:
        parse_json(text)
    assert len(str(failure.value)) < 400


def test_aliases_merge_keys_and_pairs_of_surrogates_are_read() -> None:
    text = "base: &base {x: 1, y: 2}\none: &one {<<: *base, x: 3}\ntwo: {<<: [*one, {z: 4}], y: 5}\nthree: *one"
    one = {"x": 3, "y": 2}
    expected = {"base": {"x": 1, "y": 2}, "one": one, "two": {"x": 3, "y": 5, "z": 4}, "three": one}
    assert parse_yaml(text) == expected
    assert parse_json(r'["\ud83d\ude00", 1e999]') == ["\U0001f600", float("inf")]


def test_a_file_above_20_mb_is_refused_by_its_size_also_where_it_never_ends(tmp_path: Path) -> None:
    with (tmp_path / "large.yaml").open("wb") as file:
        file.truncate(200_000_000)
    with Path("/dev/zero").open("rb") as endless:
        for path in (tmp_path / "large.yaml", Path(f"/dev/fd/{endless.fileno()}")):
            with pytest.raises(UsageError, match="cannot be read: it is above the limit of 20 MB"):
                read_data(path, "plan", UsageError)
    (tmp_path / "fits").write_bytes(b"x" * 1_000)
    assert len(read_text(tmp_path / "fits", 1_000)) == 1_000


def test_a_value_is_cut_before_it_is_written_out() -> None:
    text = "x" * 1_000_000
    started_s = time.process_time()
    assert len(shown([[text] * 100_000] * 100_000)) < 1_000 and len(shown({text: text})) < 200
    assert time.process_time() - started_s < 1

import errno
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosplit.errors import PlanError
from autosplit.files import content_hash, locked, read_mapping, unwritable, write_atomic


def test_write_makes_folders_and_leaves_nothing_else(tmp_path) -> None:
    path = tmp_path / "a" / "b.json"
    write_atomic(path, "one")
    write_atomic(path, "two")
    assert path.read_text() == "two" and [entry.name for entry in path.parent.iterdir()] == ["b.json"]


def test_what_cannot_be_written_is_known_before_and_the_try_leaves_nothing(tmp_path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    writable = [tmp_path / "new" / "folder" / "x", tmp_path / "file", tmp_path, Path("x.yaml"), Path("/dev/null")]
    assert [unwritable(path) for path in writable] == [""] * len(writable)
    refused = [tmp_path / "file" / "x", tmp_path / "loop", tmp_path / ("x" * 300), Path("/proc/x")]
    assert all(unwritable(path) for path in refused)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "loop"]


def test_a_failed_write_keeps_the_old_file(tmp_path) -> None:
    path = tmp_path / "b.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "new \udc80")
    assert path.read_text() == "old" and [entry.name for entry in tmp_path.iterdir()] == ["b.json"]


def test_a_link_stays_and_leads_to_what_was_written(tmp_path) -> None:
    (tmp_path / "plans").mkdir()
    link, file = tmp_path / "plan.yaml", tmp_path / "plans" / "mine.yaml"
    link.symlink_to(file)
    for text in ("one", "two"):
        write_atomic(link, text)
        assert link.is_symlink() and file.read_text() == text
    assert [path.name for path in file.parent.iterdir()] == ["mine.yaml"]


def test_what_cannot_be_written_is_called_by_its_own_name(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "plan.yaml").mkdir()
    with pytest.raises(IsADirectoryError) as failure:
        write_atomic(tmp_path / "plan.yaml", "text")
    assert failure.value.filename == str(tmp_path / "plan.yaml")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left") as failure:
        write_atomic(tmp_path / "b.json", "text")
    assert failure.value.filename == str(tmp_path / "b.json")
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_pipe_or_a_device_takes_the_text_and_stays_what_it_is(tmp_path) -> None:
    """``-o /dev/null`` made an ordinary file of that device where the user may."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    write_atomic(path, "text")
    taken = os.read(reader, 100)
    os.close(reader)
    assert taken == b"text" and path.is_fifo() and list(tmp_path.iterdir()) == [path]


HOLDER = """
import sys
from pathlib import Path
from autosplit.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.timeout(60)
def test_who_must_wait_for_a_lock_is_told(tmp_path) -> None:
    told, held = threading.Event(), threading.Event()

    def wait() -> None:
        with locked(tmp_path / "measuring", told.set):
            held.set()

    with locked(tmp_path / "measuring", lambda: pytest.fail("nobody else holds it")):
        other = threading.Thread(target=wait)
        other.start()
        assert told.wait(30) and not held.is_set()
    other.join(30)
    assert held.is_set()


def test_a_lock_keeps_another_process_out(tmp_path) -> None:
    path = tmp_path / "profile.json"
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout.readline() == "held\n"
        entered = threading.Event()
        waiter = threading.Thread(target=enter, args=(path, entered))
        waiter.start()
        assert not entered.wait(0.2)
        holder.communicate("release\n")
        assert entered.wait(20)
        waiter.join()


def enter(path, entered: threading.Event) -> None:
    with locked(path):
        entered.set()


@given(st.dictionaries(st.text(max_size=5), st.integers() | st.lists(st.text(max_size=3), max_size=3), max_size=5))
def test_hash_ignores_the_order_of_keys_and_sees_every_value(data) -> None:
    assert content_hash(data) == content_hash(dict(reversed(data.items())))
    assert content_hash(data) != content_hash({**data, "one more": 1})


@pytest.mark.parametrize(("name", "text"), [("plan.json", '{"schema": 2, "a": 1}'), ("plan.yaml", "schema: 2\na: 1\n")])
def test_mappings_are_read_by_suffix(tmp_path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    assert read_mapping(tmp_path / name, "plan", 2, PlanError) == {"schema": 2, "a": 1}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("plan.json", b'{"schema": 1, "a"', "is truncated or not valid"),
        ("plan.yaml", b"a: [1, 2", "is truncated or not valid"),
        ("plan.json", b"\xff\xfe\x00", "is truncated or not valid"),
        ("plan.yaml", b"", "is empty"),
        ("plan.json", b"[1]", "holds list, not a mapping"),
        ("plan.json", b'{"schema": 9}', "schema version 9, and this autosplit reads version 1"),
        ("plan.json", b"{}", "schema version None"),
        ("plan.json", b"[" * 200_000, "is truncated or not valid"),
        ("plan.yaml", b"[" * 2_000, "is truncated or not valid"),
        ("plan.json", b'{"schema": 1' + b"0" * 5_000 + b"}", "is truncated or not valid"),
        ("plan.yaml", b"date: 2026-13-45", "is truncated or not valid"),
        ("plan.yaml", b"date: !!timestamp x", "is truncated or not valid"),
        ("plan.yaml", b"flag: !!bool x", "is truncated or not valid"),
        ("plan.yaml", b"schema: 1\na: {b: 1, c: 2, b: 3, c: 4}", r"given twice: 'b' \(line 2\), 'c' \(line 2\); keep one"),
        ("plan.json", b"{}", "another kind of file"),
    ],
)
def test_unreadable_mappings_are_named(tmp_path, name: str, content: bytes, message: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(PlanError, match=message) as failure:
        read_mapping(path, "plan", 1, PlanError)
    assert str(path) in str(failure.value)


def test_an_absent_or_unreadable_mapping(tmp_path) -> None:
    with pytest.raises(PlanError, match="does not exist"):
        read_mapping(tmp_path / "absent.json", "plan", 1, PlanError)
    with pytest.raises(PlanError, match="cannot be read"):
        read_mapping(tmp_path, "plan", 1, PlanError)


@pytest.mark.parametrize("cut", [0.1, 0.5, 0.9, 0.99])
def test_any_truncation_of_json_is_found(tmp_path, cut: float) -> None:
    text = json.dumps({"schema": 1, "samples": list(range(50))})
    path = tmp_path / "p.json"
    path.write_text(text[: int(len(text) * cut)])
    with pytest.raises(PlanError, match="truncated"):
        read_mapping(path, "profile", 1, PlanError)


def test_a_new_file_keeps_to_the_umask(tmp_path) -> None:
    old = os.umask(0o077)
    try:
        write_atomic(tmp_path / "private", "text")
        os.umask(0o022)
        write_atomic(tmp_path / "public", "text")
    finally:
        os.umask(old)
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("private", "public")] == [0o600, 0o644]

import os
import threading
from pathlib import Path

import pytest

from autosplit.bundling.manifest import read_manifest
from autosplit.errors import BundleError, UsageError
from autosplit.files import file_hash, locked, read_data, write_atomic
from autosplit.opening import open_file, opened_folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file, and links to a file and a folder outside of it."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "file").write_text("mine")
    inside = tmp_path / "root"
    inside.mkdir()
    (inside / "file").write_text("theirs")
    (inside / "link").symlink_to(tmp_path / "outside" / "file")
    (inside / "folder").symlink_to(tmp_path / "outside")
    (inside / "loop").symlink_to("loop")
    (inside / "dangling").symlink_to(tmp_path / "outside" / "new")
    return inside


@pytest.mark.timeout(10)
@pytest.mark.parametrize("mode", ["rb", "ab+"])
def test_only_regular_files_are_opened(tmp_path: Path, mode) -> None:
    """A pipe waited for its other end, and ``/dev/zero`` never ends."""
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "pipe"), (Path("/dev/zero"), "device"), (Path("/dev/null"), "device")):
        for root in (None, path.parent):
            with pytest.raises(OSError, match=f"it is a {kind}, and a regular file is expected: '{path}'"):
                open_file(path, mode, root)
    with pytest.raises(UsageError, match=r"plan file '.*pipe' cannot be read: it is a pipe, and a regular file is expected"):
        read_data(tmp_path / "pipe", "plan", UsageError)
    with pytest.raises(OSError, match="it is a pipe"):
        file_hash(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is a folder"):
        open_file(tmp_path)


@pytest.mark.timeout(10)
def test_a_descriptor_that_the_user_gives_may_be_a_pipe() -> None:
    """``--machine <(...)`` of a shell."""
    reading, writing = os.pipe()
    threading.Timer(0.05, lambda: (os.write(writing, b"a: 1"), os.close(writing))).start()
    assert read_data(Path(f"/dev/fd/{reading}"), "machine", UsageError) == {"a": 1}
    os.close(reading)


def test_no_link_below_the_root_is_followed(root: Path) -> None:
    for name in ("link", "loop", "dangling", "folder/file", "folder/new"):
        for mode in ("rb", "ab+"):
            with pytest.raises(OSError, match=r"it is a link, and links below '.*root' are not followed"):
                open_file(root / name, mode, root)
    with pytest.raises(OSError, match="it is a link"), locked(root / "folder" / "file", root=root):
        pass
    with pytest.raises(OSError, match="it is a link"):
        write_atomic(root / "folder" / "new", "text", root)
    assert {path.name: path.read_text() for path in (root.parent / "outside").iterdir()} == {"file": "mine"}


def test_a_file_takes_the_place_of_a_link_below_the_root(root: Path) -> None:
    for name in ("link", "loop", "dangling", "folder"):
        write_atomic(root / name, "ours", root)
        assert not (root / name).is_symlink() and (root / name).read_text() == "ours"
    assert {path.name: path.read_text() for path in (root.parent / "outside").iterdir()} == {"file": "mine"}


def test_the_way_to_the_root_and_a_path_of_the_user_may_lead_through_links(root: Path) -> None:
    linked = root.parent / "linked"
    linked.symlink_to(root)
    with open_file(linked / "a" / "b", "ab+", linked) as file:
        file.write(b"x")
    assert (root / "a" / "b").read_text() == "x"
    with open_file(root / "folder" / "file") as file:
        assert file.read() == b"mine"
    write_atomic(root / "link", "new")
    assert (root / "link").is_symlink() and (root.parent / "outside" / "file").read_text() == "new"


def test_a_lock_is_a_file_beside_and_leaves_the_target_of_a_link_alone(root: Path) -> None:
    """The lock was opened for writing, which emptied the target."""
    (root / ".measuring.lock").symlink_to(root.parent / "outside" / "file")
    with pytest.raises(OSError, match=r"it is a link.*: '.*/\.measuring\.lock'"), locked(root / "measuring"):
        pass
    assert (root.parent / "outside" / "file").read_text() == "mine"


def test_a_link_that_leads_to_itself_is_a_sentence(root: Path) -> None:
    with pytest.raises(UsageError, match=r"plan file '.*loop' cannot be read: Too many levels of symbolic links"):
        read_data(root / "loop", "plan", UsageError)
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: '.*loop'"):
        write_atomic(root / "loop", "text")


@pytest.mark.skipif(os.geteuid() != 0, reason="only the superuser gives folders away")
def test_a_folder_of_another_user_is_refused_below_the_root(root: Path) -> None:
    (root / "theirs").mkdir()
    os.chown(root / "theirs", 12345, 12345)
    with pytest.raises(PermissionError, match=r"it is a folder of user 12345, which is not trusted: '.*theirs'"):
        open_file(root / "theirs" / "file", "ab+", root)
    with opened_folder(root / "theirs", root / "theirs"):
        pass  # the user chose it
    os.chown(root, 12345, 12345)
    with open_file(root / "theirs" / "file", "ab+", root):
        pass  # and here the folder that the user chose has the same owner


@pytest.mark.timeout(10)
def test_a_bundle_with_a_pipe_or_a_link_as_its_manifest_is_refused(root: Path) -> None:
    os.mkfifo(root / "manifest.json")
    with pytest.raises(BundleError, match=r"manifest.json' cannot be read: it is a pipe, and a regular file is expected"):
        read_manifest(root)
    (root / "manifest.json").unlink()
    (root / "manifest.json").symlink_to("/dev/stdin")
    with pytest.raises(BundleError, match=r"manifest.json' cannot be read: it is a link"):
        read_manifest(root)

"""A bundle as one file: an uncompressed ZIP archive of a flat folder, unpacked to a scratch folder when it is loaded."""

import io
import shutil
import struct
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from autosplit.bundling.manifest import MANIFEST, Manifest, read_manifest
from autosplit.errors import BundleError
from autosplit.parsing import MAX_JSON_BYTES, shown
from autosplit.scratch import scratch_folder
from autosplit.tables import bytes_text

MAX_FILES = 10_000
MAX_UNPACKED_BYTES = 256 << 30
"""Largest bundle that is unpacked; a larger one is loaded as a folder, whose files are mapped."""
MAX_TABLE_BYTES = 1 << 20
"""Largest table of files in an archive; zipfile would take minutes and gigabytes for one as large as the archive."""
HEADER_BYTES = 30
"""Bytes ahead of the name of a file in an archive."""
DAMAGED = (zipfile.BadZipFile, EOFError, NotImplementedError, OverflowError, RuntimeError, ValueError, struct.error)
"""Exceptions that zipfile raises on a damaged archive."""


def pack(folder: Path, target: Path) -> None:
    """Write the files of a folder to a ZIP archive, uncompressed, the manifest before the others."""
    with zipfile.ZipFile(target, "x", zipfile.ZIP_STORED) as archive:
        for file in sorted(folder.iterdir(), key=lambda file: (file.name != MANIFEST, file.name)):
            archive.write(file, file.name)


@contextmanager
def unpacked(path: Path) -> Iterator[tuple[Path, Manifest]]:
    """The folder of a bundle and its manifest: the bundle itself, or a scratch folder with the files of its archive.

    An archive unpacks to no more bytes than it has: its files are stored, lie one behind the other, and have the names and
    sizes that the manifest says. The scratch folder is removed at the end.
    Raises: BundleError: there is no bundle, its manifest is damaged, or the archive is damaged, compressed or too large.
        OSError: the disk is full.
    """
    if path.is_dir():
        yield path, read_manifest(path)
        return
    if not path.is_file():
        raise BundleError(f"bundle '{path}' does not exist")
    with scratch_folder() as folder:
        try:
            with _File(path) as file, zipfile.ZipFile(file) as archive:
                manifest = _unpack(path, archive, folder)
        except DAMAGED as failure:
            raise BundleError(f"bundle '{path}' is truncated or not a bundle: {str(failure)[:200]}") from None
        yield folder, manifest


class _File(io.FileIO):
    """An archive for zipfile, which reads the table of files in one piece, and all else in small ones."""

    def read(self, size: int | None = -1) -> bytes:
        """Read. Raises: BadZipFile: this is a table of files above the limit."""
        if size is not None and size > MAX_TABLE_BYTES:
            raise zipfile.BadZipFile(f"its table of files has {size} bytes, and at most {MAX_TABLE_BYTES} are read")
        return super().read(size)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Move to an offset. Raises: BadZipFile: the archive names one before its start."""
        if whence == 0 and offset < 0:
            raise zipfile.BadZipFile(f"it has the offset {offset}")
        return super().seek(offset, whence)


def _unpack(path: Path, archive: zipfile.ZipFile, folder: Path) -> Manifest:
    """Write the manifest, compare the archive with it, and write the other files."""
    entries = sorted(archive.infolist(), key=lambda entry: entry.header_offset)
    sizes = {entry.filename: entry.file_size for entry in entries}
    if MANIFEST not in sizes or len(entries) > MAX_FILES or len(sizes) < len(entries):
        raise BundleError(f"bundle '{path}' has no '{MANIFEST}', a name twice, or more than {MAX_FILES} files")
    _check_places(path, entries)
    if sizes[MANIFEST] > MAX_JSON_BYTES:
        raise BundleError(f"bundle '{path}' has a '{MANIFEST}' of {sizes[MANIFEST]} bytes, and at most {MAX_JSON_BYTES} are read")
    _write(archive, MANIFEST, folder)
    manifest = read_manifest(folder)
    noted = {MANIFEST: sizes[MANIFEST], **{name: file.num_bytes for name, file in manifest.files.items()}}
    if apart := sorted(name for name, _ in sizes.items() ^ noted.items()):
        there, wanted = (f"{found[apart[0]]} bytes" if apart[0] in found else "nothing" for found in (sizes, noted))
        raise BundleError(
            f"bundle '{path}' has {there} of {shown(apart[0])}, and its manifest says {wanted}: it is damaged. Make it again."
        )
    needed = sum(sizes.values())
    if needed > MAX_UNPACKED_BYTES:
        raise BundleError(
            f"bundle '{path}' unpacks to {bytes_text(needed)}, and at most {bytes_text(MAX_UNPACKED_BYTES)} are unpacked; unzip "
            "it yourself and load the folder"
        )
    if needed > (free := shutil.disk_usage(folder).free):
        raise BundleError(
            f"bundle '{path}' needs {bytes_text(needed)} to unpack, and {bytes_text(free)} are free in '{folder.parent}'; set "
            "TMPDIR, or unzip it yourself and load the folder"
        )
    for name in manifest.files:
        _write(archive, name, folder)
    return manifest


def _check_places(path: Path, entries: Sequence[zipfile.ZipInfo]) -> None:
    """Raises: BundleError: a file is compressed, begins before the end of the one before it, or ends outside of the archive."""
    end = 0
    for entry in entries:
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise BundleError(f"bundle '{path}' holds {shown(entry.filename)} compressed, and a bundle is not. Make it again.")
        if entry.header_offset < end:
            place = "inside another file" if entry.header_offset >= 0 else "before its start"
            raise BundleError(f"bundle '{path}' holds {shown(entry.filename)} {place}. Make it again.")
        end = entry.header_offset + HEADER_BYTES + len(entry.filename) + entry.file_size
    if end > path.stat().st_size:
        raise BundleError(f"bundle '{path}' is truncated: it ends before its last file does")


def _write(archive: zipfile.ZipFile, name: str, folder: Path) -> None:
    """Write one file of the archive, whose name is plain."""
    with archive.open(name) as source, (folder / name).open("wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)

"""A bundle as one file: an uncompressed ZIP archive of a flat folder, unpacked to a scratch folder when it is loaded."""

import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from autosplit.bundling.manifest import FILE_NAME, MANIFEST
from autosplit.errors import BundleError
from autosplit.parsing import shown
from autosplit.scratch import scratch_folder

MAX_FILES = 10_000


def pack(folder: Path, target: Path) -> None:
    """Write the files of a folder to a ZIP archive, uncompressed, the manifest before the others."""
    with zipfile.ZipFile(target, "x", zipfile.ZIP_STORED) as archive:
        for file in sorted(folder.iterdir(), key=lambda file: (file.name != MANIFEST, file.name)):
            archive.write(file, file.name)


@contextmanager
def unpacked(path: Path) -> Iterator[Path]:
    """The folder of a bundle: the bundle itself, or a scratch folder with the files of its archive, removed at the end.

    Raises: BundleError: there is no bundle, or the archive is damaged, compressed, or holds names that lead out of the folder.
        OSError: the disk is full.
    """
    if path.is_dir():
        yield path
        return
    if not path.is_file():
        raise BundleError(f"bundle '{path}' does not exist")
    with scratch_folder() as folder:
        try:
            with zipfile.ZipFile(path) as archive:
                _unpack(path, archive, folder)
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as failure:
            raise BundleError(f"bundle '{path}' is truncated or not a bundle: {str(failure)[:200]}") from None
        yield folder


def _unpack(path: Path, archive: zipfile.ZipFile, folder: Path) -> None:
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if MANIFEST not in names or len(names) > MAX_FILES or len(set(names)) < len(names):
        raise BundleError(f"bundle '{path}' has no '{MANIFEST}', a name twice, or more than {MAX_FILES} files")
    for entry in entries:
        if not FILE_NAME.fullmatch(entry.filename):
            raise BundleError(f"bundle '{path}' holds {shown(entry.filename)}, which is not a plain name of a file in it")
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size:
            raise BundleError(f"bundle '{path}' holds '{entry.filename}' compressed; a bundle is not, so that its size is known")
    needed, free = sum(entry.file_size for entry in entries), shutil.disk_usage(folder).free
    if needed > free:
        raise BundleError(f"bundle '{path}' needs {needed} bytes to unpack, and {free} are free in '{folder.parent}'; set TMPDIR")
    for entry in entries:
        with archive.open(entry) as source, (folder / entry.filename).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)

"""numba's cache of machine code: in a folder of ours, kept by a stamp of ours, and empty where numba cannot read it.

numba checks only the source file of the function itself, but functions from other files are compiled into it.
"""

from pathlib import Path
from typing import Any

from autosplit.compat.tried import needs


def stamp_cache(dispatcher: Any, stamp: str, folder: Path | None) -> None:
    """Let numba take machine code of a function from its cache only if it was stored with this stamp.

    The cache is in ``folder``, or where numba puts it. A cache that names classes of other sources counts as empty: numba raises
    AttributeError where a class was renamed.
    """
    with needs("numba"):
        file = dispatcher._cache._cache_file
        load_index = file._load_index
        _ = file._source_stamp, file._cache_path, file._index_path
        if folder is not None:
            file._cache_path, file._index_path = str(folder), str(folder / file._index_name)

    def load_known() -> Any:
        try:
            return load_index()
        except (AttributeError, ImportError):
            return {}

    file._source_stamp, file._load_index = stamp, load_known

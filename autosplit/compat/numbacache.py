"""numba's cache of machine code: kept by a stamp of ours, and empty where numba cannot read it.

numba checks only the source file of the function itself, but functions from other files are compiled into it.
"""

from typing import Any

from autosplit.compat.tried import needs


def stamp_cache(dispatcher: Any, stamp: str) -> None:
    """Let numba take machine code of a function from its cache only if it was stored with this stamp.

    A cache that names classes of other sources counts as empty: numba raises AttributeError where a class was renamed.
    """
    with needs("numba"):
        file = dispatcher._cache._cache_file
        load_index = file._load_index
        _ = file._source_stamp

    def load_known() -> Any:
        try:
            return load_index()
        except (AttributeError, ImportError):
            return {}

    file._source_stamp, file._load_index = stamp, load_known

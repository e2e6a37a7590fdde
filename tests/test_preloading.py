import gc
import sys
import weakref
from pathlib import Path

import pytest

from autosplit.preloading import load

KEEPS_ITS_ERROR = """
try:
    import a_package_that_is_not_installed
except ImportError as error:
    missing = error
"""


class Model:
    pass


def load_beside_a_model() -> "weakref.ref[Model]":
    model = Model()
    load("keeps_its_error")
    return weakref.ref(model)


def test_an_error_that_a_package_keeps_does_not_keep_variables_of_callers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "keeps_its_error.py").write_text(KEEPS_ITS_ERROR)
    monkeypatch.syspath_prepend(tmp_path)
    model = load_beside_a_model()
    missing = sys.modules.pop("keeps_its_error").missing
    gc.collect()
    assert model() is None and isinstance(missing, ImportError)

"""One served plan for the tests of each file."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from servedplans import Served


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> "Iterator[Served]":
    """A running server with the model ``mlp``."""
    from servedplans import serving

    with serving(tmp_path_factory.mktemp("plans")) as found:
        yield found

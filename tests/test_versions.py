"""A run from a checkout has no metadata of autosplit: every command says so in place of a traceback."""

from pathlib import Path

import pytest
import typer.testing

from autosplit import versions
from autosplit.cli import app

ROOT = Path(versions.__file__).parent


def test_one_function_asks_for_versions() -> None:
    asking = {path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.py") if "importlib.metadata" in path.read_text()}
    assert asking == {"versions.py", "compat/tried.py"}


def test_a_checkout_without_metadata_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert versions.version_of("torch") and versions.version_of("no-such-package") == ""

    def version(package: str) -> str:
        raise versions.PackageNotFoundError(package)

    monkeypatch.setattr(versions, "version", version)
    told = typer.testing.CliRunner().invoke(app, ["--version"])
    assert told.exit_code == 0 and told.stdout.startswith("autosplit of a checkout with torch")

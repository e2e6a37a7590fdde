"""Make a bundle of plans, show it, or verify it."""

from pathlib import Path
from typing import Any

from autosplit.commands.bundleoptions import Bundle
from autosplit.commands.console import err, say, show
from autosplit.errors import UsageError
from autosplit.progress import bars

NUM_WORDS = {"show": 1, "verify": 1}
"""What can be done with bundles, and the number of bundles that it takes."""


def bundle(given: Bundle) -> None:
    """Make plans a bundle, which runs without the model; or show, verify one: bundle PLAN... BUNDLE, bundle show BUNDLE."""
    action, *rest = given.words
    if action not in NUM_WORDS:
        if not rest:
            raise UsageError(f"'{action}' alone says too little; write: autosplit bundle {action} app.asb")
        return _make(given, given.words[:-1], Path(given.words[-1]))
    if len(rest) != NUM_WORDS[action]:
        raise UsageError(f"'bundle {action}' takes {NUM_WORDS[action]} names of bundles, and {len(rest)} are given")
    return {"show": _show, "verify": _verify}[action](given, *map(Path, rest))


def _make(given: Bundle, plans: list[str], path: Path) -> None:
    from autosplit.bundling.bundler import require_absent, write_bundle
    from autosplit.bundling.crosscheck import check_bundle
    from autosplit.loadedplan import load

    require_absent(path)
    networks: dict[str, Any] = {}
    with bars(err) as progress:
        for text in plans:
            name, equals, plan = text.rpartition("=")
            progress("load", len(networks) / len(plans), f"reading '{plan}' and tracing its model")
            loaded = load(plan, given.model)
            name = name if equals else loaded.traced.graph.name
            if name in networks:
                raise UsageError(f"two networks are named '{name}'; name them, as in first={plans[0]} second={text}")
            networks[name] = loaded.traced, loaded.plan.verify(loaded.traced.graph, loaded.machine)
        manifest = write_bundle(networks, path, zipped=given.zip, progress=progress)
    errors = check_bundle(path, networks)
    for name, error in errors.items():
        say(f"network '{name}' is off by {error.relative:.3g} of the largest value from the model in f32 eager")
    _show_manifest(given, path, manifest)


def _show(given: Bundle, path: Path) -> None:
    from autosplit.bundling.manifest import read_manifest
    from autosplit.bundling.packing import unpacked

    with unpacked(path) as folder:
        _show_manifest(given, path, read_manifest(folder))


def _verify(given: Bundle, path: Path) -> None:
    from autosplit.bundling.manifest import check_files, read_manifest
    from autosplit.bundling.packing import unpacked

    with unpacked(path) as folder:
        manifest = read_manifest(folder)
        check_files(folder, manifest.files, hashed=True)
    _show_manifest(given, path, manifest)
    say(f"every file of '{path}' has the size and the hash that the manifest says")


def _show_manifest(given: Bundle, path: Path, manifest: Any) -> None:
    from dataclasses import asdict

    from autosplit.bundling.showing import rows, summary
    from autosplit.commands.report import table

    data = {"bundle": str(path), "summary": summary(path, manifest), "parts": rows(manifest), **asdict(manifest)}
    show(given, data, table(rows(manifest), summary(path, manifest)))

"""The store of measurements: one JSON file for each model and device, with entries of several machines. No torch.

::

    profiles/ResNet-0a1b2c3d/graph.json    the model as planners see it
    profiles/ResNet-0a1b2c3d/cpu-0.json    entries by backend, threads, machine and versions
    profiles/links/1f2e3d4c.json           links of one machine with the same accelerators at their ends, or with none
    profiles/runs.jsonl                    a line for each plan that ran: predicted beside measured

The store of a user is in the cache folder (``user_root``); below it, the store of a clone is read, and never written.

Below the store, links are not followed, and folders of other users are refused. A store named ``profiles`` in the current folder
may have come with that folder, so it may not be a link itself; any other name is the user's own choice.

A file is written whole under its lock after each device and backend, so a measurement that is stopped keeps its finished parts.
A file that cannot be read is set aside under a new name, and its settings are measured again.
"""

import contextlib
import errno
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, TypeVar

from autosplit.errors import GraphError, ProfileError, UsageError
from autosplit.files import cache_folder, content_hash, from_plain, locked, read_mapping, write_atomic
from autosplit.opening import open_file, opened_folder
from autosplit.parsing import MALFORMED, parse_json
from autosplit.reports.accuracy import Accuracy, Run
from autosplit.values.graph import Graph
from autosplit.values.links import Link
from autosplit.values.profile import Profile
from autosplit.values.samples import (
    Measured,
    Precision,
    Provenance,
    Setting,
    StageMeasured,
    measured_from_dict,
    measured_to_dict,
    provenance_to_dict,
    setting_from_dict,
    stage_from_dict,
    stage_to_dict,
)

T = TypeVar("T")

SCHEMA = 1
LOCAL = Path("profiles")
COMMITTED = Path(__file__).parents[2] / "profiles"
"""The store that comes with a clone; ``make profiles`` alone writes it."""
LINKS = "links"
RUNS = "runs.jsonl"


@dataclass(frozen=True, slots=True)
class Entry:
    """One setting of a model on one machine, with the stages measured since."""

    setting: Setting
    measured: Measured
    stages: tuple[StageMeasured, ...] = ()

    @property
    def identity(self) -> tuple[Any, ...]:
        """A newer entry replaces an older one with the same identity."""
        where = self.measured.provenance
        return self.setting, where.precision, machine_hash(where), tuple(sorted(where.versions.items()))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        stages = [stage_to_dict(stage) for stage in self.stages]
        return {**self.setting._asdict(), **measured_to_dict(self.measured), "stages": stages}


@dataclass(frozen=True)
class Store:
    """A folder of measurements. Missing ones are read in the store ``beneath``; a ``read_only`` store is never written."""

    root: Path
    beneath: "Store | None" = None
    read_only: bool = False

    def folder(self, graph: Graph) -> Path:
        """The folder of a model's measurements."""
        return self.root / f"{file_safe(graph.name)}-{graph.hash[:8]}"

    @property
    def trusted(self) -> Path:
        """The folder where the user's own choice ends: see ``opening``."""
        return Path() if self.root == LOCAL else self.root

    @contextlib.contextmanager
    def measuring(self, waiting: Callable[[], None]) -> Iterator[None]:
        """Hold the right to measure: two processes would disturb each other. ``waiting`` is called if another one holds it.

        Raises: ProfileError: the store cannot be locked.
        """
        with contextlib.ExitStack() as stack:
            with self._refusals():
                stack.enter_context(locked(self.root / "measuring", waiting, self.trusted))
            yield

    def load(
        self, graph: Graph, here: Mapping[str, Provenance] | None = None, precision: Precision = "f32", of: str = ""
    ) -> Profile:
        """The newest stored entry of each setting of a model.

        Args:
            here: backend name to the provenance of a measurement made now. Entries of another machine or other versions are left
                out with a note. None takes entries of any machine.
            of: words in the name of the processor or the accelerator; entries of other machines are left out.
        Returns: a profile whose notes name the entries left out and the files set aside.
        Raises: ProfileError: the store is refused, because a folder is a link or belongs to another user.
        """
        profile = Profile.empty(graph, precision)
        if self.beneath is not None:
            profile = self.beneath.load(graph, here, precision, of)
        notes: list[str] = []
        for path in self._files(self.folder(graph)):
            if path.name == "graph.json" or path.suffix != ".json":
                continue
            found = self._read(path, partial(_entries, graph, self.trusted), notes)
            entries = [entry for entry in found if entry.measured.provenance.precision == precision and _is_of(entry, of)]
            judged = [(entry, "" if here is None else mismatch(entry, here.get(entry.setting.backend))) for entry in entries]
            usable = [entry for entry, reason in judged if not reason]
            taken = {entry.setting for entry in usable}
            notes += [f"{e.setting}: stored, but {reason}" for e, reason in judged if reason and e.setting not in taken]
            for entry in sorted(usable, key=lambda entry: entry.measured.provenance.date):
                profile = replace(
                    profile,
                    measured={**profile.measured, entry.setting: entry.measured},
                    stages=(*(stage for stage in profile.stages if stage.setting != entry.setting), *entry.stages),
                )
        return replace(profile, notes=tuple(dict.fromkeys(notes))).verify()

    def save(self, graph: Graph, profile: Profile, settings: Iterable[Setting] | None = None) -> None:
        """Store the profile's settings, or only those named, in place of older entries of the same machine.

        Newer measurements by other processes stay, and so do their stages of the same measurement.
        """
        chosen = set(profile.measured if settings is None else settings)
        folder = self.folder(graph)
        if not (folder / "graph.json").exists():
            write_atomic(folder / "graph.json", _json(graph.to_dict()) + "\n", self.trusted)
        for device in dict.fromkeys(setting.device for setting in chosen):
            path = folder / f"{file_safe(device)}.json"
            with locked(path, root=self.trusted):
                entries = {
                    entry.identity: entry for entry in self._read(path, partial(_entries, graph, self.trusted), [], held=True)
                }
                for setting in chosen:
                    if setting.device == device:
                        entry = Entry(setting, profile.measured[setting], tuple(profile.current_stages.get(setting, ())))
                        entries[entry.identity] = _merged(entries.get(entry.identity), entry)
                data = {"schema": SCHEMA, "graph": {"name": graph.name, "hash": graph.hash}, "device": device}
                content = _json({**data, "entries": [entry.to_dict() for entry in entries.values()]}) + "\n"
                write_atomic(path, content, self.trusted)

    def links(self, provenance: Provenance) -> tuple[Link, ...]:
        """The links measured on this machine among its cores and these accelerators; none if their files cannot be read.

        A link holds for the accelerators at its own ends, whatever others are beside them.
        """
        names = sorted({key.partition(" ")[0] for key in provenance.accelerator})
        paths = [self._links_path(provenance, ends) for count in range(3) for ends in combinations(names, count)]
        found = tuple(link for path in paths for link in self._read(path, partial(_links, self.trusted), []))
        return found or (self.beneath.links(provenance) if self.beneath else ())

    def save_links(self, provenance: Provenance, links: Iterable[Link]) -> None:
        """Store measured links in place of older ones of the same pairs on this machine."""
        by_path: dict[Path, list[Link]] = {}
        for link in links:
            by_path.setdefault(self._links_path(provenance, (link.source, link.target)), []).append(link)
        for path, fresh in by_path.items():
            with locked(path, root=self.trusted):
                known = {
                    (link.source, link.target): link
                    for link in (*self._read(path, partial(_links, self.trusted), [], held=True), *fresh)
                }
                data = {"schema": SCHEMA, "provenance": provenance_to_dict(provenance)}
                write_atomic(path, _json({**data, "links": [asdict(link) for link in known.values()]}) + "\n", self.trusted)

    def _links_path(self, provenance: Provenance, ends: Collection[str]) -> Path:
        """The file of the links with these accelerators at their ends, or with none."""
        here = machine_hash(provenance)
        facts = {key: value for key, value in provenance.accelerator.items() if key.partition(" ")[0] in ends}
        return self.root / LINKS / f"{(content_hash([here, facts]) if facts else here)[:8]}.json"

    def add_runs(self, runs: Iterable[Run]) -> None:
        """Append runs. The unfinished line of a writer that was killed stays a line of its own."""
        lines = b"".join(json.dumps(asdict(run)).encode() + b"\n" for run in runs)
        if not lines:
            return
        path = self.root / RUNS
        with locked(path, root=self.trusted), open_file(path, "ab+", self.trusted) as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                lines = lines if file.read() == b"\n" else b"\n" + lines
            file.write(lines)

    @contextlib.contextmanager
    def noted(self, notes: list[str]) -> "Iterator[Store]":
        """The store for a block. If it cannot write, a note takes the place of the OSError, so that no result is lost."""
        try:
            yield self
        except OSError as failure:
            is_full = failure.errno in (errno.ENOSPC, errno.EDQUOT)  # then one note is enough, whatever could not be written
            where = f"'{failure.filename}': " if failure.filename and not is_full else ""
            lost = f"the store '{self.root}' could not keep what was measured: {where}{failure.strerror}"
            notes.append(f"{lost}; make room, or name another one with --profiles")

    def accuracy(self) -> Accuracy:
        """All stored runs, oldest first, without lines that cannot be read. Raises: ProfileError: their file cannot be read."""
        lines: list[bytes] = []
        runs = self.root / RUNS
        with contextlib.suppress(FileNotFoundError), self._refusals(), open_file(runs, root=self.trusted) as file:
            lines = file.read().splitlines()
        found = []
        for line in lines:
            with contextlib.suppress(*MALFORMED):
                found.append(Run.from_dict(parse_json(line.decode())))
        return Accuracy(tuple(found))

    def _files(self, folder: Path) -> list[Path]:
        """The files of a folder, by name; none if there is no folder."""
        found: list[Path] = []
        with contextlib.suppress(FileNotFoundError), self._refusals(), opened_folder(folder, self.trusted):
            found = sorted(folder.iterdir())
        return found

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Raise a ProfileError in place of an OSError, unless a file or folder does not exist."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as failure:
            fault = f"the store '{self.root}' cannot be used: '{failure.filename}': {failure.strerror}"
            raise ProfileError(f"{fault}; name another store with --profiles") from None

    def _read(self, path: Path, parse: Callable[[Path], list[T]], notes: list[str], held: bool = False) -> list[T]:
        """The content of a file, if it exists. A file that cannot be read is set aside, and a note says so.

        It is read again under its lock first, since another process may have replaced it; ``held``: the caller has the lock.
        """
        if not path.exists():
            return []
        try:
            return parse(path)
        except (ProfileError, *MALFORMED) as failure:
            if self.read_only:
                return []
            if held:
                notes.append(f"{failure} It was set aside as '{self._set_aside(path).name}' and is measured again.")
                return []
        with self._refusals(), locked(path, root=self.trusted):
            return self._read(path, parse, notes, held=True)

    def _set_aside(self, path: Path) -> Path:
        number = 0
        while (aside := path.with_name(f"{path.name}.broken{number or ''}")).exists():
            number += 1
        with contextlib.suppress(FileNotFoundError):
            path.rename(aside)
        return aside


def _merged(stored: Entry | None, ours: Entry) -> Entry:
    """One entry for two with the same identity: the newer measurement, and for the same measurement the stages of both."""
    if stored is None:
        return ours
    if stored.measured != ours.measured:
        return stored if stored.measured.provenance.date > ours.measured.provenance.date else ours
    known = {(stage.ops, stage.busy, stage.setting) for stage in ours.stages}
    others = (stage for stage in stored.stages if (stage.ops, stage.busy, stage.setting) not in known)
    return replace(ours, stages=(*others, *ours.stages))


def _is_of(entry: Entry, words: str) -> bool:
    """Whether the name of the processor or the accelerator of an entry has these words."""
    where = entry.measured.provenance
    return words.lower() in " ".join([where.accelerator.get("name", ""), where.cpu]).lower()


def mismatch(entry: Entry, here: Provenance | None) -> str:
    """The reason why a stored entry does not hold here, such as another processor or other versions; '' if it does."""
    stored = entry.measured.provenance
    if here is None:
        return "its backend is not installed here"
    for what, then, now in (
        ("a processor", stored.cpu, here.cpu),
        ("a number of cores", stored.num_cores, here.num_cores),
        ("caches", dict(stored.caches), dict(here.caches)),
        ("versions", dict(stored.versions), dict(here.versions)),
    ):
        if then != now:
            return f"measured with {what} of {_text(then)}, and here it is {_text(now)}"
    return ""


def user_root() -> Path:
    """The store of this user, unless a call names another one. Raises: UsageError: the user has no home."""
    try:
        return cache_folder() / "profiles"
    except RuntimeError as failure:
        raise UsageError(f"there is no place for measurements: {failure}; name a store with --profiles") from None


def open_store(root: str | Path) -> Store:
    """The store of a folder. Beneath the user's own is the one that comes with a clone."""
    root = Path(root)
    has_committed = COMMITTED.is_dir() and (COMMITTED.parent / "pyproject.toml").is_file()
    return Store(root, Store(COMMITTED, read_only=True) if has_committed and root == user_root() else None)


def machine_hash(provenance: Provenance) -> str:
    """Hash of the machine's processor, number of cores and caches."""
    return content_hash([provenance.cpu, provenance.num_cores, dict(provenance.caches)])


def stored_models(root: Path) -> dict[str, tuple[Graph, Profile]]:
    """Folder name to graph and profile of each stored model, with entries of any machine. Needs no torch.

    Raises: ProfileError: a graph file cannot be read.
    """
    found = {}
    for path in sorted(root.glob("*/graph.json")):
        data = read_mapping(path, "graph", SCHEMA, ProfileError, Store(root).trusted)
        try:
            graph = Graph.from_dict(data)
        except GraphError as failure:
            raise ProfileError(f"remove graph file '{path}', and the next measurement writes it anew: {failure}") from None
        found[path.parent.name] = (graph, Store(root).load(graph))
    return found


def file_safe(name: str) -> str:
    """A name with only the characters that a file name may have.

    >>> file_safe("cpu:0-1"), file_safe("my model/2")
    ('cpu-0-1', 'my-model-2')
    """
    return re.sub(r"[^A-Za-z0-9._+-]+", "-", name).strip("-.") or "unnamed"


def _entries(graph: Graph, root: Path, path: Path) -> list[Entry]:
    """The entries of a file. Raises: ProfileError: it is malformed or of another model, or an entry does not verify."""
    data = read_mapping(path, "profile", SCHEMA, ProfileError, root)
    try:
        if data["graph"]["hash"] != graph.hash:
            raise ProfileError(f"profile file '{path}' is of another model ({data['graph']['hash']})")
        entries = [
            Entry(setting_from_dict(one), measured_from_dict(one), tuple(map(stage_from_dict, one["stages"])))
            for one in data["entries"]
        ]
        for entry in entries:
            empty = Profile.empty(graph, entry.measured.provenance.precision)
            replace(empty, measured={entry.setting: entry.measured}, stages=entry.stages).verify()
    except MALFORMED as failure:
        raise ProfileError(f"profile file '{path}' is incomplete: {failure!r}") from None
    return entries


def _links(root: Path, path: Path) -> list[Link]:
    return from_plain(list[Link], read_mapping(path, "links", SCHEMA, ProfileError, root)["links"])


def _json(value: Any, indent: str = "") -> str:
    """JSON with one line for each list or object that holds no others, so that people can read it."""
    inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    if not any(isinstance(one, (dict, list, tuple)) for one in inner):
        return json.dumps(value)
    rows = [_json(one, indent + " ") for one in inner]
    if isinstance(value, dict):
        rows = [f"{json.dumps(key)}: {row}" for key, row in zip(value, rows, strict=True)]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n" + ",\n".join(f"{indent} {row}" for row in rows) + f"\n{indent}{last}"


def _text(value: Any) -> str:
    return ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else f"'{value}'"

import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from fuzzing import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.commands.options import Profile as Options
from autosplit.errors import ProfileError
from autosplit.files import read_mapping
from autosplit.measuring import store as measuring_store
from autosplit.measuring.store import LOCAL, Entry, Store, file_safe, mismatch, open_store, stored_models
from autosplit.reports.accuracy import Run, StageRun
from autosplit.values.graph import Graph, Op, Value
from autosplit.values.links import shared_memory_link
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Provenance, Samples, Setting

HERE = Provenance("this cpu", 2, {"L2": 1 << 20}, {"torch": "2.13.0"}, date="2026-01-01T00:00:00+00:00", calibration_s=1e-3)
ON_0 = Setting("cpu:0", "eager", 1)
ON_1 = Setting("cpu:0-1", "eager", 2)


def chain() -> Graph:
    values = {f"v{i}": Value(f"v{i}", (1,), "float32", 4) for i in range(3)}
    ops = tuple(Op(f"op{i}", "relu", "", (f"v{i}",), (f"v{i + 1}",), (), f"sig{i}") for i in range(2))
    return Graph("a chain", ("v0",), ("v2",), ops, values, {}).verify()


def measured(seconds: float = 1.0, provenance: Provenance = HERE) -> Measured:
    samples = Samples((seconds, seconds * 1.1, seconds * 0.9))
    return Measured({"sig0": samples, "sig1": samples}, whole=samples, provenance=provenance)


def profile() -> Profile:
    both = Profile.empty(chain()).with_measured(ON_0, measured()).with_measured(ON_1, measured(2.0))
    return both.with_stage(["op0"], ON_0, Samples((0.5,)), busy=["cpu:1"])


@pytest.fixture
def store(tmp_path) -> Store:
    store = Store(tmp_path / "profiles")
    store.save(chain(), profile())
    return store


LOCKS = (".measuring.lock", ".runs.jsonl.lock", "links/.{links}.lock", "{model}/.cpu-0.json.lock")


def use(store: Store) -> list[str]:
    """Do all that a command does with a store; return what was refused."""
    refused: list[str] = []

    def measuring() -> None:
        with store.measuring(lambda: None):
            pass

    for step in (
        measuring,
        lambda: store.load(chain()),
        lambda: store.links(HERE),
        store.accuracy,
        lambda: store.save(chain(), profile()),
        lambda: store.save_links(HERE, [shared_memory_link("cpu:0", "cpu:1")]),
        lambda: store.add_runs([a_run(90.0)]),
    ):
        try:
            with store.noted(refused):
                step()
        except ProfileError as failure:
            refused.append(str(failure))
    return refused


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """A folder that no store may change."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "file").write_text("mine")
    return folder


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", [*LOCKS, "runs.jsonl", "links/{links}", "{model}/cpu-0.json", "{model}/graph.json"])
def test_no_link_and_no_pipe_in_a_store_of_a_stranger_is_followed(store: Store, outside: Path, name: str) -> None:
    """Every lock emptied the target of its link, ``runs.jsonl`` appended to it, and a pipe was waited for."""
    assert use(store) == []
    [links] = [path.name for path in (store.root / "links").glob("*.json")]
    path = store.root / name.format(links=links, model=store.folder(chain()).name)
    for make in (lambda: path.symlink_to(outside / "file"), lambda: path.symlink_to(path.name), lambda: os.mkfifo(path)):
        path.unlink()
        make()
        said = use(store)
        assert (outside / "file").read_text() == "mine" and len(list(outside.iterdir())) == 1
        assert all(path.name in text and ("is a link" in text or "is a pipe" in text) for text in said), said
        assert said or not path.name.startswith((".", "runs"))


@pytest.mark.parametrize("name", ["links", "{model}"])
def test_a_folder_of_a_store_that_is_a_link_gets_no_files(store: Store, outside: Path, name: str) -> None:
    path = store.root / name.format(model=store.folder(chain()).name)
    shutil.rmtree(path, ignore_errors=True)
    path.symlink_to(outside)
    assert any(f"'{path}': it is a link" in text for text in use(store))
    assert [(entry.name, entry.read_text()) for entry in outside.iterdir()] == [("file", "mine")]


def test_a_store_that_the_user_names_may_be_a_link_and_the_usual_one_may_not(
    outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("AUTOSPLIT_CACHE", str(tmp_path / "cache"))
    Path("named").symlink_to(outside)
    Path("profiles").symlink_to(outside)
    assert Options(model="").store == tmp_path / "cache" / "profiles"
    assert all("'profiles': it is a link, and links below '.' are not followed" in text for text in use(Store(LOCAL)))
    assert [entry.name for entry in outside.iterdir()] == ["file"]
    assert use(Store(Path("named"))) == use(Store(tmp_path / "profiles")) == []
    assert (outside / "runs.jsonl").exists()


def test_what_was_saved_is_loaded_with_its_stages(store: Store) -> None:
    loaded = store.load(chain(), {"eager": HERE})
    assert loaded == profile() and not loaded.notes
    assert {path.name for path in store.folder(chain()).glob("*.json")} == {"graph.json", "cpu-0.json", "cpu-0-1.json"}
    assert store.folder(chain()).name == f"a-chain-{chain().hash[:8]}"


def test_a_newer_measurement_takes_the_place_of_the_older_one_of_the_same_machine(store: Store) -> None:
    newer = replace(HERE, date="2026-02-01T00:00:00+00:00")
    store.save(chain(), Profile.empty(chain()).with_measured(ON_0, measured(5.0, newer)))
    loaded = store.load(chain())
    assert loaded.whole_s("cpu:0", "eager") == 5 and loaded.whole_s("cpu:0-1", "eager") == 2 and not loaded.stages
    assert len(json.loads((store.folder(chain()) / "cpu-0.json").read_text())["entries"]) == 1


def test_an_older_measurement_does_not_take_the_place_of_a_newer_one(store: Store) -> None:
    older = store.load(chain(), {"eager": HERE})
    newer = replace(HERE, date="2026-02-01T00:00:00+00:00")
    store.save(chain(), Profile.empty(chain()).with_measured(ON_0, measured(5.0, newer)))
    store.save(chain(), older.with_stage(["op1"], ON_0, Samples((0.25,))))
    loaded = store.load(chain())
    assert loaded.whole_s("cpu:0", "eager") == 5 and not loaded.stages


def test_stages_that_two_processes_measured_are_both_kept_and_the_later_one_of_the_same_wins(store: Store) -> None:
    first, second = store.load(chain()), store.load(chain())
    store.save(chain(), first.with_stage(["op1"], ON_0, Samples((0.25,)), busy=["cpu:1"]))
    store.save(chain(), second.with_stage(["op0"], ON_0, Samples((0.75,)), busy=["cpu:1"]))
    found = {(*stage.ops, *stage.samples.samples_s) for stage in store.load(chain()).stages}
    assert found == {("op0", 0.75), ("op1", 0.25)}


def test_stages_of_an_earlier_measurement_of_the_same_second_are_dropped(store: Store) -> None:
    store.save(chain(), Profile.empty(chain()).with_measured(ON_0, measured(5.0)))
    loaded = store.load(chain())
    assert loaded.whole_s("cpu:0", "eager") == 5 and not loaded.stages


def test_machines_and_versions_stand_side_by_side(store: Store) -> None:
    other = replace(HERE, num_cores=64, date="2026-03-01T00:00:00+00:00")
    store.save(chain(), Profile.empty(chain()).with_measured(ON_0, measured(0.1, other)))
    assert store.load(chain(), {"eager": HERE}).whole_s("cpu:0", "eager") == 1
    assert store.load(chain(), {"eager": other}).whole_s("cpu:0", "eager") == 0.1
    assert store.load(chain()).whole_s("cpu:0", "eager") == 0.1


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"cpu": "another"}, "a processor of 'this cpu', and here it is 'another'"),
        ({"num_cores": 3}, "a number of cores of '2', and here it is '3'"),
        ({"caches": {"L2": 1}}, "caches of L2 1048576"),
        ({"versions": {"torch": "2.14"}}, "versions of torch 2.13.0, and here it is torch 2.14"),
    ],
)
def test_what_does_not_hold_here_is_left_out_with_the_reason(store: Store, change: dict, reason: str) -> None:
    loaded = store.load(chain(), {"eager": replace(HERE, **change)})
    assert not loaded.measured and not loaded.stages
    assert any(note.startswith("eager on cpu:0 with 1 thread: stored, but measured with " + reason) for note in loaded.notes)
    assert "not installed" in mismatch(Entry(ON_0, measured()), None)


@pytest.mark.parametrize("damage", ["truncated", "empty", "another model", "not a number", "lacks a field"])
def test_a_damaged_file_is_named_set_aside_and_replaced(store: Store, damage: str) -> None:
    path = store.folder(chain()) / "cpu-0.json"
    text = path.read_text()
    path.write_text(
        {
            "truncated": text[: len(text) // 2],
            "empty": "",
            "another model": text.replace(chain().hash, "0" * 16),
            "not a number": text.replace("1.1", "NaN"),
            "lacks a field": text.replace('"whole"', '"hole"'),
        }[damage]
    )
    loaded = store.load(chain(), {"eager": HERE})
    assert list(loaded.measured) == [ON_1]
    assert (
        len(loaded.notes) == 1
        and "cpu-0.json" in loaded.notes[0]
        and "'cpu-0.json.broken' and is measured again" in loaded.notes[0]
    )
    assert (path.parent / "cpu-0.json.broken").exists() and not path.exists()
    store.save(chain(), profile(), [ON_0])
    assert store.load(chain(), {"eager": HERE}) == profile()


DAMAGES = {
    "ops that are a list": lambda entry: entry.update(ops=[]),
    "samples that are a text": lambda entry: entry.update(whole="123"),
    "a sample beyond all numbers": lambda entry: entry.update(whole=[10**400]),
    "a source that is none": lambda entry: entry.update(source=[]),
    "an error that is a text": lambda entry: entry.update(error="small"),
    "a refusal without a reason": lambda entry: entry.update(refused={"op1": 1}),
    "a date that is a number": lambda entry: entry["provenance"].update(date=20260101),
    "caches that are a list": lambda entry: entry["provenance"].update(caches=[1, 2]),
    "versions that are lists": lambda entry: entry["provenance"].update(versions={"torch": [2, 13]}),
    "a device that is a number": lambda entry: entry.update(device=0, stages=[]),
    "busy devices that are lists": lambda entry: entry["stages"][0].update(busy=[["cpu:1"]]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_with_a_wrong_type_is_set_aside_and_measured_again(store: Store, damage: str) -> None:
    path = store.folder(chain()) / "cpu-0.json"
    data = json.loads(path.read_text())
    data["entries"].append(json.loads(json.dumps(data["entries"][0])))
    DAMAGES[damage](data["entries"][0])
    path.write_text(json.dumps(data))
    loaded = store.load(chain(), {"eager": HERE})
    assert list(loaded.measured) == [ON_1] and len(loaded.notes) == 1 and "'cpu-0.json.broken'" in loaded.notes[0]
    store.save(chain(), profile(), [ON_0])
    assert store.load(chain(), {"eager": HERE}) == profile()


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=3,
)


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Each container with each of its keys or indices."""
    for key in data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ():
        yield data, key
        yield from places(data[key])


@given(data=st.data(), junk=JUNK)
@settings(max_examples=examples(150), deadline=None)
def test_a_file_with_anything_in_the_place_of_anything_is_read_or_set_aside(data: st.DataObject, junk: Any) -> None:
    with TemporaryDirectory() as folder:
        store = Store(Path(folder))
        store.save(chain(), profile())
        path = store.folder(chain()) / "cpu-0.json"
        content = json.loads(path.read_text())
        container, key = data.draw(st.sampled_from(list(places(content))))
        container[key] = junk
        path.write_text(json.dumps(content))
        store.load(chain(), {"eager": HERE}).summary()
        store.save(chain(), profile())
        assert store.load(chain()).whole_s("cpu:0", "eager")
        with suppress(ProfileError):
            Profile.from_dict({**profile().to_dict(), "measured": content.get("entries")})


def test_each_broken_file_keeps_a_name_of_its_own(store: Store) -> None:
    path = store.folder(chain()) / "cpu-0.json"
    for _ in range(3):
        path.write_text("{")
        store.load(chain())
    assert sorted(entry.name for entry in path.parent.glob("*.broken*")) == [f"cpu-0.json.broken{n}" for n in ("", "1", "2")]


def test_writers_at_once_lose_nothing(tmp_path) -> None:
    store = Store(tmp_path)
    settings = [Setting("cpu:0", f"backend{i}", 1) for i in range(12)]
    threads = [
        threading.Thread(target=lambda s=s: store.save(chain(), Profile.empty(chain()).with_measured(s, measured())))
        for s in settings
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(store.load(chain()).measured) == set(settings)


@contextmanager
def a_writer_is_faster(monkeypatch: pytest.MonkeyPatch, write: Callable[[], None]) -> Iterator[None]:
    """Lets another writer put a file in place just after a reader found it broken."""
    writes = [write]

    def read(*args: Any) -> dict[str, Any]:
        try:
            return read_mapping(*args)
        except ProfileError:
            while writes:
                writes.pop()()
            raise

    with monkeypatch.context() as patch:
        patch.setattr(measuring_store, "read_mapping", read)
        yield
    assert not writes


def test_a_file_that_was_made_good_meanwhile_is_not_set_aside(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = store.folder(chain())
    (folder / "cpu-0.json").write_text("{")
    with a_writer_is_faster(monkeypatch, lambda: store.save(chain(), profile(), [ON_0])):
        loaded = store.load(chain())
    assert loaded == profile() and not loaded.notes
    assert store.load(chain()) == profile()
    assert [path.name for path in folder.glob("*.broken*")] == ["cpu-0.json.broken"]


def test_a_file_that_another_reader_set_aside_is_only_absent(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store.folder(chain()) / "cpu-0.json"
    path.write_text("{")
    with a_writer_is_faster(monkeypatch, path.unlink):
        loaded = store.load(chain())
    assert list(loaded.measured) == [ON_1] and not loaded.notes


def test_links_that_were_made_good_meanwhile_are_not_set_aside(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, link = Store(tmp_path), shared_memory_link("cpu:0", "cpu:1")
    store.save_links(HERE, [link])
    [path] = (tmp_path / "links").glob("*.json")
    path.write_text("{")
    with a_writer_is_faster(monkeypatch, lambda: store.save_links(HERE, [link])):
        assert store.links(HERE) == (link,)
    assert store.links(HERE) == (link,)


def test_links_are_kept_for_each_machine(tmp_path) -> None:
    store = Store(tmp_path)
    link = shared_memory_link("cpu:0", "cpu:1")
    store.save_links(HERE, [link])
    faster = replace(link, latency_s=1e-6)
    store.save_links(HERE, [faster, shared_memory_link("cpu:1", "cpu:0")])
    assert store.links(HERE) == (faster, shared_memory_link("cpu:1", "cpu:0"))
    assert store.links(replace(HERE, cpu="another")) == ()
    [path] = (tmp_path / "links").glob("*.json")
    one, other = ({"cuda:0 name": "a GPU"}, {"cuda:1 name": "a card"})
    copied = [shared_memory_link(*ends) for ends in (("cpu:0", "cuda:0"), ("cuda:0", "cuda:1"))]
    store.save_links(replace(HERE, accelerator=one | other), [faster, *copied])
    cores = store.links(HERE)
    assert store.links(replace(HERE, accelerator=one)) == (*cores, copied[0])
    assert {*store.links(replace(HERE, accelerator=one | other))} == {*cores, *copied}
    assert store.links(replace(HERE, accelerator={"cuda:0 name": "another"})) == cores
    for broken in ("{", path.read_text().replace("3.5e-05", '"fast"'), '{"schema": 1, "links": {"a": 1}}'):
        path.write_text(broken)
        assert store.links(HERE) == () and not path.exists()


def test_stored_models_need_only_the_folder(store: Store) -> None:
    [(name, (graph, found))] = stored_models(store.root).items()
    assert name.startswith("a-chain-") and graph == chain() and found == profile()


@pytest.mark.parametrize("broken", [{"ops": None}, {"inputs": []}])
def test_a_stored_graph_that_is_none_is_named_as_a_file(store: Store, broken: dict[str, Any]) -> None:
    path = store.folder(chain()) / "graph.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **broken}))
    with pytest.raises(ProfileError, match=f"remove graph file '{path}', and the next measurement writes it anew: graph "):
        stored_models(store.root)
    path.unlink()
    store.save(chain(), profile())
    assert [graph for graph, _ in stored_models(store.root).values()] == [chain()]


def test_runs_are_added_by_many_and_survive_a_cut(tmp_path) -> None:
    store = Store(tmp_path / "profiles")
    assert store.accuracy().runs == ()
    store.add_runs([])
    assert not store.root.exists()
    threads = [threading.Thread(target=store.add_runs, args=([a_run(predicted)] * 3,)) for predicted in (101.0, 102.0, 103.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(run.predicted_per_s for run in store.accuracy().runs) == [101.0] * 3 + [102.0] * 3 + [103.0] * 3
    path = store.root / "runs.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert len(store.accuracy().runs) == 8
    store.add_runs([a_run(104.0)])
    assert [run.predicted_per_s for run in store.accuracy().runs][-1] == 104.0 and len(store.accuracy().runs) == 9
    path.write_text(path.read_text() + json.dumps({"kind": "run"}) + "\n[1]\n" + "[" * 200_000 + "\n")
    assert len(store.accuracy().runs) == 9
    wrong = [{"model": 3}, {"spread": "wide"}, {"stages": [{"stage": 1}]}, {"date": [1]}, {"predicted_per_s": None}]
    with path.open("a") as file:
        file.writelines(json.dumps(asdict(a_run(105.0)) | change) + "\n" for change in wrong)
    assert len(store.accuracy().runs) == 9 and store.accuracy().rows()


def a_run(predicted_per_s: float) -> Run:
    stage = StageRun("stage0", "cpu:0", "eager", 1, 5, 0.01, 0.0105)
    return Run("run", "net", "plan", "hash", "f32", predicted_per_s, 100.0, 0.1, (stage,), "2026-01-01T00:00:00+00:00")


def test_precisions_stand_side_by_side_and_a_file_without_one_is_f32(store: Store) -> None:
    coarse = Profile.empty(chain(), "bf16").with_measured(ON_0, measured(0.4, replace(HERE, precision="bf16")))
    store.save(chain(), coarse)
    assert store.load(chain(), precision="bf16") == coarse and store.load(chain()) == profile()
    path = store.folder(chain()) / "cpu-0.json"
    data = json.loads(path.read_text())
    for entry in data["entries"]:
        del entry["error"], entry["provenance"]["precision"]
    path.write_text(json.dumps({**data, "entries": data["entries"][:1]}))
    assert store.load(chain()) == profile()
    with pytest.raises(ProfileError, match="was measured in f32, and the profile is of bf16"):
        coarse.with_measured(ON_1, measured())


def test_names_of_files() -> None:
    assert file_safe("cpu:0-1") != file_safe("cpu:0+1") and file_safe("../..") == "unnamed"


def committed(root: Path, folder: str) -> list[str]:
    """The files of a folder without those that commands left there, which is their default store; without git, all files."""
    with suppress(OSError, subprocess.CalledProcessError):
        found = subprocess.run(["git", "ls-files", folder], cwd=root, capture_output=True, text=True, check=True)
        if found.stdout:
            return found.stdout.splitlines()
    return [str(path.relative_to(root)) for path in (root / folder).rglob("*") if path.is_file()]


def test_the_committed_profiles_serve_without_torch(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from autosplit.measuring.store import stored_models
models = stored_models(Path(sys.argv[1]))
for graph, profile in models.values():
    assert {(setting.device, setting.backend) for setting in profile.measured} >= {
        (device, backend) for device in ("cpu:0", "cpu:1") for backend in ("eager", "onnxruntime")
    }
    for setting in profile.measured:
        assert len(profile.table(graph, setting)) == len(graph.ops)
    assert all(measured.provenance.cpu and measured.provenance.date for measured in profile.measured.values())
    assert not profile.notes
assert len(models) >= 6 and "torch" not in sys.modules
"""
    root = Path(__file__).parents[2]
    for name in committed(root, "profiles"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, tmp_path / name)
    subprocess.run([sys.executable, "-c", script, tmp_path / "profiles"], check=True, timeout=60)


def test_what_comes_with_a_clone_is_read_beneath_the_users_store_and_never_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    committed, old, new = tmp_path / "clone" / "profiles", profile(), Profile.empty(chain()).with_measured(ON_0, measured(3.0))
    Store(committed).save(chain(), old)
    Store(committed).save_links(HERE, [shared_memory_link("cpu:0", "cpu:1")])
    (tmp_path / "clone" / "pyproject.toml").write_text("")
    (Store(committed).folder(chain()) / "null-0.json").write_text("damaged")
    before = {path: path.read_bytes() for path in committed.rglob("*") if path.is_file()}
    monkeypatch.setattr(measuring_store, "COMMITTED", committed)
    monkeypatch.delenv("AUTOSPLIT_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "shared"))
    store = open_store(Options(model="").store)
    assert store.root == tmp_path / "shared" / "autosplit" / "profiles"
    assert store.load(chain()).measured == old.measured and len(store.links(HERE)) == 1 and not store.load(chain()).notes
    assert not open_store(tmp_path / "named").load(chain()).measured
    store.save(chain(), new, [ON_0])
    loaded = store.load(chain()).measured
    assert loaded[ON_0] == new.measured[ON_0] and loaded[ON_1] == old.measured[ON_1]
    store.save_links(HERE, [shared_memory_link("cpu:0", "cpu:1")])
    assert store.accuracy().runs == () and not use(store)
    assert {path: path.read_bytes() for path in committed.rglob("*") if path.is_file()} == before

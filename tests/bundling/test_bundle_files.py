"""A plan becomes a bundle, and the bundle runs: on any backend, by any policy, without the model."""

import hashlib
import io
import json
import shutil
import struct
import subprocess
import sys
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from autosplit.backends import openvino
from autosplit.bundling import packing
from autosplit.bundling.bundler import write_bundle
from autosplit.bundling.crosscheck import check_bundle
from autosplit.bundling.dumps import differences_of, example_inputs, read_dump, write_dump
from autosplit.bundling.manifest import WEIGHTS, Part, check_files, read_manifest
from autosplit.bundling.openbundle import load_bundle, mapped_devices
from autosplit.bundling.packing import pack
from autosplit.commands.bundles import Bundle, bundle
from autosplit.errors import BundleError, RefusedError, StageError, UsageError
from autosplit.files import content_hash
from autosplit.tracing.capturing import trace
from autosplit.tracing.flattening import Fixed
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import unsplit
from autosplit.values.machine import parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage


class Skips(nn.Module):
    """Values that skip a part, a late input, a transposed value across a cut, a tied weight, and a dict as the answer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.third.weight = self.first.weight

    def forward(self, x, scale):
        early = self.first(x).transpose(1, 2)
        middle = self.second(early.transpose(1, 2)).relu()
        return {"early": early.sum(2), "late": self.third(middle + early.transpose(1, 2)) * scale}


def plan_of(traced, backends, devices=("cpu:0", "cpu:1")):
    """As many stages as backends, in graph order."""
    ops = [op.name for op in traced.graph.ops]
    cuts = [len(ops) * k // len(backends) for k in range(len(backends) + 1)]
    stages = tuple(
        Stage(f"stage{k}", tuple(ops[cuts[k] : cuts[k + 1]]), (devices[k % len(devices)],), backend)
        for k, backend in enumerate(backends)
    )
    return Plan(Source("skips"), traced.graph.hash, "", stages, UNKNOWN)


@pytest.fixture(scope="module")
def skips():
    torch.manual_seed(0)
    inputs = (torch.randn(2, 3, 64), torch.full((1,), 3.0))
    return trace(load_model(Skips().eval(), inputs=inputs))


@pytest.fixture(scope="module")
def folder(skips, tmp_path_factory):
    """Two networks of one model: one on eager, one on the runtimes that need no torch."""
    path = tmp_path_factory.mktemp("bundle") / "app.asb"
    networks = {
        "eager": (skips, plan_of(skips, ["eager", "eager", "eager"])),
        "mixed": (skips, plan_of(skips, ["onnxruntime", "openvino", "onnxruntime"])),
    }
    write_bundle(networks, path)
    errors = check_bundle(path, networks)
    assert errors["eager"].relative == 0 and errors["mixed"].relative < 1e-5
    return path


def answers_of(traced, requests):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        found = [traced.program(*request) for request in requests]
    torch.set_num_threads(before)
    return found


def requests_of(count):
    return [(torch.randn(2, 3, 64), torch.full((1,), float(k))) for k in range(count)]


def test_eager_parts_equal_the_model_bit_for_bit(skips, folder):
    requests = requests_of(3)
    with load_bundle(folder, network="eager") as bundle:
        for found, wanted in zip(bundle.engine.run_many(requests), answers_of(skips, requests), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        named = bundle(scale=requests[0][1], x=requests[0][0])
        assert list(named) == ["early", "late"] and torch.equal(named["late"], bundle(*requests[0])["late"])


def test_weights_are_in_the_bundle_once(skips, folder):
    manifest = read_manifest(folder)
    weights = sum({tensor.data_ptr(): tensor.nbytes for tensor in unsplit(skips).weights.values()}.values())
    # Two networks of three parts, and a tied weight: all share one copy.
    assert manifest.files[WEIGHTS].num_bytes < weights + 8192
    assert len(list(manifest.parts)) == 6


def test_the_driver_runs_where_torch_cannot_be_imported(skips, folder, tmp_path):
    requests = requests_of(4)
    np.savez(tmp_path / "in.npz", **{f"{k}.{j}": t.numpy() for k, request in enumerate(requests) for j, t in enumerate(request)})
    script = """
import sys
for name in ("torch", "onnx", "onnxscript", "autosplit", "transformers"):
    sys.modules[name] = None
import numpy as np
from driver import Bundle
stored = np.load(sys.argv[1])
requests = [[stored[f"{k}.0"], stored[f"{k}.1"]] for k in range(4)]
bundle = Bundle(network="mixed")
serial, pipelined = bundle.run_many(requests), bundle.run_many(requests, policy="pipelined")
assert all(np.array_equal(a[name], b[name]) for a, b in zip(serial, pipelined, strict=True) for name in a)
np.savez(sys.argv[2], **{f"{k}.{name}": v for k, answer in enumerate(pipelined) for name, v in answer.items()})
"""
    command = [sys.executable, "-c", script, str(tmp_path / "in.npz"), str(tmp_path / "out.npz")]
    moved = shutil.copytree(folder, tmp_path / "moved.asb")
    done = subprocess.run(command, cwd=moved, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = np.load(tmp_path / "out.npz")
    for k, (early, late) in enumerate(answers_of(skips, requests)):
        np.testing.assert_allclose(found[f"{k}.early"], early.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(found[f"{k}.late"], late.numpy(), rtol=1e-4, atol=1e-5)


def test_loading_imports_no_tracer_and_no_transformers(folder):
    script = """
import os, sys
for name in ("transformers", "torch._dynamo", "torch._inductor", "torch.onnx", "onnx", "onnxscript"):
    sys.modules[name] = None
os.environ["PATH"] = ""
import torch
from autosplit.bundling.openbundle import load_bundle
for network in ("eager", "mixed"):
    with load_bundle(sys.argv[1], network=network) as bundle:
        bundle(torch.zeros(2, 3, 64), torch.zeros(1))
"""
    done = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def written(skips, tmp_path_factory):
    path = tmp_path_factory.mktemp("written") / "app.asb"
    write_bundle({"skips": (skips, plan_of(skips, ["eager"]))}, path)
    return path


@pytest.fixture
def small(written, tmp_path):
    """A bundle of its own, and a function that edits its manifest and makes the key fit again."""
    path = shutil.copytree(written, tmp_path / "app.asb")
    manifest = path / "manifest.json"

    def edit(change):
        data = json.loads(manifest.read_text())
        change(data)
        data["key"] = content_hash({name: value for name, value in data.items() if name not in ("schema", "key")})
        manifest.write_text(json.dumps(data))

    return path, edit


def rename_file(data, name):
    data["files"][name] = data["files"].pop("n0p0.json")
    data["networks"]["skips"]["parts"][0]["files"]["program"] = name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(schema=1), "schema version 1, and this autosplit reads version 2"),
        (lambda data: rename_file(data, "../n0p0.json"), r"file '../n0p0.json' is not a plain name"),
        (lambda data: rename_file(data, "/etc/passwd"), r"file '/etc/passwd' is not a plain name"),
        (lambda data: data["files"].pop(WEIGHTS), f"it lists no '{WEIGHTS}'"),
        (
            lambda data: data["networks"]["skips"]["parts"][0].update(backend="pickle"),
            "for backend 'pickle', which does not exist",
        ),
        (lambda data: data["networks"]["skips"]["parts"][0].update(devices=["tape"]), "part 'stage0': device 'tape'"),
        (lambda data: data["networks"]["skips"].update(answer={"value": "nothing"}), "an answer that cannot be built"),
    ],
)
def test_a_manifest_that_does_not_hold_is_refused(small, change, message):
    path, edit = small
    edit(change)
    with pytest.raises(BundleError, match=message):
        load_bundle(path)


def test_files_that_are_not_those_of_the_manifest_are_refused(small, tmp_path):
    path, _ = small
    weights, program, manifest = path / WEIGHTS, path / "n0p0.json", path / "manifest.json"
    whole, text = weights.read_bytes(), program.read_text()
    weights.write_bytes(whole[:-8])
    with pytest.raises(BundleError, match=r"'weights.safetensors' has \d+ bytes, and the manifest says \d+: it is truncated"):
        load_bundle(path)
    weights.write_bytes(whole[:-8] + b"\1" * 8)
    with pytest.raises(BundleError, match=r"'weights.safetensors' was changed after it was written"):
        load_bundle(path)
    weights.write_bytes(whole)
    (tmp_path / "elsewhere").write_text(text)
    program.unlink()
    program.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=r"'n0p0.json' is missing, or a link, which may lead out"):
        load_bundle(path)
    manifest.write_text(manifest.read_text().replace('"threads": 1', '"threads": 2'))
    with pytest.raises(BundleError, match="was changed after it was written"):
        load_bundle(path)
    manifest.write_text(manifest.read_text()[:50])
    with pytest.raises(BundleError, match="truncated or not valid JSON"):
        load_bundle(path)
    with pytest.raises(BundleError, match="does not exist"):
        load_bundle(tmp_path / "none.asb")


def test_verifying_reads_every_file(small):
    path, _ = small
    manifest = read_manifest(path)
    check_files(path, manifest.files, hashed=True)
    (path / "driver.py").write_text((path / "driver.py").read_text().replace("class Bundle", "class Bumble"))
    with pytest.raises(BundleError, match=r"'driver.py' was changed"):
        check_files(path, manifest.files, hashed=True)


def test_one_file_runs_as_the_folder_does_unless_it_is_cut(skips, tmp_path):
    path = tmp_path / "app.zip"
    write_bundle({"skips": (skips, plan_of(skips, ["eager"]))}, path, zipped=True)
    [request] = requests_of(1)
    with load_bundle(path) as bundle:
        assert all(torch.equal(a, b) for a, b in zip(bundle.run(request), answers_of(skips, [request])[0], strict=True))
    assert [entry.name for entry in tmp_path.iterdir()] == ["app.zip"]
    with pytest.raises(UsageError, match=r"app.zip' is there already"):
        write_bundle({}, path)
    path.write_bytes(path.read_bytes()[:20_000])
    with pytest.raises(BundleError, match="truncated or not a bundle"):
        load_bundle(path)


def test_an_answer_that_a_bundle_cannot_hold_is_refused_before_a_part_is_made(skips, tmp_path):
    steps = []
    unknown = replace(skips, out_leaves=(Fixed(1j), skips.out_leaves[1]))
    with pytest.raises(UsageError, match="returns a complex, which a bundle cannot build again"):
        networks = {"good": (skips, plan_of(skips, ["eager"])), "odd": (unknown, plan_of(skips, ["eager"]))}
        write_bundle(networks, tmp_path / "app.asb", progress=lambda *step: steps.append(step))
    assert steps == [] and list(tmp_path.iterdir()) == []


def test_a_bundle_that_could_not_be_read_is_not_written(skips, tmp_path):
    with pytest.raises(BundleError, match=r"manifest.networks has the name 'a\\nb'"):
        write_bundle({"a\nb": (skips, plan_of(skips, ["eager"]))}, tmp_path / "app.asb")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("../escaped", zipfile.ZIP_STORED, "has 1000 bytes of '../escaped', and its manifest says nothing"),
        ("/escaped", zipfile.ZIP_STORED, "has 1000 bytes of '/escaped', and its manifest says nothing"),
        ("large", zipfile.ZIP_DEFLATED, "holds 'large' compressed"),
    ],
)
def test_a_hostile_archive_writes_nothing_outside(small, tmp_path, name, kind, message):
    folder, _ = small
    path = tmp_path / "app.zip"
    pack(folder, path)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(name, b"\0" * 1000, kind)
    with pytest.raises(BundleError, match=message):
        load_bundle(path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["app.asb", "app.zip"] and not Path("/escaped").exists()


def nested_archive(path, folder, num_files):
    """Write an archive of a bundle with files of which each holds all that follow, and return their rows for a manifest."""
    names = [f"f{number:04}" for number in range(num_files)]
    with zipfile.ZipFile(path, "w") as archive:
        for file in folder.iterdir():
            archive.write(file, file.name)
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), bytes(1000))
        archive.fp.flush()
        data, rows = path.read_bytes(), {}
        for entry in archive.infolist()[-num_files:]:
            inside = data[entry.header_offset + 30 + len(entry.filename) : archive.start_dir]
            entry.file_size, entry.compress_size, entry.CRC = len(inside), len(inside), zlib.crc32(inside)
            rows[entry.filename] = {"num_bytes": len(inside), "sha256": hashlib.sha256(inside).hexdigest()}
    return rows


def test_an_archive_unpacks_to_no_more_bytes_than_it_has(small, tmp_path):
    folder, edit = small
    rows = nested_archive(tmp_path / "nested.zip", folder, 200)
    edit(lambda data: data["files"].update(rows))
    assert nested_archive(tmp_path / "nested.zip", folder, 200) == rows
    assert sum(row["num_bytes"] for row in rows.values()) > 50 * (tmp_path / "nested.zip").stat().st_size
    with pytest.raises(BundleError, match=r"holds 'f0001' inside another file"):
        load_bundle(tmp_path / "nested.zip")


def test_an_archive_with_an_offset_before_its_start_is_refused(small, tmp_path):
    folder, _ = small
    path = tmp_path / "app.zip"
    pack(folder, path)
    data = bytearray(path.read_bytes())
    place = data.rindex(b"PK\5\6") + 16  # the start of the table of files
    struct.pack_into("<I", data, place, struct.unpack_from("<I", data, place)[0] + 1000)
    path.write_bytes(data)
    with pytest.raises(BundleError, match=r"holds 'manifest.json' before its start"):
        load_bundle(path)


def test_an_archive_with_sizes_that_the_manifest_does_not_say_is_refused(small, tmp_path):
    folder, _ = small
    with (folder / WEIGHTS).open("ab") as file:
        file.write(bytes(64))
    pack(folder, tmp_path / "app.zip")
    with pytest.raises(BundleError, match=r"has \d+ bytes of 'weights.safetensors', and its manifest says \d+ bytes"):
        load_bundle(tmp_path / "app.zip")


def test_an_archive_above_the_limit_is_refused_with_a_way_out(small, tmp_path, monkeypatch):
    folder, _ = small
    pack(folder, tmp_path / "app.zip")
    monkeypatch.setattr(packing, "MAX_UNPACKED_BYTES", 10_000)
    with pytest.raises(BundleError, match=r"at most 9.8 KiB are unpacked; unzip it yourself and load the folder"):
        load_bundle(tmp_path / "app.zip")


def test_an_archive_with_a_million_files_is_refused_at_once(tmp_path):
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, *[0] * 15)
    table = entry * 1_000_000
    (tmp_path / "app.zip").write_bytes(table + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 65535, 65535, len(table), 0, 0))
    with pytest.raises(BundleError, match=r"its table of files has 46000000 bytes, and at most 1048576 are read"):
        load_bundle(tmp_path / "app.zip")


def test_serial_threads_and_processes_give_equal_answers(skips, folder):
    requests = requests_of(6)
    answers = {}
    for policy in ("serial", "threads", "processes"):
        with load_bundle(folder, network="eager", policy=policy) as bundle:
            answers[policy] = [*bundle.engine.stream(requests), bundle.engine.submit(requests[0]).result(20)]
    for found in answers.values():
        for one, wanted in zip(found, answers_of(skips, [*requests, requests[0]]), strict=True):
            assert all(torch.equal(a, b) for a, b in zip(one, wanted, strict=True))


@pytest.mark.parametrize("policy", ["serial", "threads"])
def test_a_wrong_request_names_the_op_and_later_ones_are_answered(skips, folder, policy):
    lookup = trace(load_model(nn.Embedding(4, 8).eval(), inputs=(torch.zeros(2, dtype=torch.int64),)))
    path = folder.with_name(f"lookup-{policy}.asb")
    write_bundle({"lookup": (lookup, plan_of(lookup, ["eager"]))}, path)
    with load_bundle(path, policy=policy) as bundle:
        with pytest.raises(StageError, match="while executing 'embedding': RuntimeError: part 'stage0': IndexError"):
            bundle.run([torch.full((2,), 99)])
        with pytest.raises(UsageError, match=r"'input_1' is float32\[2\], and int64\[2\] is expected"):
            bundle.run([torch.zeros(2)])
        assert bundle(torch.zeros(2, dtype=torch.int64)).shape == (2, 8)
    with pytest.raises(RefusedError, match="closed"):
        bundle.run([torch.zeros(2, dtype=torch.int64)])


@pytest.mark.parametrize("change", [(b";ov=2", b";ov=1"), (b";isa=", b";isA="), (b"cnndata", b"cnndatX")])
def test_a_blob_of_another_openvino_or_processor_is_refused_and_the_file_is_compiled(skips, folder, tmp_path, change):
    copied = shutil.copytree(folder, tmp_path / "app.asb")
    [blob] = copied.glob("*.blob")
    blob.write_bytes(blob.read_bytes().replace(*change))
    with pytest.raises(RuntimeError):
        openvino.core().import_model(io.BytesIO(blob.read_bytes()), "CPU", {"WEIGHTS_PATH": str(copied / WEIGHTS)})
    request = requests_of(1)
    with load_bundle(copied, network="mixed", verify=False) as bundle:
        for found, wanted in zip(bundle.run(request[0]), answers_of(skips, request)[0], strict=True):
            torch.testing.assert_close(found, wanted)


def test_a_comparison_names_the_first_part_that_differs(folder, tmp_path):
    dumps = {}
    for network, policy in (("eager", "serial"), ("eager", "threads"), ("mixed", "serial")):
        with load_bundle(folder, network=network, policy=policy, cuts=True) as bundle:
            place = tmp_path / f"{network}-{policy}"
            write_dump(bundle, policy, example_inputs(bundle.network), place)
            dumps[network, policy] = read_dump(place)
    one = dumps["eager", "serial"]
    assert [row.absolute for row in differences_of(one, dumps["eager", "threads"])] == [0.0] * 3
    values = {**one.values, "relu": one.values["relu"] + 0.5}
    rows = differences_of(one, replace(dumps["mixed", "serial"], values=values))
    assert [row.part for row in rows if row.absolute] == [part for part, _, made in one.parts if "relu" in made]
    with pytest.raises(UsageError, match="are of different inputs: 'x' differs"):
        differences_of(one, replace(one, values={**one.values, "x": one.values["x"] + 1}))
    with pytest.raises(UsageError, match="are of different inputs: 'x' differs"):
        differences_of(one, replace(one, values={name: value for name, value in one.values.items() if name != "x"}))
    (tmp_path / "eager-serial" / "values.safetensors").write_bytes(b"\0" * 20)
    with pytest.raises(BundleError, match="is damaged"):
        read_dump(tmp_path / "eager-serial")


def test_inputs_of_another_network_are_refused(folder, tmp_path):
    save_file({"y": torch.zeros(1)}, tmp_path / "values.safetensors")
    table = {"schema": 1, "graph": "other", "policy": "serial", "inputs": ["y"], "parts": []}
    (tmp_path / "dump.json").write_text(json.dumps(table))
    with pytest.raises(UsageError, match="the inputs are x, scale, and given are y"):
        bundle(Bundle(words=["run", str(folder)], network="eager", inputs=tmp_path))


def part_of(name, devices, load_s):
    return Part((), (), (), (), {}, name, "eager", devices, 1, 1, load_s, (), 0)


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        ("cpu:0 cpu:1", ["cpu:0", "cpu:1", "cpu:0 cpu:1"]),  # those of the plan stay
        ("cpu:4", ["cpu:4", "cpu:4", "cpu:4"]),  # all share one
        ("cpu:4 cpu:5 cpu:6", ["cpu:4", "cpu:5 cpu:6", "cpu:4 cpu:5"]),  # the slowest part gets the one that is left
    ],
)
def test_the_devices_of_the_plan_are_mapped_to_those_that_are_there(there, wanted):
    parts = [part_of("a", ("cpu:0",), 0.1), part_of("b", ("cpu:1",), 0.3), part_of("c", ("cpu:0", "cpu:1"), 0.2)]
    found = mapped_devices(parts, [parse_device(name) for name in there.split()])
    assert [" ".join(device.name for device in devices) for devices in found] == wanted

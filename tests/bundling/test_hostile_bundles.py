"""Archives, bundles of each backend, driver manifests and ONNX initializers are changed at random: each is right or refused.

Each kind is tried 100 times, or AUTOSPLIT_FUZZ_CASES times (``make fuzz``). A changed manifest gets the key that fits it, as a
hostile one has. ``test_native`` does the same for the table of the C++ driver.
"""

import json
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch import nn

from autosplit.backends.onnxfile import write_onnx
from autosplit.bundling import driver
from autosplit.bundling.bundler import write_bundle
from autosplit.bundling.manifest import MANIFEST, check_files
from autosplit.bundling.openbundle import load_bundle
from autosplit.bundling.packing import pack, unpacked
from autosplit.errors import AutosplitError
from autosplit.exporting.onnx_stages import from_onnx_stages
from autosplit.files import content_hash
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.tracing.splitting import split
from autosplit.values.machine import Machine, parse_device
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage
from tests.test_hostile_files import MOST_MESSAGE, NUM_CASES, mutate_bytes, mutated

Change = Callable[[random.Random], None]
RUNTIMES = ["onnxruntime", "openvino"]
REQUEST = np.linspace(-1, 1, 8, dtype="float32").reshape(1, 8)


@pytest.fixture(scope="module")
def traced() -> Traced:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    return trace(load_model(net.eval(), inputs=(torch.from_numpy(REQUEST),)))


@pytest.fixture(scope="module")
def folder(traced: Traced, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a network for each backend."""
    path = tmp_path_factory.mktemp("hostile") / "bundle"
    ops = tuple(op.name for op in traced.graph.ops)
    networks = {}
    for backend in ("eager", *RUNTIMES):
        cuts = (ops,) if backend == "openvino" else (ops[:2], ops[2:])
        stages = tuple(Stage(f"stage{k}", part, ("cpu:0",), backend) for k, part in enumerate(cuts))
        networks[backend] = (traced, Plan(Source("m"), traced.graph.hash, "", stages, UNKNOWN))
    write_bundle(networks, path)
    return path


def tried(attempt: Change, refusal: type[Exception]) -> int:
    """The number of cases that are not refused; each refusal is a message of a bounded length."""
    good = 0
    for seed in range(NUM_CASES):
        try:
            attempt(random.Random(seed))
            good += 1
        except refusal as failure:
            assert 0 < len(str(failure)) < MOST_MESSAGE
        except BaseException as failure:
            raise AssertionError(f"case {seed}") from failure
    return good


def write_mutated(folder: Path, valid: str, chance: random.Random) -> None:
    """Change a manifest, and give it the key that fits it."""
    text = mutated(valid, chance)
    try:
        data = json.loads(text)
        data["key"] = content_hash({name: value for name, value in data.items() if name not in ("schema", "key")})
        text = json.dumps(data)
    except Exception:  # what is not a manifest is read as it is
        pass
    (folder / MANIFEST).write_text(text, encoding="utf-8", errors="surrogatepass")


@pytest.fixture
def manifest(folder: Path) -> Callable[[random.Random], None]:
    valid = (folder / MANIFEST).read_text()
    yield lambda chance: write_mutated(folder, valid, chance)
    (folder / MANIFEST).write_text(valid)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("network", ["eager", *RUNTIMES])
def test_a_bundle_with_another_manifest_loads_or_is_refused(network, folder, manifest) -> None:
    def attempt(chance: random.Random) -> None:
        manifest(chance)
        with load_bundle(folder, network=network, verify=False) as bundle:
            assert bundle.network.parts

    tried(attempt, AutosplitError)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("network", RUNTIMES)
def test_the_driver_runs_another_manifest_or_raises_value_error(network, folder, manifest) -> None:
    def attempt(chance: random.Random) -> None:
        manifest(chance)
        bundle = driver.Bundle(folder, network, verify=False)
        bundle.run(dict.fromkeys(bundle.network["inputs"], REQUEST))

    tried(attempt, ValueError)


ENTRY, END = b"PK\1\2", b"PK\5\6"
FIELDS = {4: "H", 6: "H", 8: "H", 10: "H", 16: "I", 20: "I", 24: "I", 28: "H", 30: "H", 32: "H", 34: "H", 38: "I", 42: "I"}
"""Place and format of the numbers in an entry of the table of a ZIP archive."""
END_FIELDS = {4: "H", 6: "H", 8: "H", 10: "H", 12: "I", 16: "I", 20: "H"}


def lie(data: bytes, chance: random.Random) -> bytes:
    """Give entries of the table of files, or its end, other numbers: sizes, offsets, lengths, methods."""
    out = bytearray(data)
    table = data.index(ENTRY)
    starts = [place for place in range(table, len(data)) if data.startswith(ENTRY, place)]
    for _ in range(chance.choice([1, 1, 2, 5])):
        at_end = chance.random() < 0.2
        start = data.rindex(END) if at_end else chance.choice(starts)
        place, code = chance.choice(list((END_FIELDS if at_end else FIELDS).items()))
        [old] = struct.unpack_from(f"<{code}", data, start + place)
        most = 2 ** (8 * struct.calcsize(code)) - 1
        other = struct.unpack_from(f"<{code}", data, chance.choice(starts) + place) if not at_end else (0,)
        value = chance.choice([0, 1, most, most // 2 + 1, old + 1, old - 1, old * 2, other[0], chance.randrange(most + 1)])
        struct.pack_into(f"<{code}", out, start + place, value & most)
    return bytes(out)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("change", [mutate_bytes, lie])
def test_a_changed_archive_is_the_same_bundle_or_refused(change, folder, tmp_path) -> None:
    path = tmp_path / "app.zip"
    pack(folder, path)
    whole = path.read_bytes()

    def attempt(chance: random.Random) -> None:
        data = change(whole, chance)
        path.write_bytes(data)
        with unpacked(path) as (place, manifest):
            check_files(place, manifest.files, hashed=True)
            assert sum(file.stat().st_size for file in place.iterdir()) <= len(data)

    tried(attempt, AutosplitError)


@pytest.mark.timeout(3600)
def test_an_archive_whose_files_lie_inside_each_other_is_refused(folder, tmp_path) -> None:
    """Files at random places of the archive, as the manifest says: never are more bytes unpacked than the archive has."""
    path = tmp_path / "app.zip"

    def attempt(chance: random.Random) -> None:
        with zipfile.ZipFile(path, "w") as archive:
            for file in sorted(folder.iterdir()):
                archive.write(file, file.name)
            entries = archive.infolist()
            for entry in chance.sample(entries, chance.choice([1, 2, 4])):
                entry.header_offset = chance.choice(entries).header_offset + chance.choice([0, 0, 1, 30])
                entry.file_size = entry.compress_size = chance.choice([entry.file_size, 0, 10_000, 2**31])
        with unpacked(path) as (place, manifest):
            assert sum(file.stat().st_size for file in place.iterdir()) <= path.stat().st_size
            check_files(place, manifest.files, hashed=True)

    assert tried(attempt, AutosplitError) <= NUM_CASES // 4


DTYPES = [*onnx.TensorProto.DataType.values(), 99, -1]


def change_initializer(tensor: onnx.TensorProto, chance: random.Random) -> None:
    """Another name, type, shape or other bytes, in the fields that a file may have."""
    way = chance.randrange(6)
    if way == 0:
        tensor.name = chance.choice(["", "x", "f.0.weight", "0.weight", "y" * 5000, "2.bias"])
    elif way == 1:
        tensor.data_type = chance.choice(DTYPES)
    elif way == 2:
        del tensor.dims[:]
        tensor.dims.extend(chance.choice([[], [0], [-1], [2**62, 4], [2**40], [8, 8, 8], [64], [8, 8]]))
    elif way == 3:
        tensor.raw_data = mutate_bytes(tensor.raw_data, chance)
    elif way == 4:
        tensor.ClearField("raw_data")
        getattr(tensor, chance.choice(["float_data", "int32_data", "int64_data"])).extend([1] * chance.choice([0, 1, 64]))
        tensor.string_data.extend([b"\xff"] * chance.choice([0, 64]))
    else:
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (
            ("location", chance.choice(["../x", "/etc/passwd", "none", ""])),
            ("offset", "-1"),
            ("length", "9" * 30),
        ):
            tensor.external_data.add(key=key, value=value)


@pytest.mark.timeout(3600)
def test_a_stage_with_other_initializers_is_a_split_or_refused(traced, tmp_path) -> None:
    files, ops = [tmp_path / "front.onnx", tmp_path / "rear.onnx"], [op.name for op in traced.graph.ops]
    for path, program in zip(files, split(traced, (ops[:2], ops[2:])), strict=True):
        write_onnx(program, path, dense=False)
    whole = [path.read_bytes() for path in files]
    machine = Machine.of([parse_device("cpu:0"), parse_device("cpu:1")])

    def attempt(chance: random.Random) -> None:
        for path, data in zip(files, whole, strict=True):
            model = onnx.load_from_string(data)
            for tensor in model.graph.initializer:
                for _ in range(chance.choice([0, 0, 1, 2, 3])):
                    change_initializer(tensor, chance)
            out = model.SerializeToString()
            path.write_bytes(mutate_bytes(out, chance) if chance.random() < 0.2 else out)
        found = from_onnx_stages(files, traced, machine)
        assert [op for stage in found.stages for op in stage] == ops

    tried(attempt, AutosplitError)

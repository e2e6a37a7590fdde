"""Parts of native code, in Python and in a C++ driver that is built from the bundle. The compilers take most of the time."""

import os
import random
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from autosplit.backends.inductor import BACKEND
from autosplit.bundling.bundler import write_bundle
from autosplit.bundling.manifest import WEIGHTS, read_manifest
from autosplit.bundling.openbundle import load_bundle
from autosplit.errors import BundleError
from autosplit.tracing.capturing import Traced, trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage

pytestmark = [pytest.mark.skipif(BACKEND.missing() is not None, reason="no C++ compiler"), pytest.mark.timeout(500)]

NUM_CASES = int(os.environ.get("AUTOSPLIT_FUZZ_CASES", "100"))
SANITIZED = "-fsanitize=address,undefined -fno-sanitize-recover=all"
SANITIZER = {
    "ASAN_OPTIONS": "allocator_may_return_null=1:detect_leaks=0",  # libtorch keeps the handles of weights that it does not own
    "UBSAN_OPTIONS": "print_stacktrace=1",
}
ODD = (
    "-1",
    "0",
    "1",
    "3",
    "64",
    "2147483648",
    str(2**40),
    str(2**62),
    str(2**63),
    str(2**64),
    "1.5",
    "x",
    "nan",
    "bool",
    "float64",
    "/",
)


@dataclass(frozen=True)
class Driver:
    """The C++ driver of a bundle, built with sanitizers, and one request for it."""

    program: Path
    inputs: Path
    outputs: Path

    def requests(self, folders: list[Path]) -> list[str]:
        """What the driver says of one request to each bundle, the status last. Fails the test if the driver ends by a fault."""
        lines = "".join(f"{folder} mlp {self.inputs} {self.outputs}\n" for folder in folders)
        environment = {**os.environ, **SANITIZER}
        done = subprocess.run(
            [self.program], input=lines, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, check=False
        )
        said = done.stdout.split("begin\n")[1:]
        assert done.returncode == 0, f"{(folders[len(said) - 1] / 'table.txt').read_text()}\n{said[-1][-4000:]}"
        return said

    def answer(self, like: torch.Tensor) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.outputs.read_bytes()), dtype=torch.float32).view(like.shape)


@pytest.fixture(scope="module")
def traced() -> Traced:
    """Two layers; the weight of the second is a part of a larger tensor."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    net[2].weight = nn.Parameter(torch.randn(400, 256)[100:356] / 16)
    return trace(load_model(net.eval(), inputs=(torch.randn(1, 256),)))


@pytest.fixture(scope="module")
def path(traced: Traced, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of one library."""
    ops = tuple(op.name for op in traced.graph.ops)
    stages = (Stage("first", ops, ("cpu:0",), "inductor"),)
    path = tmp_path_factory.mktemp("native") / "app.asb"
    write_bundle({"mlp": (traced, Plan(Source("mlp"), traced.graph.hash, "", stages, UNKNOWN))}, path)
    return path


@pytest.fixture(scope="module")
def driver(traced: Traced, path: Path, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    """The driver as ``CMakeLists.txt`` in the bundle builds it; it takes many requests, as ``many_requests.h`` says."""
    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    place = tmp_path_factory.mktemp("driver")
    flags = f"-DCMAKE_CXX_FLAGS=-include {Path(__file__).with_name('many_requests.h')} {SANITIZED}"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    configure = ["cmake", "-S", path, "-B", place, prefix, flags, "-DCMAKE_CXX_FLAGS_RELEASE=-O0"]
    subprocess.run(configure, check=True, capture_output=True)
    subprocess.run(["cmake", "--build", place], check=True, capture_output=True)
    (place / "inputs").write_bytes(b"".join(value.numpy().tobytes() for value in traced.example_inputs))
    return Driver(place / "bundle_driver", place / "inputs", place / "outputs")


def test_a_library_takes_its_weights_from_the_bundle(traced: Traced, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = read_manifest(path)
    weights = sum(weight.num_bytes for weight in traced.graph.weights.values())
    assert manifest.files[WEIGHTS].num_bytes < 1.05 * weights
    assert {"bundle.h", "main.cpp", "CMakeLists.txt", "table.txt"} <= set(manifest.files)
    assert b".debug_line" not in (path / "n0p0.so").read_bytes()  # nobody debugs it, and a tenth of its compilation went there
    with pytest.raises(BundleError, match=r"part 'first' of the bundle is native code .* trust=True"):
        load_bundle(path)
    monkeypatch.setenv("PATH", "")  # no compiler is needed any more
    with torch.inference_mode(), load_bundle(path, trust=True) as bundle:
        [found] = bundle.run(traced.example_inputs)
        [wanted] = traced.program(*traced.example_inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def with_table(path: Path, folder: Path, table: str) -> Path:
    """A bundle of the same library and weights with another table."""
    folder.mkdir()
    for name in ("n0p0.so", WEIGHTS):
        (folder / name).symlink_to(path / name)
    (folder / "table.txt").write_text(table)
    return folder


def test_the_table_drives_the_driver_in_cpp(traced: Traced, path: Path, driver: Driver, tmp_path: Path) -> None:
    with torch.inference_mode(), load_bundle(path, trust=True) as bundle:
        [found] = bundle.run(traced.example_inputs)
        [wanted] = traced.program(*traced.example_inputs)
    assert driver.requests([path]) == ["status 0\n"]
    assert torch.equal(driver.answer(wanted), found)

    # With the part in the table twice, the network runs on its own answer.
    lines = (path / "table.txt").read_text().splitlines()
    [made] = [line.partition(" ")[2] for line in lines if line.startswith("makes")]
    [read] = [line.partition(" ")[2] for line in lines if line.startswith("reads")]
    part = lines[next(k for k, line in enumerate(lines) if line.startswith("part")) : -1]
    again = [line.replace(f"makes {made}", "makes twice").replace(f"reads {read}", f"reads {made}") for line in part]
    head = [line.replace(f"output {made}", "output twice") for line in lines[: -len(part) - 1]]
    assert driver.requests([with_table(path, tmp_path / "twice", "\n".join([*head, *part, *again, "end", ""]))]) == ["status 0\n"]
    with torch.inference_mode():
        torch.testing.assert_close(driver.answer(wanted), traced.program(wanted)[0], rtol=1e-4, atol=1e-5)


TOO_LONG = str(2**62)
FAULTS: list[tuple[str, Callable[[list[str]], list[str]], str]] = [
    ("variants", lambda words: ["variants", "4"], "this driver runs networks for requests of one size"),
    ("input", lambda words: [*words[:7], TOO_LONG, words[8]], "part 'n0p0.so' fails: input_handles[0]: unmatched stride value"),
    ("input", lambda words: [*words[:6], TOO_LONG, *words[7:]], "are negative or above 1099511627776 bytes"),
    ("input", lambda words: [*words[:6], "-1", *words[7:]], "are negative or above 1099511627776 bytes"),
    ("input", lambda words: [*words[:6], "0", *words[7:]], "has no elements, and this driver runs no network on such an input"),
    ("input", lambda words: [*words[:6], "8", *words[7:]], "part 'n0p0.so' fails: input_handles[0]: unmatched dim value at 1"),
    ("weight", lambda words: [*words[:3], TOO_LONG, *words[4:]], "lies outside of the weights file"),
    ("weight", lambda words: [*words[:3], "72", *words[4:]], "not on a boundary of 64 bytes"),
    ("weight", lambda words: [*words[:2], "float64", *words[3:]], "has another dtype or fewer bytes"),
    ("weight", lambda words: [*words[:4], "1", "1", "1"], "has another dtype or fewer bytes"),
    ("weight", lambda words: [words[0], "other", *words[2:]], "the table lacks weight"),
    ("part", lambda words: [words[0], "../n0p0.so", "1"], "a library lies outside of the bundle"),
    ("part", lambda words: [*words[:2], "0"], "part 'n0p0.so' has 0 threads"),
    ("reads", lambda words: ["reads", "nothing"], "reads 'nothing', which is not there yet"),
    ("reads", lambda words: [], "0 inputs and 1 outputs, and it has 1 and 1"),
    ("output", lambda words: ["output", "nothing"], "output 'nothing' is not an input, and no part makes it"),
    ("end", lambda words: [], "is truncated"),
]
"""The first word of a line, a change of the words of the first such line, and what the driver says."""


def test_a_table_that_does_not_fit_is_refused_in_a_sentence(path: Path, driver: Driver, tmp_path: Path) -> None:
    folders = []
    for number, (kind, change, _) in enumerate(FAULTS):
        lines = (path / "table.txt").read_text().splitlines()
        first = next(number for number, text in enumerate(lines) if text.startswith(kind))
        lines[first] = " ".join(change(lines[first].split()))
        folders.append(with_table(path, tmp_path / str(number), "\n".join(filter(None, lines)) + "\n"))
    for said, (_, _, message) in zip(driver.requests(folders), FAULTS, strict=True):
        assert message in said and said.endswith("\nstatus 1\n")


def test_a_mutated_table_never_ends_the_driver(path: Path, driver: Driver, tmp_path: Path) -> None:
    table, folders = (path / "table.txt").read_text(), []
    for number in range(NUM_CASES):
        chance = random.Random(number)
        text = table
        for _ in range(chance.choice([1, 1, 2, 4])):
            text = mutated(text, chance)
        folders.append(with_table(path, tmp_path / str(number), text))
    for said in driver.requests(folders):
        assert said == "status 0\n" or (said.endswith("\nstatus 1\n") and "bundle_driver: " in said)


def mutated(table: str, chance: random.Random) -> str:
    """The table with a word replaced or removed, or a line removed, doubled or moved, or cut off."""
    lines = [line.split(" ") for line in table.split("\n")]
    first, second = (chance.randrange(len(lines)) for _ in range(2))
    words = lines[first]
    word = chance.randrange(len(words))
    way = chance.randrange(8)
    if way < 4:
        words[word] = chance.choice(ODD)
    elif way == 4:
        del words[word]
    elif way == 5:
        lines.insert(second, list(words))
    elif way == 6:
        lines[first], lines[second] = lines[second], lines[first]
    else:
        del lines[first]
    return "\n".join(" ".join(line) for line in lines)

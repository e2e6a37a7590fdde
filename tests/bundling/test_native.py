"""Parts of native code, in Python and in a C++ driver that is built from the bundle. The compilers take most of the time."""

import shutil
import subprocess

import pytest
import torch

from autosplit.backends.inductor import BACKEND
from autosplit.bundling.bundler import write_bundle
from autosplit.bundling.manifest import WEIGHTS, read_manifest
from autosplit.bundling.openbundle import load_bundle
from autosplit.errors import BundleError
from autosplit.tracing.capturing import trace
from autosplit.tracing.loading import load_model
from autosplit.values.plan import UNKNOWN, Plan, Source, Stage


@pytest.mark.skipif(BACKEND.missing() is not None, reason="no C++ compiler")
@pytest.mark.timeout(500)
def test_a_library_takes_its_weights_from_the_bundle_in_python_and_in_cpp(tmp_path, monkeypatch):
    traced = trace(load_model("autosplit.examples.mlp:mlp?depth=2&width=256"))
    ops = tuple(op.name for op in traced.graph.ops)
    stages = (Stage("first", ops, ("cpu:0",), "inductor"),)
    path = tmp_path / "app.asb"
    write_bundle({"mlp": (traced, Plan(Source("mlp"), traced.graph.hash, "", stages, UNKNOWN))}, path)
    manifest = read_manifest(path)
    weights = sum(weight.num_bytes for weight in traced.graph.weights.values())
    assert manifest.files[WEIGHTS].num_bytes < 1.05 * weights
    assert {"bundle.h", "main.cpp", "CMakeLists.txt", "table.txt"} <= set(manifest.files)

    with pytest.raises(BundleError, match=r"part 'first' of the bundle is native code .* trust=True"):
        load_bundle(path)
    monkeypatch.setenv("PATH", "")  # no compiler is needed any more
    with torch.inference_mode(), load_bundle(path, trust=True) as bundle:
        [found] = bundle.run(traced.example_inputs)
        [wanted] = traced.program(*traced.example_inputs)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    monkeypatch.undo()

    if shutil.which("cmake") is None:
        pytest.skip("no cmake")
    build, inputs, outputs = tmp_path / "build", tmp_path / "inputs", tmp_path / "outputs"
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    subprocess.run(["cmake", "-S", path, "-B", build, prefix, "-DCMAKE_CXX_FLAGS_RELEASE=-O0"], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build], check=True, capture_output=True)
    inputs.write_bytes(b"".join(value.numpy().tobytes() for value in traced.example_inputs))
    driver = build / "bundle_driver"
    subprocess.run([driver, path, "mlp", inputs, outputs], check=True)
    in_cpp = torch.frombuffer(bytearray(outputs.read_bytes()), dtype=torch.float32).view(wanted.shape)
    assert torch.equal(in_cpp, found)

    # The table drives it: with the part in it twice, the network runs on its own answer.
    table = path / "table.txt"
    lines = table.read_text().splitlines()
    [made] = [line.partition(" ")[2] for line in lines if line.startswith("makes")]
    [read] = [line.partition(" ")[2] for line in lines if line.startswith("reads")]
    part = lines[next(k for k, line in enumerate(lines) if line.startswith("part")) : -1]
    again = [line.replace(f"makes {made}", "makes twice").replace(f"reads {read}", f"reads {made}") for line in part]
    head = [line.replace(f"output {made}", "output twice") for line in lines[: -len(part) - 1]]
    table.write_text("\n".join([*head, *part, *again, "end", ""]))
    subprocess.run([driver, path, "mlp", inputs, outputs], check=True)
    twice = torch.frombuffer(bytearray(outputs.read_bytes()), dtype=torch.float32).view(wanted.shape)
    with torch.inference_mode():
        torch.testing.assert_close(twice, traced.program(wanted)[0], rtol=1e-4, atol=1e-5)
    table.write_text(table.read_text()[:-5])
    done = subprocess.run([driver, path, "mlp", inputs, outputs], check=False, capture_output=True, text=True)
    assert (done.returncode, "is truncated" in done.stderr) == (1, True)

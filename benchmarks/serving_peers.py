"""Other servers of one ONNX file, for ``benchmarks.serving``; runs in an environment of its own, without autosplit.

python benchmarks/serving_peers.py echo PORT | ray PORT MODEL.onnx WORKERS | mlserver PORT MODEL.onnx WORKERS FOLDER
"""

import json
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from typing import Any


def session_of(path: str) -> Any:
    """The file in ONNX Runtime on one core; each server has several workers."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def answer(session: Any, body: bytes, json_bytes: int) -> tuple[bytes, int]:
    """The answer of the Open Inference Protocol to a request with binary tensors, and its bytes of JSON."""
    import numpy

    kinds = {"FP32": numpy.float32, "INT64": numpy.int64}
    feeds, end = {}, json_bytes
    for known, row in zip(session.get_inputs(), json.loads(body[:json_bytes])["inputs"], strict=True):
        begin, end = end, end + row["parameters"]["binary_data_size"]
        feeds[known.name] = numpy.frombuffer(body[begin:end], kinds[row["datatype"]]).reshape(row["shape"])
    outputs = session.run(None, feeds)
    rows = [
        {"name": known.name, "datatype": "FP32", "shape": value.shape, "parameters": {"binary_data_size": value.nbytes}}
        for known, value in zip(session.get_outputs(), outputs, strict=True)
    ]
    text = json.dumps({"model_name": "model", "outputs": rows}).encode()
    return b"".join([text, *(value.tobytes() for value in outputs)]), len(text)


def echo(port: int) -> None:
    """Starlette and uvicorn alone: the body comes back."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    async def infer(request: Request) -> Response:
        return Response(await request.body(), media_type="application/octet-stream")

    routes = [Route("/v2/models/{model}/infer", infer, methods=["POST"])]
    uvicorn.run(Starlette(routes=routes), port=port, log_config=None, access_log=False, lifespan="off", ws="none")


def ray(port: int, path: str, num_workers: int) -> None:
    """Ray Serve with a replica on each core."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # else Ray writes one to the home folder
    from ray import init, serve
    from starlette.requests import Request
    from starlette.responses import Response

    class Model:
        """One replica."""

        def __init__(self) -> None:
            self.session = session_of(path)

        async def __call__(self, request: Request) -> Response:
            length = int(request.headers.get("inference-header-content-length", "0"))
            if not length:
                return Response("ready")
            content, json_bytes = answer(self.session, await request.body(), length)
            return Response(content, headers={"inference-header-content-length": str(json_bytes)})

    init(num_cpus=num_workers, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    options = {"num_cpus": 1}
    serve.run(serve.deployment(Model, num_replicas=num_workers, max_ongoing_requests=64, ray_actor_options=options).bind())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    try:
        time.sleep(1e6)
    finally:
        serve.shutdown()


def mlserver(port: int, path: str, num_workers: int, folder: str) -> None:
    """MLServer with a custom runtime in worker processes."""
    about = {"name": "model", "implementation": "serving_mlserver.OnnxModel", "parameters": {"uri": path}}
    settings = {"host": "127.0.0.1", "http_port": port, "grpc_port": port + 1, "metrics_port": port + 2}
    Path(folder, "model-settings.json").write_text(json.dumps(about))
    Path(folder, "settings.json").write_text(json.dumps({**settings, "parallel_workers": num_workers, "debug": False}))
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    os.chdir(folder)  # it writes there
    os.execv(sys.executable, [sys.executable, "-m", "mlserver.cli.main", "start", folder])


if __name__ == "__main__":
    kind, number, *more = sys.argv[1:]
    if kind == "echo":
        echo(int(number))
    elif kind == "ray":
        ray(int(number), more[0], int(more[1]))
    else:
        mlserver(int(number), more[0], int(more[1]), more[2])

"""Serves a model that was split into stages, one deployment for each. Needs ray[serve], numpy and onnxruntime.

    serve run serve_config.yaml                   # in the folder that this file lies in

A request is JSON from each input's name to nested lists, the answer from each output's name to nested lists.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent


def _table() -> Any:
    return json.loads((FOLDER / "stages.json").read_text())


class Stage:
    """One stage, as a session of ONNX Runtime."""

    def __init__(self, number: int) -> None:
        import onnxruntime

        self.entry = _table()["stages"][number]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = self.entry["threads"]
        self.session = onnxruntime.InferenceSession(str(FOLDER / self.entry["file"]), options)

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """The outputs of the stage for its inputs, by name."""
        made = self.session.run(self.entry["outputs"], values)
        return dict(zip(self.entry["outputs"], made, strict=True))


class Ingress:
    """Takes a request over HTTP and hands each stage the values that it reads."""

    def __init__(self, *stages: Any) -> None:
        self.stages, self.table = stages, _table()

    async def __call__(self, request: Any) -> dict[str, Any]:
        """The outputs of one request, by name."""
        given = await request.json()
        values = {name: np.asarray(given[name], dtype) for name, dtype in self.table["inputs"].items()}
        for stage, entry in zip(self.stages, self.table["stages"], strict=True):
            values |= await stage.run.remote({name: values[name] for name in entry["inputs"]})
        return {name: values[name].tolist() for name in self.table["outputs"]}


def build(arguments: dict[str, str]) -> Any:
    """The app: the ingress with a handle of each stage. ``arguments`` are those of the config file, and none are known."""
    from ray import serve

    stages = [serve.deployment(Stage, name=entry["name"]).bind(number) for number, entry in enumerate(_table()["stages"])]
    return serve.deployment(Ingress, name="ingress").bind(*stages)

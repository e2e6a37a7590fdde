"""Serves a model that was split into stages, one deployment for each. Needs ray[serve], numpy and onnxruntime.

    serve run serve_config.yaml                   # in the folder that this file lies in

A request is JSON from each input's name to nested lists, the answer from each output's name to nested lists.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).resolve().parent


def _manifest() -> Any:
    return json.loads((FOLDER / "manifest.json").read_text())


class Stage:
    """One stage: it takes the values so far and adds its own."""

    def __init__(self, number: int) -> None:
        from loader import Stage as Session  # type: ignore[import-not-found]  # loader.py lies beside this file

        threads = json.loads((FOLDER / "threads.json").read_text())
        self.session = Session(FOLDER, _manifest()["stages"][number], threads[number])

    def run(self, values: dict[str, Any]) -> dict[str, Any]:
        """The values after this stage; what no later stage reads is dropped."""
        values = dict(values)
        self.session.run(values)
        return values


class Ingress:
    """Takes a request over HTTP and sends its values through the stages."""

    def __init__(self, *stages: Any) -> None:
        self.stages, self.manifest = stages, _manifest()

    async def __call__(self, request: Any) -> dict[str, Any]:
        """The outputs of one request, by name."""
        given = await request.json()
        values = {spec["name"]: np.asarray(given[spec["name"]], spec["dtype"]) for spec in self.manifest["inputs"]}
        for stage in self.stages:
            values = await stage.run.remote(values)
        return {spec["name"]: values[spec["name"]].tolist() for spec in self.manifest["outputs"]}


def build(arguments: dict[str, str]) -> Any:
    """The app: the ingress with a handle of each stage. ``arguments`` are those of the config file, and none are known."""
    from ray import serve

    stages = [serve.deployment(Stage, name=entry["name"]).bind(number) for number, entry in enumerate(_manifest()["stages"])]
    return serve.deployment(Ingress, name="ingress").bind(*stages)

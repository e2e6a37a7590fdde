"""Serve plans to other programs over HTTP."""

import json
import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from autosplit.commands.console import LogLines, err
from autosplit.commands.options import Output, Profiles, seconds
from autosplit.errors import MissingExtraError, UsageError
from autosplit.preloading import settle
from autosplit.progress import bars
from autosplit.values.machine import parse_bytes
from autosplit.webservice.limits import ServerLimits

LIMITS = ServerLimits()


@dataclass(frozen=True, kw_only=True)
class Limited(Output):
    """Limits."""

    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = f"{LIMITS.body_bytes >> 20}MiB"
    queue_time: Annotated[str, typer.Option(help="How long a request waits for a place in the queue, else status 429.")] = (
        f"{LIMITS.queue_s:g}s"
    )
    request_time: Annotated[str, typer.Option(help="How long a request may take, else status 504.")] = f"{LIMITS.request_s:g}s"
    connections: Annotated[int, typer.Option(min=1, help="Most connections at a time.")] = LIMITS.connections
    drain_time: Annotated[str, typer.Option(help="How long requests may go on after SIGTERM.")] = f"{LIMITS.drain_s:g}s"


@dataclass(frozen=True, kw_only=True)
class Serve(Limited):
    """What to serve, and where."""

    plans: Annotated[list[str] | None, typer.Argument(help="plan.yaml, or NAME=plan.yaml; a model is named as its file.")] = None
    repository: Annotated[
        Path | None, typer.Option(help="Folder of further plans, which callers may load and unload by name.")
    ] = None
    model: Annotated[
        list[str] | None,
        typer.Option(help="A model in code of your own, which plans name: naming it says that you trust it. May be repeated."),
    ] = None
    devices: Annotated[
        str | None,
        typer.Option(help="cpu:0-7,cuda:0: if one of them is lost, a plan goes on with the others, by its stored profile."),
    ] = None
    profiles: Profiles = None
    host: Annotated[str, typer.Option(help="Interface to listen on; others than loopback let other machines in.")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 for a free one.")] = 8000
    token_file: Annotated[Path | None, typer.Option(help="File of the token that callers must name.")] = None
    certificate: Annotated[Path | None, typer.Option(help="File of a TLS certificate with its chain.")] = None
    key: Annotated[Path | None, typer.Option(help="File of the certificate's private key.")] = None


def serve(given: Serve) -> None:
    """Serve plans by the Open Inference Protocol, and generators by OpenAI's interface, over HTTP until Ctrl-C or SIGTERM."""
    plans = _named(given.plans or [])
    if not plans and given.repository is None:
        raise UsageError("name a plan to serve, or --repository FOLDER with plans that callers may load")
    if (given.certificate is None) != (given.key is None):
        raise UsageError("--certificate and --key belong together; give both, or neither")
    token = read_token(given.token_file)
    try:
        from autosplit.webservice.application import Application
        from autosplit.webservice.repository import Repository
        from autosplit.webservice.server import WebServer
    except ModuleNotFoundError as failure:
        raise MissingExtraError(f"serving needs '{failure.name}'; install it: pip install 'autosplit[serve]'") from None
    from autosplit.serving.hostmanager import HostManager

    limits = ServerLimits(
        body_bytes=parse_bytes(given.max_body),
        queue_s=seconds(given.queue_time),
        request_s=seconds(given.request_time),
        connections=given.connections,
        drain_s=seconds(given.drain_time),
    )
    with ExitStack() as opened:
        host = opened.enter_context(HostManager())
        repository = Repository(host, plans, given.repository, given.model or [], given.devices, given.store)
        opened.callback(repository.close)

        def started() -> None:
            about = {"url": server.url, "models": sorted(plans)}
            text = f"serving {', '.join(plans) or 'no model yet'} at {server.url}"
            print(json.dumps(about) if given.json else text, flush=True)

        place: dict[str, Any] = {name: getattr(given, name) for name in ("host", "port", "certificate", "key")}
        server = WebServer(Application(host, repository, limits, token), started, **place)  # a port in use is known at once
        opened.callback(server.close)
        with bars(err) as progress:
            for number, name in enumerate(plans):
                progress("load", number / len(plans), f"loading model '{name}'")
                repository.load(name).result()
        settle()  # of the models and their traces, which were loaded for the stages alone
        requests = logging.getLogger("autosplit.webservice")
        requests.addHandler(LogLines())
        requests.setLevel(logging.INFO if given.verbose else logging.WARNING)
        server.serve()


def _named(texts: list[str]) -> dict[str, Path]:
    """Name to plan file. Raises: UsageError: two have one name."""
    plans: dict[str, Path] = {}
    for text in texts:
        name, equals, path = text.rpartition("=")
        name = name if equals else Path(path).stem
        if name in plans:
            raise UsageError(f"two models are named '{name}'; name each, as in first={plans[name]} second={path}")
        plans[name] = Path(path)
    return plans


def read_token(path: Path | None) -> str:
    """The token in a file, '' without a file. Raises: UsageError: it is empty. OSError: the file cannot be read."""
    if path is None:
        return ""
    token = path.read_text(encoding="utf-8", errors="replace").strip()
    if not token or not token.isprintable() or "\N{REPLACEMENT CHARACTER}" in token:
        raise UsageError(f"file '{path}' holds no token: one line of text is needed")
    return token

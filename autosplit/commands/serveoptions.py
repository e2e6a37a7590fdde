"""The options of ``autosplit serve``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from autosplit.commands.options import Output, Profiles
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


@dataclass(frozen=True, kw_only=True)
class Bench(Output):
    """What to load, and how much."""

    url: Annotated[str, typer.Argument(help="A server of the Open Inference Protocol, such as http://127.0.0.1:8000.")]
    model: Annotated[str, typer.Argument(help="One of its models; default: the only one.")] = ""
    rate: Annotated[
        str | None, typer.Option(help="Requests a second that come by chance; several with commas between, one after the other.")
    ] = None
    in_flight: Annotated[
        int | None, typer.Option(min=1, max=10_000, help="Instead: so many callers, each of which waits for its answer.")
    ] = None
    time: Annotated[str, typer.Option(help="How long each load lasts.")] = "10s"
    plan: Annotated[Path | None, typer.Option(help="The plan.yaml of the model: also show what it predicts for each rate.")] = (
        None
    )
    picture: Annotated[Path | None, typer.Option(help="Draw latency against rate as SVG.")] = None
    token_file: Annotated[Path | None, typer.Option(help="File of the server's token.")] = None

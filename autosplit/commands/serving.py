"""Serve plans to other programs over HTTP."""

import json
import logging
from contextlib import ExitStack
from pathlib import Path

from autosplit.commands.console import LogLines, err
from autosplit.commands.options import seconds
from autosplit.commands.serveoptions import Serve
from autosplit.errors import MissingExtraError, UsageError
from autosplit.progress import bars
from autosplit.values.machine import parse_bytes


def serve(given: Serve) -> None:
    """Serve plans by the Open Inference Protocol, and generators by OpenAI's interface, over HTTP until Ctrl-C or SIGTERM."""
    plans = _named(given.plans or [])
    if not plans and given.repository is None:
        raise UsageError("name a plan to serve, or --repository FOLDER with plans that callers may load")
    if (given.certificate is None) != (given.key is None):
        raise UsageError("--certificate and --key belong together")
    token = read_token(given.token_file)
    try:
        from autosplit.webservice.application import Application
        from autosplit.webservice.repository import Repository
        from autosplit.webservice.server import Address, WebServer
    except ModuleNotFoundError as failure:
        raise MissingExtraError(f"serving needs '{failure.name}'; install it: pip install 'autosplit[serve]'") from None
    from autosplit.serving.hostmanager import HostManager
    from autosplit.webservice.limits import ServerLimits

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
        with bars(err) as progress:
            for number, name in enumerate(plans):
                progress("load", number / len(plans), f"loading model '{name}'")
                repository.load(name).result()
        requests = logging.getLogger("autosplit.webservice")
        requests.addHandler(LogLines())
        requests.setLevel(logging.INFO if given.verbose else logging.WARNING)

        def started() -> None:
            about = {"url": server.url, "models": sorted(plans)}
            text = f"serving {', '.join(plans) or 'no model yet'} at {server.url}"
            print(json.dumps(about) if given.json else text, flush=True)

        address = Address(given.host, given.port, given.certificate, given.key)
        server = WebServer(Application(host, repository, limits, token), address, started)
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

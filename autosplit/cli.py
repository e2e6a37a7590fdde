"""The command line. Errors become one message and an exit code. stdout carries the result, stderr all else."""

import contextlib
import functools
import gc
import json
import logging
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from autosplit.commands import flagfaults, flags
from autosplit.commands.benching import bench
from autosplit.commands.bundles import bundle
from autosplit.commands.console import LogLines, answered, say, show
from autosplit.commands.evaluating import evaluate
from autosplit.commands.generating import generate
from autosplit.commands.measuring import devices, profile
from autosplit.commands.placing import annotate, memory
from autosplit.commands.reasons import is_expected, reason, require_address_space
from autosplit.commands.running import auto, export, report, run
from autosplit.commands.searching import search
from autosplit.commands.serving import serve
from autosplit.commands.shorthelp import Command, write_commands
from autosplit.commands.watching import status
from autosplit.errors import AutosplitError, is_interrupt
from autosplit.progress import stopped
from autosplit.versions import version_of

MOST_FILES = 1 << 16
"""Descriptors that a command asks for. Each pair of workers that exchange tensors takes three, and shells often allow 1024."""


class _Commands(TyperGroup):
    """The commands; a flag that cannot be parsed is JSON too with ``--json``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Keep whether the result is asked for as JSON: a command line with a fault has no options value."""
        ctx.obj = "--json" in args
        answered.clear()
        return super().parse_args(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the commands and the flags of the program."""
        write_commands(self, ctx, formatter)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; click shows a wrong command line on stderr, and ``main`` a failure that no command expects."""
        try:
            return super().invoke(ctx)
        except Exception as failure:
            if ctx.obj and not answered.is_set() and not isinstance(failure, typer.Exit | typer.Abort):
                message = getattr(failure, "format_message", None)
                name, said = (type(failure).__name__, reason(failure)) if message is None else ("UsageError", message())
                print(json.dumps({"error": name, "message": said}, indent=1))
            raise


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)

BEGAN_S = time.monotonic()
SILENT_S = 1.0
"""Ctrl-C within the first second ends without a message, because nothing was measured yet."""


def _guarded(function: Callable[[Any], None]) -> Callable[[Any], None]:
    """The command with its errors as one message on stderr, and as JSON with --json. The exit code is 1, or 130 after Ctrl-C."""

    @functools.wraps(function)
    def guarded(given: Any) -> None:
        try:
            require_address_space()
            flagfaults.verify(given)
            function(given)
        except (Exception, KeyboardInterrupt) as failure:
            interrupt = stopped.is_set() or is_interrupt(failure)  # an import that is interrupted may raise ImportError
            if not interrupt and not is_expected(failure):
                raise
            if given.verbose and not interrupt:
                say(traceback.format_exc().rstrip())
            said = "stopped; what was measured is kept, and no worker is left" if interrupt else reason(failure)
            if not interrupt or time.monotonic() - BEGAN_S > SILENT_S:
                say(f"autosplit: {said}")
            if given.json and not answered.is_set():
                with contextlib.suppress(OSError):
                    show(given, {"error": "stopped" if interrupt else type(failure).__name__, "message": said})
            raise typer.Exit(130 if interrupt else 1) from None

    return guarded


def _version(asked: bool) -> None:
    """The callback of ``--version``."""
    if asked:
        print(f"autosplit {version_of('autosplit') or 'of a checkout'} with torch {version_of('torch')}")
        raise typer.Exit


@app.callback()
def _app(
    show_version: Annotated[bool, typer.Option("--version", is_eager=True, callback=_version, help="Show the version.")] = False,
) -> None:
    """Split a PyTorch model over the devices of a machine, prove the plan, run it, and show measured beside predicted."""


for command in (
    devices,
    profile,
    search,
    evaluate,
    run,
    auto,
    generate,
    annotate,
    memory,
    report,
    export,
    bundle,
    serve,
    bench,
    status,
):
    app.command(command.__name__, cls=Command)(flags.command(_guarded(command)))


class _Stop(KeyboardInterrupt):
    """Python ends by SIGINT, without our exit code, once a KeyboardInterrupt itself left a string that was executed."""


def _stop(number: int, frame: Any) -> None:
    """Unwind after Ctrl-C, SIGTERM or a closed terminal, so that workers end and files are removed."""
    stopped.set()
    raise _Stop


def _ignored(failure: Any) -> None:
    """Ignore a KeyboardInterrupt raised while an object was freed: Python drops it, and the next step raises it again."""
    if not issubclass(failure.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(failure)


def main() -> None:
    """Entry point: exit code 0 only when all went well and the outputs matched."""
    sys.unraisablehook = _ignored
    logging.lastResort = LogLines(logging.WARNING)
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(allowed, min(most, MOST_FILES)), most))
    signal.signal(signal.SIGTERM, _stop)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a shell sets this for commands in the background
        signal.signal(signal.SIGINT, _stop)
    try:
        app()
    except AutosplitError as failure:
        say(f"autosplit: {reason(failure)}")
        sys.exit(1)
    except Exception:
        say(traceback.format_exc().rstrip())
        sys.exit(1)
    except KeyboardInterrupt:  # before the command began, so that there is nothing to say
        sys.exit(130)
    finally:
        gc.freeze()  # else the interpreter walks all objects of torch as it ends, which takes seconds on a busy machine


if __name__ == "__main__":
    main()

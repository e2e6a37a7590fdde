"""Entry point of the command: Ctrl-C while modules are still being imported ends it without a traceback."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path:
    # ``python -m`` puts the current folder first, whose modules would run in place of Python's own. Nothing may be loaded before.
    try:
        here = os.getcwd()  # noqa: PTH109
    except FileNotFoundError:  # it was removed
        here = ""
    if sys.path[0] in ("", here):
        del sys.path[0]

import signal


def main() -> None:
    """Import and run the command line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # nothing was begun that must be cleaned up
    from autosplit import cli

    cli.main()


if __name__ == "__main__":
    main()

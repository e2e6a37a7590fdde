"""Output is held back while stages are converted, and comes back."""

import logging
import sys
import threading
import warnings

import pytest

from autosplit.backends.quiet import LOGGERS, quiet


def test_blocks_of_two_threads_that_overlap_give_stdout_back() -> None:
    """The README's script printed nothing: its stdout was the buffer of a thread that had exported a stage."""
    before, filters = sys.stdout, list(warnings.filters)
    entered, leave = threading.Event(), threading.Event()

    def convert() -> None:
        with quiet():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=convert)
    thread.start()
    assert entered.wait(10)
    with quiet():  # opens after the other and closes before it, and once more the other way round
        pass
    block = quiet()
    block.__enter__()
    leave.set()
    thread.join()
    assert sys.stdout is not before
    block.__exit__(None, None, None)
    assert sys.stdout is before and list(warnings.filters) == filters


def test_an_exception_passes_and_levels_come_back(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger(LOGGERS[0])
    level = logger.level
    with pytest.raises(ValueError, match="as it is"), quiet():
        print("held back")
        assert logger.level == logging.ERROR
        raise ValueError("as it is")
    print("shown")
    assert logger.level == level and capsys.readouterr().out == "shown\n"

"""Errors as a status of HTTP and a sentence."""

from starlette.exceptions import HTTPException

from autosplit.errors import (
    AutosplitError,
    DeadlineError,
    DeviceError,
    InfeasibleError,
    PlanError,
    RefusedError,
    UsageError,
)

RETRY_S = "1"
"""Seconds after which a refused request may be tried again."""


def as_http(failure: BaseException, *, loading: bool = False) -> HTTPException:
    """The status and the sentence of an error.

    A stage's error is told without the worker's traceback, which is in the log.

    Args:
        failure: the error of a request, or of a call to load a model.
        loading: whether a model was to be loaded: its plan is the caller's then.
    """
    if isinstance(failure, HTTPException):
        return failure
    text = str(failure).partition("\nThe traceback follows.")[0]
    if isinstance(failure, RefusedError):
        return HTTPException(429, text, {"retry-after": RETRY_S})
    if isinstance(failure, DeadlineError):
        return HTTPException(504, text)
    if isinstance(failure, UsageError) or (loading and isinstance(failure, (PlanError, DeviceError, InfeasibleError))):
        return HTTPException(400, text)
    if isinstance(failure, (AutosplitError, OSError, MemoryError)):
        return HTTPException(500, text or type(failure).__name__)
    return HTTPException(500, f"{type(failure).__name__}: {text}"[:1000])

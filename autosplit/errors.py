"""The exceptions that autosplit raises on purpose, and helpers that word their messages.

Each exception carries a single string, so it survives pickling from a worker.
"""

import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, TypeVar

T = TypeVar("T")

SHOWN_FAULTS, MAX_FAULT = 20, 1000


class _Brief(reprlib.Repr):
    """``repr`` of a value for a message: few items of a list, and of a tensor or an array only its dtype and shape."""

    def repr_instance(self, x: Any, level: int) -> str:
        """A value of a type that has no rule of its own; numbers of a tensor may be private, and are many."""
        if hasattr(x, "shape") and hasattr(x, "dtype"):
            dtype = str(x.dtype).removeprefix("torch.")
            return f"{type(x).__name__} {dtype}[{','.join(map(str, x.shape))}]"
        try:
            text = repr(x)
        except Exception:
            text = "tensor("
        return f"<{type(x).__name__}>" if "tensor(" in text or "array(" in text else text

    repr_array = repr_instance


BRIEF = _Brief()
"""``BRIEF.repr(value)`` is the text of a value in a message. It may be long: cut it."""
BRIEF.maxlevel, BRIEF.maxlist, BRIEF.maxtuple, BRIEF.maxdict, BRIEF.maxstring, BRIEF.maxlong = 2, 4, 4, 4, 60, 60


class AutosplitError(Exception):
    """Base class. A message names the failure, the value and the limit with units, and the way out."""


class UsageError(AutosplitError, ValueError):
    """An argument, an option or a file written by the user is wrong."""


class MissingExtraError(AutosplitError, ImportError):
    """An optional package is not installed; the message names the feature that needs it and the pip command."""


class ModelError(AutosplitError):
    """A model cannot be loaded, its example inputs do not fit it, or its requests cannot be cut into microbatches."""


class ModelCodeError(ModelError):
    """The code that makes a model failed: the function of a spec, or a class of transformers."""


class TraceError(AutosplitError):
    """The model cannot be captured as one graph."""


class GraphError(AutosplitError):
    """A graph does not verify."""


class DeviceError(AutosplitError, ValueError):
    """A device is unknown, overlaps another one, or cannot be used."""


class ProfileError(AutosplitError):
    """A profile is truncated, of another model, or lacks a measurement."""


class PlanError(AutosplitError):
    """A plan does not fit its graph, its machine or its profile."""


class BundleError(AutosplitError):
    """A bundle is truncated, edited, of another version, or needs something that the loading process does not have or allow."""


class InfeasibleError(AutosplitError):
    """No plan meets the constraints; the message names those that cannot hold together.

    The message reads ``no plan fits: these cannot hold together: ONE; ANOTHER. The way out.``, or says that no plan was found in
    time.

    >>> InfeasibleError("no plan fits: these cannot hold together: 'a' holds 1 B; 2 stages are asked for. Drop one.").conflict
    ("'a' holds 1 B", '2 stages are asked for')
    """

    @property
    def conflict(self) -> tuple[str, ...]:
        """The demands that cannot hold together, in words; empty if it was not proved that there is no plan."""
        kind, _, rest = str(self).partition("no plan fits: ")
        if kind or not rest:
            return ()
        return tuple(rest.removeprefix("these cannot hold together: ").rsplit(". ", 1)[0].split("; "))


class BackendError(AutosplitError):
    """A backend cannot take a stage, or gave wrong numbers.

    ``refused`` maps op names to reasons, where they are known. ``backend`` failed on a stage of a plan, on the device ``where``;
    '' if they are not known. ``device`` is the one that cannot be opened, if that is why.
    """

    def __init__(
        self,
        message: str = "",
        refused: Mapping[str, str] | None = None,
        backend: str = "",
        device: str = "",
        where: str = "",
    ) -> None:
        super().__init__(message)
        self.refused = dict(refused or {})
        self.backend, self.device, self.where = backend, device, where


class StageError(AutosplitError):
    """A request failed inside a stage: stage, op and the worker's own traceback."""


class WorkerError(AutosplitError):
    """A worker process died, failed or stopped answering.

    ``backend``: the one that it loaded or ran a stage on, on the device ``where``; '' if they are not known.
    """

    def __init__(self, message: str = "", backend: str = "", where: str = "") -> None:
        super().__init__(message)
        self.backend, self.where = backend, where


class HungError(WorkerError):
    """A worker process did not answer within its time limit."""


class RefusedError(AutosplitError):
    """A request was not taken: the queue is full, or the pipeline or network is closed."""


class DeadlineError(AutosplitError, TimeoutError):
    """A request was not done by its deadline."""


def raise_faults(error: type[AutosplitError], subject: str, faults: Sequence[str]) -> None:
    """Raise ``error`` with every fault as a bullet, or return when there is none.

    >>> raise_faults(PlanError, "plan does not fit graph 'mlp'", [])
    >>> raise_faults(PlanError, "plan does not fit graph 'mlp'", ["op 'fc' is on no stage"])
    Traceback (most recent call last):
        ...
    autosplit.errors.PlanError: plan does not fit graph 'mlp' (1 fault):
      * op 'fc' is on no stage
    """
    if not faults:
        return
    noun = "fault" if len(faults) == 1 else "faults"
    shown = [f"  * {fault if len(fault) <= MAX_FAULT else f'{fault[:MAX_FAULT]}…'}" for fault in faults[:SHOWN_FAULTS]]
    if len(faults) > SHOWN_FAULTS:
        shown.append(f"  * and {len(faults) - SHOWN_FAULTS} more")
    raise error("\n".join([f"{subject} ({len(faults)} {noun}):", *shown]))


def one_line(failure: BaseException) -> str:
    """The message of a failure on one line, cut; its class without a message.

    >>> one_line(ValueError("no kernel\\nfor this"))
    'no kernel for this'
    """
    return " ".join(str(failure).split())[:300] or type(failure).__name__


def close_names(name: str, names: Iterable[str]) -> str:
    """The end of a message about an unknown name: up to three of ``names`` that resemble it, or ''.

    >>> close_names("bugdet", ["budget", "stages"])
    "; close names: 'budget'"
    """
    close = ", ".join(f"'{close}'" for close in get_close_matches(name, list(names)))
    return f"; close names: {close}" if close else ""


def listed(subject: str, values: Iterable[T], kind: type[T], way_out: str = "") -> tuple[T, ...]:
    """The values as a tuple. Raises: UsageError: they are not a list of ``kind``. A string is refused: it is a list of letters.

    >>> listed("backends", ["eager"], str)
    ('eager',)
    >>> listed("backends", "eager", str)
    Traceback (most recent call last):
        ...
    autosplit.errors.UsageError: backends must be a list of str, in brackets, but is 'eager'
    """
    is_list = isinstance(values, Iterable) and not isinstance(values, str)
    found = tuple(values) if is_list else ()
    if not is_list or not all(isinstance(value, kind) for value in found):
        raise UsageError(f"{subject} must be a list of {kind.__name__}, in brackets, but is {BRIEF.repr(values)}{way_out}")
    return found


def names(subject: str, values: str | Iterable[str]) -> tuple[str, ...]:
    """Names that are given as a list, or as one text with commas between. Raises: UsageError: they are neither.

    >>> names("backends", "eager, openvino"), names("devices", ["cpu:0", "cpu:1"])
    (('eager', 'openvino'), ('cpu:0', 'cpu:1'))
    """
    texts = values.split(",") if isinstance(values, str) else listed(subject, values, str)
    return tuple(text.strip() for text in texts if text.strip())


def each(subject: str, parse: Callable[[str], T], texts: Iterable[str]) -> list[T]:
    """The result of ``parse`` for each text. Raises: the error of ``parse``; for several texts, its class with every fault.

    >>> each("these are no numbers", int, ["1", "2"])
    [1, 2]
    """
    made, failures = [], []
    for text in texts:
        try:
            made.append(parse(text))
        except AutosplitError as failure:
            failures.append(failure)
    if len(failures) == 1:
        raise failures[0]
    raise_faults(type(failures[0]) if failures else AutosplitError, subject, [str(failure) for failure in failures])
    return made


def refusals(refused: Mapping[str, str]) -> str:
    """The first five ops that a backend refuses, with the reasons, and the number of the others.

    >>> refusals({"relu": "no rule", "tanh": "no rule"}), refusals(dict.fromkeys("abcdefg", "r"))
    ("op 'relu' (no rule), 'tanh' (no rule)", "op 'a' (r), 'b' (r), 'c' (r), 'd' (r), 'e' (r) and 2 more")
    """
    named = ", ".join(f"'{op}' ({reason})" for op, reason in list(refused.items())[:5])
    return f"op {named}" + (f" and {len(refused) - 5} more" if len(refused) > 5 else "")


def is_interrupt(failure: BaseException | None) -> bool:
    """Whether Ctrl-C caused an error, also where Python replaced the KeyboardInterrupt by another error.

    Python before 3.12 raises a RuntimeError while it creates a class, and numba raises a SystemError.

    >>> failure = RuntimeError("Error calling __set_name__")
    >>> failure.__cause__ = KeyboardInterrupt()
    >>> is_interrupt(failure), is_interrupt(RuntimeError())
    (True, False)
    """
    while failure is not None and not isinstance(failure, KeyboardInterrupt):
        failure = failure.__cause__
    return failure is not None

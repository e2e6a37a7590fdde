import pickle

import pytest

from autosplit import errors
from autosplit.errors import AutosplitError, PlanError, raise_faults

CLASSES = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, AutosplitError)]


@pytest.mark.parametrize("error", CLASSES)
def test_every_error_crosses_a_process_with_its_message(error) -> None:
    again = pickle.loads(pickle.dumps(error("op 'fc' does not fit")))
    assert type(again) is error and str(again) == "op 'fc' does not fit" and error.__doc__


def test_builtin_parents_let_callers_catch_what_they_know() -> None:
    assert issubclass(errors.UsageError, ValueError) and issubclass(errors.MissingExtraError, ImportError)


def test_all_faults_are_listed_up_to_twenty() -> None:
    raise_faults(PlanError, "plan", [])
    with pytest.raises(PlanError, match=r"(?s)plan \(2 faults\):\n  \* one\n  \* two$"):
        raise_faults(PlanError, "plan", ["one", "two"])
    with pytest.raises(PlanError, match=r"(?s)\(25 faults\).*fault 19\n  \* and 5 more$"):
        raise_faults(PlanError, "plan", [f"fault {i}" for i in range(25)])

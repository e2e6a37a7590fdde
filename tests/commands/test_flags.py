"""A flag counts as given wherever it was given, also with the text of its default."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, get_args, get_type_hints

import pytest
import typer
from typer.testing import CliRunner

from autosplit import cli
from autosplit.commands.flags import command
from autosplit.commands.options import PLANNER_TIME, MeasuredModel, Output, Plans
from autosplit.commands.running import Run
from autosplit.commands.shorthelp import Command
from autosplit.errors import UsageError
from autosplit.values.samples import Precision

T = TypeVar("T")


def answer_of(ask: Callable[[Plans], T], *words: str) -> T:
    """The answer of ``ask`` inside a command that was called with these words."""
    answers: list[T] = []

    def search(given: Plans) -> None:
        answers.append(ask(given))

    app = typer.Typer()
    app.command(cls=Command)(command(search))
    CliRunner().invoke(app, ["model", *words], catch_exceptions=False)
    return answers[0]


def test_a_time_limit_with_the_text_of_its_default_is_a_limit(tmp_path: Path) -> None:
    """It was taken for no limit, so that with ``--budget 0s`` the planner stopped after 1 s."""
    options = tmp_path / "options.yaml"
    options.write_text(f"time-limit: {PLANNER_TIME}\n")

    def limit(*words: str) -> float | None:
        return answer_of(lambda given: given.spending().planner_s, "--budget", "0s", *words)

    assert limit() is None
    assert limit("--time-limit", PLANNER_TIME) == limit("--config", str(options)) == 10.0


def test_a_list_may_be_given_in_parts() -> None:
    """The last part was taken for the whole: a cap or a backend was lost without a word."""
    words = [
        "--memory",
        "cpu:0=1GB",
        "--devices",
        "cpu:0,cpu:1",
        "--memory=cpu:1=2GB",
        "--backend",
        "eager",
        "--backend",
        "openvino",
    ]
    found = answer_of(lambda given: (given.memory, given.devices, given.backend), *words)
    assert found == ("cpu:0=1GB,cpu:1=2GB", "cpu:0,cpu:1", "eager,openvino")
    assert answer_of(lambda given: given.memory, "--memory", "1GB") == "1GB"


def test_any_sets_are_a_demand_on_the_plan() -> None:
    assert answer_of(lambda given: given.constraints().contiguous)
    assert not answer_of(lambda given: given.constraints().contiguous, "--any-sets")


@pytest.mark.parametrize("words", [["--overlap"], ["--num-devices", "4"], ["--bandwidth", "1e9"]])
def test_a_flag_for_other_inputs_is_refused_with_its_default_too(words: list[str]) -> None:
    with pytest.raises(UsageError, match="leave out --"):
        answer_of(lambda given: given.require_for_models(), *words)


@pytest.mark.parametrize("words", [["auto"], ["search", "--rates", "5"], ["profile"], ["annotate", "--default", "auto"]])
def test_caps_that_weights_alone_break_are_refused_before_ops_are_measured(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autosplit.measuring.profiler.measure_together", None)
    model = "autosplit.examples.mlp:mlp?depth=1&width=1024"
    done = CliRunner().invoke(cli.app, [*words, model, "--devices", "cpu:0", "--memory", "1.2MB", "--profiles", "kept"])
    assert done.exit_code == 1 and "takes about" not in done.stderr
    assert "op 'linear' needs 4.0 MiB of weights on one device, and the largest cap is 1.1 MiB ('cpu:0')" in done.stderr


@pytest.mark.parametrize("options", [MeasuredModel, Run])
def test_the_help_names_every_precision(options: type[Output]) -> None:
    """That of ``run`` lacked two."""
    [option] = get_type_hints(options, include_extras=True)["precision"].__metadata__
    assert {*get_args(Precision)} <= {*re.findall(r"\w+", option.help)}

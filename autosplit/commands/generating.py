"""Continue prompts: token ids to token ids, or texts where the model has a tokenizer."""

from pathlib import Path
from typing import TYPE_CHECKING

from autosplit.commands.console import err, load_plan, log, say, say_kept, show, write_plan
from autosplit.commands.generateoptions import Generate
from autosplit.commands.machines import opened_machine
from autosplit.commands.starting import start
from autosplit.errors import UsageError
from autosplit.progress import Progress, bars
from autosplit.terminal import visible
from autosplit.values.machine import Machine
from autosplit.values.planfile import PlanFile, read_plan

if TYPE_CHECKING:
    from autosplit.generating.generators import Generator


def generate(given: Generate) -> None:
    """Generate tokens: trace, measure and plan a language model, open it, and continue the prompts."""
    sampling = given.sampling
    given.require_default(["cluster"], "the caches of a generator are on this machine")
    start(lambda: given.backends)
    from autosplit.generating.sampling import Sampling
    from autosplit.generating.texts import load_texts
    from autosplit.generation import generator

    texts = load_texts(given.model)
    prompts, reader = given.prompts(texts), None if given.prompt_ids else texts
    longest, ends = 1 if given.sound else max(map(len, prompts)), () if reader is None else reader.ends
    Sampling(**sampling)  # tracing takes a while
    if given.plan is not None:
        given.require_default(["generate"], "the plan says what its caches hold")
    say_kept(given)
    devices = None if given.plan is None else ",".join(_planned(given.plan).devices)
    with opened_machine(given, devices) as (machine, _), bars(err) as progress:
        opened = (
            _opened_plan(given.plan, given, machine, progress)
            if given.plan is not None
            else generator(
                given.model,
                machine,
                given.constraints,
                **given.sequences(longest).given,
                setup=given.setup(progress, log(given)),
                budget=given.spending(),
            )
        )
    with opened:
        say(str(opened.plan))
        if given.output is not None and opened.plan is not None and opened.graph is not None:
            write_plan(opened.plan, opened.graph, given.output, f"; autosplit serve {given.output} answers other programs")
        if len(prompts) > 1 or given.json or given.sound:
            answers = opened.generate(prompts, **sampling | {"eos": [*sampling["eos"], *ends]})
            told = [" ".join(map(str, one)) if reader is None else reader.decoded(one) for one in answers]
            show(given, {"answers": answers, "texts": told if reader else None, "stats": opened.stats().to_dict()}, *told)
        elif given.prompt:
            for text in opened.stream_text(given.prompt[0], **sampling):
                print(visible(text), end="", flush=True)
            print()
        else:
            for token in opened.stream(prompts[0], **sampling):
                print(token, end=" ", flush=True)
            print()
        say(opened.stats().summary())


def _planned(path: Path) -> PlanFile:
    """The plan file of a generator. Raises: PlanError: as ``read_plan``. UsageError: it is of other requests."""
    file = read_plan(path)
    if file.sequences is None:
        raise UsageError(f"plan '{path}' is not of a generator; search one with --generate")
    return file


def _opened_plan(path: Path, given: Generate, machine: Machine, progress: Progress) -> "Generator":
    """The plan of a file as a generator; errors as for ``loadedplan.load``."""
    from autosplit.generating.opening import open_generator

    loaded = load_plan(path, given.model, progress, devices=machine)
    return open_generator(loaded.family, loaded.plan, machine)

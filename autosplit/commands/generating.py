"""Continue prompts: token ids to token ids, or texts where the model has a tokenizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosplit.commands.console import err, load_plan, log, say, say_kept, say_notes, show, write_plan
from autosplit.commands.machines import opened_machine
from autosplit.commands.options import MeasuredModel, seconds
from autosplit.commands.starting import start
from autosplit.errors import UsageError
from autosplit.preloading import settle
from autosplit.progress import Progress, bars
from autosplit.terminal import visible
from autosplit.values.constraints import Constraints
from autosplit.values.machine import Machine
from autosplit.values.planfile import PlanFile, read_plan
from autosplit.values.sequences import Sequences, sequence_numbers

if TYPE_CHECKING:
    import torch

    from autosplit.generating.generators import Generator
    from autosplit.generating.sampling import Sampling
    from autosplit.generating.texts import Texts

CACHES_HELP = (
    "What the caches hold: max_sequences=16 (side by side), max_length=1024 (tokens, those of the prompt included); further as "
    "for search. The prompts and --max-new-tokens give the rest."
)

PLANNING = ("stages", "time_limit", "backend", "precision", "remeasure")
"""Flags for a plan that is to be found."""


@dataclass(frozen=True, kw_only=True)
class Sampled(MeasuredModel):
    """Next tokens."""

    max_new_tokens: Annotated[int, typer.Option(help="Tokens after which an answer ends.")] = 64
    eos: Annotated[str, typer.Option(help="Ids of tokens that end an answer, with commas between.")] = ""
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer, and is no part of it. Again for more.")] = None
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above it, tokens are drawn.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Draw from the fewest tokens with this probability together.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Draw from so many of the likeliest tokens; 0 for all.")] = 0
    seed: Annotated[int, typer.Option(help="Seed of the draws; with the place of a token it decides each.")] = 0
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: tokens that were there become less likely.")] = 1.0

    @property
    def sampling(self) -> dict[str, Any]:
        """The fields of ``Sampling``. Raises: UsageError: ``--eos`` is no ids."""
        names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "repetition_penalty")
        return {name: getattr(self, name) for name in names} | {"eos": _ids("--eos", self.eos)}


@dataclass(frozen=True, kw_only=True)
class Generate(Sampled):
    """Prompts and caches."""

    prompt_ids: Annotated[
        list[str] | None, typer.Option(help="Ids of a prompt, with commas between. Again for more: they run side by side.")
    ] = None
    plan: Annotated[Path | None, typer.Option(help="A plan.yaml of this model, in place of measuring and planning.")] = None
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text of a prompt, for a model in a folder with tokenizer.json. Again for more.")
    ] = None
    sound: Annotated[
        list[Path] | None, typer.Option(help="A WAV file for Whisper: 16 bits, 16,000 samples a second. Again for more.")
    ] = None
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also write the plan, for autosplit serve.")] = None
    generate: Annotated[str | None, typer.Option(help=CACHES_HELP)] = None
    stages: Annotated[int | None, typer.Option(min=1, help="Number of stages.")] = None
    time_limit: Annotated[str | None, typer.Option(help="Most time of the planner for a set of backends.")] = None

    def prompts(self, texts: "Texts | None") -> "Sequence[list[int] | torch.Tensor]":
        """The tokens of the prompts, or sounds. Raises: UsageError: none is given, or one cannot be read."""
        from autosplit.generating.sources import read_sound
        from autosplit.generating.texts import required

        kinds = [kind for kind in (self.prompt_ids, self.prompt, self.sound) if kind]
        if not kinds:
            raise UsageError(
                "there is no prompt; give --prompt-ids 1,2,3, or --prompt TEXT for a model with a tokenizer, or --sound FILE.wav"
            )
        if len(kinds) > 1:
            raise UsageError("give prompts as texts, as ids or as sounds, of one kind alone")
        if self.sound:
            return list(map(read_sound, self.sound))
        if self.prompt:
            return list(map(required(texts).ids, self.prompt))
        return [_ids("--prompt-ids", text) for text in self.prompt_ids or ()]

    def stop_texts(self, texts: "Texts | None") -> tuple[str, ...]:
        """The texts that end an answer. Raises: UsageError: one is empty, or answers are no texts."""
        found = tuple(self.stop or ())
        if found and texts is None:
            raise UsageError("--stop is for answers in text: give --prompt TEXT, or the ids that end an answer with --eos")
        if "" in found:
            raise UsageError("a text of --stop is empty; leave it out")
        return found

    def sequences(self, longest: int) -> Sequences:
        """The sequences to plan for, with a longest prompt of so many tokens. Raises: UsageError: they do not fit."""
        numbers = {} if self.generate is None else sequence_numbers(self.generate)
        return Sequences(**{"prompt": longest, "new": self.max_new_tokens} | numbers)


def generate(given: Generate) -> None:
    """Generate tokens: trace, measure and plan a language model, open it, and continue the prompts."""
    sampling = given.sampling
    given.require_default(["cluster"], "the caches of a generator are on this machine")
    if Path(given.model).is_dir():  # else a prompt of text would be refused for want of a tokenizer
        raise UsageError(f"model '{given.model}' is a folder; a checkpoint is named as 'transformers:{given.model}'")
    start(lambda: given.backends)
    from autosplit.deploying.setup import Budget
    from autosplit.generating.sampling import Sampling
    from autosplit.generating.texts import load_texts
    from autosplit.generation import generator

    texts = load_texts(given.model)
    prompts, reader = given.prompts(texts), None if given.prompt_ids else texts
    if not all(map(len, prompts)):
        raise UsageError("a prompt is empty; give at least one token, such as the one that begins a text")
    stop = given.stop_texts(reader)
    longest, ends = 1 if given.sound else max(map(len, prompts)), () if reader is None else reader.ends
    settings = Sampling(**sampling)  # tracing takes a while
    if given.plan is not None:
        given.require_default(["generate"], "the plan says what its caches hold")
        given.require_default(PLANNING, "the plan says on which stages, backends and precision the model runs")
    say_kept(given)
    devices = None if given.plan is None else ",".join(_planned(given.plan).devices)
    with opened_machine(given, devices) as (machine, _), bars(err) as progress:
        opened = (
            _opened_plan(given.plan, given, machine, progress, prompts, settings)
            if given.plan is not None
            else generator(
                given.model,
                machine,
                Constraints(num_stages=given.stages),
                **given.sequences(longest).given,
                prompts=prompts,
                max_new_tokens=settings.max_new_tokens,
                setup=given.setup(progress, log(given)),
                budget=Budget(planner_s=None if given.time_limit is None else seconds(given.time_limit)),
            )
        )
    settle()  # of a plan file the model and its traces were loaded for the stages alone
    with opened:
        opened.stats(clear=True)  # the time of opening is not that of the answers
        say_notes(opened.notes)
        say(str(opened.plan))
        if given.output is not None and opened.plan is not None and opened.graph is not None:
            write_plan(opened.plan, opened.graph, given.output, f"; autosplit serve {given.output} answers other programs")
        if len(prompts) > 1 or given.json or given.sound:
            answers = opened.generate(prompts, stop=stop, **sampling | {"eos": [*sampling["eos"], *ends]})
            told = [" ".join(map(str, one)) if reader is None else reader.decoded(one, stop) for one in answers]
            show(given, {"answers": answers, "texts": told if reader else None, "stats": opened.stats().to_dict()}, *told)
        elif given.prompt:
            for text in opened.stream_text(given.prompt[0], stop=stop, **sampling):
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


def _opened_plan(
    path: Path,
    given: Generate,
    machine: Machine,
    progress: Progress,
    prompts: "Sequence[list[int] | torch.Tensor]",
    settings: "Sampling",
) -> "Generator":
    """The plan of a file as a generator; errors as for ``loadedplan.load``. Raises: UsageError: it cannot take a prompt."""
    from autosplit.generating.opening import capacity_of, open_generator
    from autosplit.generating.sequences import new_generation

    loaded = load_plan(path, given.model, progress, devices=machine)
    for prompt in prompts:  # opening takes a while
        new_generation(prompt, None, settings, capacity_of(loaded.family))
    return open_generator(loaded.family, loaded.plan, machine, progress=progress)


def _ids(flag: str, text: str) -> list[int]:
    """Numbers with commas or spaces between. Raises: UsageError: one is no number."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"{flag} '{text:.60}' is not ids of tokens; write numbers with commas between, such as 1,2,3") from None

"""The options of ``autosplit generate``."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autosplit.commands.options import MeasuredModel, seconds
from autosplit.errors import UsageError
from autosplit.values.constraints import Constraints
from autosplit.values.sequences import Sequences, sequence_numbers

if TYPE_CHECKING:
    import torch

    from autosplit.deploying.setup import Budget
    from autosplit.generating.texts import Texts


CACHES_HELP = (
    "What the caches hold: max_sequences=16 (side by side), max_length=1024 (tokens, those of the prompt included); further as "
    "for search. The prompts and --max-new-tokens give the rest."
)


@dataclass(frozen=True, kw_only=True)
class Sampled(MeasuredModel):
    """Next tokens."""

    max_new_tokens: Annotated[int, typer.Option(help="Tokens after which an answer ends.")] = 64
    eos: Annotated[str, typer.Option(help="Ids of tokens that end an answer, with commas between.")] = ""
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

    def sequences(self, longest: int) -> Sequences:
        """The sequences to plan for, with a longest prompt of so many tokens. Raises: UsageError: they do not fit."""
        numbers = {} if self.generate is None else sequence_numbers(self.generate)
        room, needed = numbers.get("max_length", Sequences().max_length), longest + self.max_new_tokens - 1
        if needed > room:
            raise UsageError(
                f"max_length is {room}, and the longest prompt has {longest} tokens, after which --max-new-tokens asks for "
                f"{self.max_new_tokens}; raise the first (--generate max_length={needed}) or lower the last"
            )
        return Sequences(**{"prompt": longest, "new": self.max_new_tokens} | numbers)

    @property
    def constraints(self) -> Constraints:
        """The demands on the plan."""
        return Constraints(num_stages=self.stages)

    def spending(self) -> "Budget":
        """Limits of time for the planner."""
        from autosplit.deploying.setup import Budget

        return Budget(planner_s=None if self.time_limit is None else seconds(self.time_limit))


def _ids(flag: str, text: str) -> list[int]:
    """Numbers with commas or spaces between. Raises: UsageError: one is no number."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"{flag} '{text:.60}' is not ids of tokens; write numbers with commas between, such as 1,2,3") from None

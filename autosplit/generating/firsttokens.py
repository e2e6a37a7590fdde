"""First tokens after prompts, judged by their scores as those of a backend are: of two near ones rounding may take either."""

from collections.abc import Collection, Sequence

import torch

from autosplit.backends.checking import Reference, model_reference
from autosplit.generating.opening import capacity_of
from autosplit.generating.sampling import Sampling
from autosplit.generating.scheduler import Scheduler
from autosplit.generating.sequences import new_generation
from autosplit.generating.steps import StepFamily
from autosplit.shapes.batching import Bucket
from autosplit.tracing.programs import weight
from autosplit.values.samples import Precision


def first_step(family: StepFamily, prompt: Sequence[int] | torch.Tensor, start: Sequence[int] | None) -> Reference:
    """The step that gives the first token after a prompt, in its first row; it is computed in this process.

    Steps before it, of a long prompt, leave the keys and values of the model's own dtype.
    """
    sizes, capacity = family.sizes, capacity_of(family)
    table = weight(family.variants[0].program, family.table).detach() if family.table else None
    buckets = [Bucket(number, at, float(sum(at.values()))) for number, at in enumerate(sizes)]
    scheduler = Scheduler(buckets, capacity.max_sequences, 1, source=capacity.source)
    sequence = new_generation(prompt, start, Sampling(max_new_tokens=1), capacity)
    scheduler.add(sequence)
    while True:
        step = scheduler.next_step()
        assert step is not None  # the one sequence has all of its tokens
        reference = model_reference(family.variants[step.variant], step.inputs(table))
        [part], [[tokens]] = step.parts, reference.own
        if part.gives_next and not sequence.forced:
            return reference
        scheduler.finish(step, tokens[:1].tolist() if part.gives_next else ())  # a language, or a part of the prompt


def token_error(reference: Reference, token: int, precisions: Collection[Precision]) -> tuple[float, float]:
    """How far the score of a token in the first row is below the best one, as a share of the largest; and the allowed share."""
    [[tokens]] = reference.own
    found = tokens.clone()
    found[0] = token
    return reference.error([[found]]).relative, max(map(reference.tolerance, precisions))

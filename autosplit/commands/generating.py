"""Go on with prompts: ids in, ids out."""

from autosplit.commands.console import err, log, say, say_kept, show
from autosplit.commands.generateoptions import Generate
from autosplit.commands.machines import opened_machine
from autosplit.commands.starting import start
from autosplit.errors import UsageError
from autosplit.progress import bars


def generate(given: Generate) -> None:
    """Generate tokens: trace, measure and plan a language model, open it, and go on with the prompts."""
    prompts, sampling = given.prompts, given.sampling
    given.require_default(["cluster"], "the caches of a generator are on this machine")
    start(lambda: given.backends)
    from autosplit.generating.sampling import Sampling
    from autosplit.generation import generator

    Sampling(**sampling)  # tracing takes a while
    longest = max(map(len, prompts))
    if longest + given.max_new_tokens - 1 > given.max_length:
        raise UsageError(
            f"--max-length is {given.max_length}, and the longest prompt has {longest} tokens, after which "
            f"--max-new-tokens asks for {given.max_new_tokens}; raise the first or lower the last"
        )
    say_kept(given)
    with opened_machine(given) as (machine, _), bars(err) as progress:
        opened = generator(
            given.model,
            machine,
            given.constraints,
            max_sequences=given.max_sequences,
            max_length=given.max_length,
            prompt=longest,
            new=given.max_new_tokens,
            setup=given.setup(progress, log(given)),
            budget=given.spending(),
        )
    with opened:
        say(str(opened.plan))
        if len(prompts) == 1 and not given.json:
            for token in opened.stream(prompts[0], **sampling):
                print(token, end=" ", flush=True)
            print()
        else:
            answers = opened.generate(prompts, **sampling)
            show(given, {"answers": answers, "stats": opened.stats().to_dict()}, *(" ".join(map(str, one)) for one in answers))
        say(opened.stats().summary())

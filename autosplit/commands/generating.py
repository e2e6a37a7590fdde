"""Go on with prompts: ids in, ids out; texts where a tokenizer is at hand."""

from autosplit.commands.console import err, log, say, say_kept, show
from autosplit.commands.generateoptions import Generate
from autosplit.commands.machines import opened_machine
from autosplit.commands.starting import start
from autosplit.errors import UsageError
from autosplit.progress import bars
from autosplit.terminal import visible


def generate(given: Generate) -> None:
    """Generate tokens: trace, measure and plan a language model, open it, and go on with the prompts."""
    sampling = given.sampling
    given.require_default(["cluster"], "the caches of a generator are on this machine")
    start(lambda: given.backends)
    from autosplit.generating.sampling import Sampling
    from autosplit.generating.texts import load_texts
    from autosplit.generation import generator
    from autosplit.values.planfile import write_plan

    texts = load_texts(given.model)
    prompts, ends = given.prompts(texts), texts.ends if texts is not None and given.prompt else ()
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
        if given.output is not None and opened.plan is not None and opened.graph is not None:
            write_plan(opened.plan, opened.graph, given.output)
            say(f"wrote {given.output}; autosplit serve {given.output} answers other programs")
        if len(prompts) > 1 or given.json:
            answers = opened.generate(prompts, **sampling | {"eos": [*sampling["eos"], *ends]})
            told = [" ".join(map(str, one)) if texts is None or not given.prompt else texts.decoded(one) for one in answers]
            show(given, {"answers": answers, "texts": told if given.prompt else None, "stats": opened.stats().to_dict()}, *told)
        elif given.prompt:
            for text in opened.stream_text(given.prompt[0], **sampling):
                print(visible(text), end="", flush=True)
            print()
        else:
            for token in opened.stream(prompts[0], **sampling):
                print(token, end=" ", flush=True)
            print()
        say(opened.stats().summary())

"""A server with a generator that runs no model: its next token is a function of the tokens before it."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from generating.caches import BUCKETS, VOCABULARY, Pipeline
from servedplans import Served, listening
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from autosplit.generating.generators import Generator
from autosplit.generating.sequences import Capacity
from autosplit.generating.texts import Texts
from autosplit.serving.hostmanager import HostManager
from autosplit.webservice.application import Application
from autosplit.webservice.limits import ServerLimits
from autosplit.webservice.repository import Repository, ServedModel

SLOTS, LENGTH = 2, 60
LIMITS = ServerLimits(body_bytes=100_000, queue_s=0.1, request_s=30.0, drain_s=5.0)
TEMPLATE = "{% for one in messages %}{{ one['role'] }} {{ one['content'] }} {% endfor %}assistant"


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    """A tokenizer whose words are those of a chat and w0, w1, and so on, each a token."""
    words = {name: number for number, name in enumerate(["system", "user", "assistant", *(f"w{one}" for one in range(3, 95))])}
    found = Tokenizer(models.WordLevel(words, unk_token="w94"))
    found.pre_tokenizer, found.decoder = pre_tokenizers.Whitespace(), decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=found, chat_template=template)


@dataclass
class Generating(Served):
    """A server with the models ``ids`` and ``words``, each over a generator; only the second has a tokenizer.

    ``pipeline`` and ``generator`` are those of ``ids``.
    """

    pipeline: Pipeline
    generator: Generator


@contextlib.contextmanager
def generating(limits: ServerLimits = LIMITS, token: str = "", queue_capacity: int = 2) -> Iterator[Generating]:
    """The server; ``pipeline._holds`` keeps every answer back."""
    pipelines = [Pipeline(SLOTS, LENGTH, step_s=0.001) for _ in range(2)]  # a stop word is seen long before 50 tokens are there
    with HostManager() as host:
        repository = Repository(host, {})
        for pipeline, name, texts in zip(pipelines, ("ids", "words"), (None, Texts(tokenizer())), strict=True):
            capacity = Capacity(SLOTS, LENGTH, VOCABULARY)
            generator = Generator(pipeline, BUCKETS, capacity, 2, queue_capacity=queue_capacity, texts=texts)
            kept = contextlib.ExitStack()
            repository._served[name] = ServedModel(name, 1, (name,), (), (), kept, generator=generator)
        application = Application(host, repository, limits, token)
        generator = repository._served["ids"].generator
        assert generator is not None
        with listening(application) as url:
            yield Generating(None, application, url, pipelines[0], generator)
        pipelines[0].release()
        repository.close()
        for pipeline in pipelines:
            pipeline.close()

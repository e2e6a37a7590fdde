"""A pipeline of steps whose next token is a function of the tokens that a slot holds, so a wrong token shows."""

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from autosplit.errors import StageError
from autosplit.shapes.batching import Bucket

VOCABULARY = 97
POISON, NOT_FINITE = 95, 96
"""Tokens of prompts: one fails its step, one gives logits that are not finite."""

BUCKETS = [Bucket(number, {"tokens": size}, 0.001 * size) for number, size in enumerate((8, 1, 4))]


def next_token(history):
    """The token after a history: never a poison."""
    return hash(tuple(history)) % (POISON - 1)


def expected(prompt, num_new, eos=()):
    """The new tokens of a sequence that runs alone."""
    found = list(prompt)
    while len(found) < len(prompt) + num_new and (len(found) == len(prompt) or found[-1] not in eos):
        found.append(next_token(found))
    return found[len(prompt) :]


class Caches:
    """What a model keeps: the token at each place of each slot. ``outcome`` is what a step gives."""

    def __init__(self, max_sequences, max_length):
        self.poison, self.failure = StageError("poison"), None
        self.tokens = torch.full((max_sequences + 1, max_length), POISON)
        self.steps = []

    def outcome(self, inputs, variant):
        ids, slots, positions, _ = inputs
        sizes = [len(tensor) for tensor in inputs]
        assert sizes == [BUCKETS[variant].sizes["tokens"]] * 4
        used = [(int(slot), int(at)) for slot, at in zip(slots, positions, strict=True) if slot]
        assert len(used) == len(set(used)), "one place twice"
        self.steps.append({slot for slot, _ in used})
        self.tokens[slots, positions] = ids
        if POISON in ids[slots > 0]:
            return self.poison
        found = []
        for slot, at in zip(slots.tolist(), positions.tolist(), strict=True):
            history = self.tokens[slot, : at + 1].tolist()
            found.append(-1 if NOT_FINITE in history else next_token(history))
        return torch.tensor(found[: len(self.tokens) - 1])


class Pipeline(Caches):
    """The caches as a pipeline; answers come from another thread after ``step_s``, or are ``held`` until ``release``."""

    def __init__(self, max_sequences, max_length, *, holds=False, step_s=0.0):
        super().__init__(max_sequences, max_length)
        self.held, self._holds, self._step_s = deque(), holds, step_s
        self._thread = ThreadPoolExecutor(1)

    def submit_unbounded(self, inputs, *, priority=0, deadline_ns=0, variant=0):
        future, outcome = Future(), self.outcome(inputs, variant)

        def answer():
            time.sleep(self._step_s)
            if isinstance(outcome, Exception):
                future.set_exception(outcome)
            else:
                future.set_result((outcome,))

        if self._holds:
            self.held.append(answer)
        else:
            self._thread.submit(answer)
        return future

    def release(self):
        self._holds = False
        while self.held:
            self.held.popleft()()

    def close(self):
        self._thread.shutdown()

"""Which tokens of which sequences run in the next step: continuous batching (Yu et al., Orca, OSDI 2022), prompts in chunks.

::

    add: takes a slot  -->  prompt in chunks  -- last chunk -->  one token a step  -- last token -->  slot is free

Sequences enter and leave at every step. As many steps are under way as there are stages, each with its share of the sequences,
so that no stage waits. Chunks of prompts stand beside single tokens in a step (Agrawal et al., Sarathi-Serve, OSDI 2024). Where
prompts are sources of an encoder, whole ones stand there, as many as fit, each beside the first tokens of its answer. They fill
the variant with which all prompts that wait take the fewest seconds, or a smaller one (``ALONE``).
"""

import heapq
import itertools
import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from autosplit.errors import StageError, WorkerError
from autosplit.generating.sequences import Generation, Part, Step
from autosplit.generating.sources import Source
from autosplit.generating.steps import TOKENS
from autosplit.shapes.batching import Bucket

PROMPT_SHARE = 0.9
"""Share of the seconds of steps that prompts may take from sequences that decode, whose time per token grows tenfold at most,
where no limit on it is given. With a limit, prompts get the rest of it after a step of decoding.

A smaller share does not keep the time per token: steps with few sequences cost nearly as much as full ones, so prompts that wait
long cost all of them. (Simulated before there was ``ALONE``, 0.8 in place of 0.9: its mean is the same on one device and 1.08 to
1.3 times as long on two stages. The longest wait is the same on one device, and on two stages 0.9 makes it 1.3 to 1.9 times.)
"""

ALONE = 3
"""Least tokens of a step with a prompt that waits alone, as a multiple of those that decode beside it, on several stages.

Stages that follow each other wait where one step takes much longer than others. So a prompt that comes while all other sequences
decode runs in small chunks, and several that wait in large ones, as they decode nothing until then. (Measured: two stages of a
model of 25 M parameters, 16 sequences that follow each other, answers of 32 to 96 tokens, five pairs on two cores of an AMD EPYC:
1.14 times the tokens with prompts of 64, 1.05 with 128. Simulated: 8 sequences 1.11 and 1.02; all come at once, 0.99 to 1.01.)
"""


class Scheduler:
    """The sequences in the caches of one pipeline. Not for several threads at once.

    Args:
        buckets: the variants of a step with their seconds.
        max_sequences: sequences in the caches, in slots from 1.
        num_stages: steps under way at most.
        per_token_s: most seconds from one token of a sequence to its next one, in the mean, while prompts come; None leaves
            prompts ``PROMPT_SHARE``. Where decoding alone takes as long, prompts wait until sequences end.
        source: the kind of prompts of a model with an encoder, whose larger variants hold rows of sources beside ``num_beside``
            tokens.

    Attributes:
        ended: sequences that have left, whose futures wait for their results; the owner takes them away.
        counts: steps, tokens that ran in them (``prompt``, ``new``), and ``padding``.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        max_sequences: int,
        num_stages: int,
        per_token_s: float | None = None,
        source: Source | None = None,
    ) -> None:
        self._buckets = sorted(buckets, key=lambda bucket: bucket.sizes[TOKENS])
        self._sizes = [bucket.sizes[TOKENS] for bucket in self._buckets]
        self._source = source
        self._most = self._sizes[-1] if source is None else source.num_beside
        self._num_stages, self._per_token_s = num_stages, per_token_s
        self._free = list(range(1, max_sequences + 1))
        self._running: list[Generation] = []
        self._steps = itertools.count(1)
        self._rooms: dict[int, list[int]] = {}
        """Number of single tokens to the tokens of prompts that the next step takes beside them, where 1, 2, ... wait."""
        self._credit_s = 0.0
        """Seconds that prompts may take now; below 0 they wait."""
        self.num_under_way = 0
        self.ended: list[Generation] = []
        self.counts = Counter[str]()

    @property
    def num_free(self) -> int:
        """Slots without a sequence."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Sequences with a slot."""
        return len(self._running)

    def add(self, generation: Generation) -> None:
        """Give a sequence one of the free slots."""
        generation.slot = heapq.heappop(self._free)
        self._running.append(generation)

    def fail_all(self, failure: BaseException, *, at_once: bool = False) -> None:
        """End every sequence, those with steps under way once these are finished, or ``at_once`` if nobody answers steps."""
        for generation in self._running.copy():
            generation.failure = generation.failure or failure
            if at_once or not generation.num_under_way:
                self._leave(generation)

    def next_step(self) -> Step | None:
        """The next step, which counts as under way from now on; None if nothing is ready, or no stage is free."""
        if self.num_under_way >= self._num_stages:
            return None
        now_ns, num_decoding = time.monotonic_ns(), 0
        decoding: list[Generation] = []
        prompts: list[Generation] = []
        suspects: list[Generation] = []
        for generation in self._running.copy():  # one pass: a stage may wait for this step
            decodes = generation.is_decoding
            num_decoding += decodes
            if not generation.is_ready:
                continue
            if generation.has_failed(now_ns):
                if not generation.num_under_way:
                    self._leave(generation)
            else:
                (suspects if generation.is_suspect else decoding if decodes else prompts).append(generation)
        if suspects:
            parts = [_part(suspects[0], self._most)]
            bucket = self._bucket(parts)
        else:
            parts, bucket = self._parts(decoding, prompts, num_decoding)
        if not parts:
            return None
        number, num_rows, num_new = next(self._steps), self._num_rows(parts), 0
        num_tokens = num_rows
        for generation, start, end, gives_next in parts:
            num_tokens += end - start
            num_new += gives_next
            generation.sent, generation.last_step = end, number
            generation.num_under_way += 1
        self.num_under_way += 1
        size = bucket.sizes[TOKENS]
        for name, count in (("steps", 1), ("prompt", num_tokens - num_new), ("new", num_new), ("padding", size - num_tokens)):
            self.counts[name] += count
        return Step(tuple(parts), bucket.variant, size, self._source, size - self._most if num_rows else 0, bool(suspects))

    def finish(self, step: Step, tokens: Sequence[int] = (), failure: BaseException | None = None) -> None:
        """Take the answer of a step.

        Args:
            step: the step that ``next_step`` returned.
            tokens: the next tokens, in the order of the parts that give one; -1 where logits are not finite.
            failure: why there are none. After a StageError or WorkerError each sequence of the step runs alone once more, and
                only one whose second step fails too ends.
        """
        self.num_under_way -= 1
        row, runs_again = 0, not step.is_retry and isinstance(failure, StageError | WorkerError)
        for generation, start, end, gives_next in step.parts:
            generation.num_under_way -= 1
            if runs_again:
                generation.is_suspect = True
            elif failure is not None:
                generation.failure = generation.failure or failure
            else:
                token = tokens[row] if gives_next else None
                row += gives_next
                if start == generation.done and generation.failure is None:  # else an earlier chunk of it failed meanwhile
                    self._advance(generation, end, token)
            if not generation.num_under_way:
                generation.sent = generation.done
                if generation.failure is not None or generation.is_complete:
                    self._leave(generation)

    def _advance(self, generation: Generation, end: int, token: int | None) -> None:
        """Count tokens as computed, and take the next one."""
        if token == -1:
            generation.failure = StageError(
                f"logits after token {end} of a sequence are not finite; other sequences go on. Check the model's weights and "
                "its precision."
            )
            return
        generation.done, generation.is_suspect = end, False
        if token is not None:
            try:
                generation.append(token)
            except Exception as failure:  # of the caller's function for new tokens
                generation.failure = failure

    def _leave(self, generation: Generation) -> None:
        """Let a sequence without steps under way go."""
        self._running.remove(generation)
        heapq.heappush(self._free, generation.slot)
        self.ended.append(generation)

    def _parts(
        self, decoding: Sequence[Generation], prompts: Sequence[Generation], num_decoding: int
    ) -> tuple[list[Part], Bucket]:
        """One token of each sequence of a group that decodes, and beside them chunks of prompts; and the variant for both.

        Args:
            decoding, prompts: sequences that are ready.
            num_decoding: sequences that decode, those in steps under way among them.
        """
        group = min(self._most, -(-num_decoding // self._num_stages))
        longest_ago = sorted(decoding, key=attrgetter("last_step"))[:group]
        longest_ago.sort(key=attrgetter("slot"))  # as attention likes them
        parts = [Part(one, one.sent, one.sent + 1, True) for one in longest_ago]
        bucket = self._bucket(parts)
        alone_s = bucket.seconds if parts else 0.0
        if prompts and (not num_decoding or self._credit_s >= 0):
            parts += self._prompts(prompts, len(parts), num_decoding)
            bucket = self._bucket(parts)
        if parts:
            share = PROMPT_SHARE if self._per_token_s is None else max(0.0, 1 - alone_s / self._per_token_s)
            self._credit_s += share * bucket.seconds - (bucket.seconds - alone_s)
        if not num_decoding or self._credit_s > 0:
            self._credit_s = 0.0
        return parts, bucket

    def _prompts(self, prompts: Sequence[Generation], num_beside: int, num_decoding: int) -> list[Part]:
        """Chunks of prompts, or whole sources, for a step beside single tokens.

        The steps count with all of their seconds: where only the seconds beyond single tokens counted, many small chunks looked
        cheap, and sequences whose prompts wait decode nothing (25 M parameters: 562 tokens/s in place of 899).
        """
        waiting = [_part(generation, self._most) for generation in sorted(prompts, key=attrgetter("priority"))]
        rows, free, free_rows = [part.num_rows for part in waiting if part.num_rows], self._most - num_beside, 0
        if rows:
            free_rows = best_rooms(rows, [(one.sizes[TOKENS] - self._most, one.seconds) for one in self._buckets])[-1]
        elif free:
            if num_beside not in self._rooms:
                rooms = [(one.sizes[TOKENS] - num_beside, one.seconds) for one in self._buckets]
                self._rooms[num_beside] = best_rooms([1] * (2 * free), [room for room in rooms if room[0] <= free])
            num_waiting = sum(len(generation.tokens) - generation.sent for generation in prompts)
            free = self._rooms[num_beside][min(num_waiting, 2 * free) - 1]
            if num_beside and num_decoding == len(self._running) - 1 and self._num_stages > 1:
                small = next((size for size in self._sizes if size >= ALONE * num_beside), self._most)
                free = min(free, small - num_beside)
        parts = list[Part]()
        for generation, *_ in waiting:
            part = _part(generation, free)
            if free and part.num_rows <= free_rows:
                parts.append(part)
                free, free_rows = free - (part.end - part.start), free_rows - part.num_rows
        return parts

    def _num_rows(self, parts: Sequence[Part]) -> int:
        """The rows of sources in a step."""
        return 0 if self._source is None else sum(part.num_rows for part in parts)

    def _bucket(self, parts: Sequence[Part]) -> Bucket:
        """The smallest variant that takes these parts."""
        num_rows = self._num_rows(parts)
        least = self._most + num_rows if num_rows else sum(end - start for _, start, end, _ in parts)
        return self._buckets[bisect_left(self._sizes, least)]


def best_rooms(units: Sequence[int], rooms: Sequence[tuple[int, float]]) -> list[int]:
    """The size of the room that is filled next, where the last one, two, ... of the units wait to be taken in, in their order.

    With it all of them take the fewest seconds; of equal sizes it is the largest. This is exact: a room takes as many as fit, and
    the others are a shorter list, whose seconds are known.

    Args:
        units: their sizes.
        rooms: sizes and seconds; one holds the largest unit.

    >>> best_rooms([64] * 5, [(64, 0.3), (256, 1.0), (1024, 4.0)])
    [64, 64, 64, 256, 256]
    """
    totals, left_s, found = [0], [0.0], list[int]()
    for unit in reversed(units):
        totals.append(totals[-1] + unit)
        fits = [(seconds + left_s[bisect_left(totals, totals[-1] - size)], -size) for size, seconds in rooms if size >= unit]
        seconds, size = min((round(seconds, 9), size) for seconds, size in fits)
        left_s.append(seconds)
        found.append(-size)
    return found


def _part(generation: Generation, most: int) -> Part:
    """The next tokens of a sequence."""
    start, end = generation.sent, min(len(generation.tokens), generation.sent + most)
    return Part(generation, start, end, end == len(generation.tokens))

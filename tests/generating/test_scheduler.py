"""Sequences that come, are cancelled and fail in any order: each gets the tokens that it gets alone."""

from dataclasses import replace

import numpy as np
import pytest
from generating.caches import BUCKETS, NOT_FINITE, POISON, Caches, expected
from hypothesis import given, settings
from hypothesis import strategies as st

from autosplit.errors import StageError, WorkerError
from autosplit.generating.sampling import Sampling
from autosplit.generating.scheduler import PROMPT_SHARE, Scheduler, best_rooms
from autosplit.generating.sequences import Generation
from autosplit.generating.sources import Source
from autosplit.shapes.batching import Bucket

SLOTS, LENGTH = 3, 40


def sequence(prompt, num_new=4, eos=(), **options):
    return Generation(list(prompt), len(prompt), Sampling(max_new_tokens=num_new, eos=eos), **options)


class Host:
    """A scheduler with caches, whose steps are computed when sent and answered when asked for; further sequences wait."""

    def __init__(self, num_stages=2, buckets=BUCKETS):
        self.scheduler, self.caches = Scheduler(buckets, SLOTS, num_stages), Caches(SLOTS, LENGTH)
        self.waiting, self.under_way = [], []

    def send(self):
        while self.waiting and self.scheduler.num_free:
            self.scheduler.add(self.waiting.pop(0))
        step = self.scheduler.next_step()
        if step is not None:
            owners = [one.slot for one in self.scheduler._running]
            assert len(owners) == len(set(owners))
            assert 0 not in owners
            self.under_way.append((step, self.caches.outcome(step.inputs(), step.variant)))
        return step

    def answer(self):
        if self.under_way:
            step, outcome = self.under_way.pop(0)
            failed = isinstance(outcome, Exception)
            self.scheduler.finish(step, *([] if failed else [outcome.tolist()]), failure=outcome if failed else None)

    def run(self):
        for _ in range(2000):
            if self.send() is None and not self.under_way and not self.waiting:
                return
            if len(self.under_way) == 2 or self.scheduler.num_under_way:
                self.answer()
        raise AssertionError("sequences never end")


token = st.integers(0, POISON - 1)
prompts = st.one_of(
    st.lists(token, min_size=1, max_size=20), st.lists(st.sampled_from([1, POISON, NOT_FINITE]), min_size=1, max_size=12)
)
events = st.one_of(
    st.tuples(st.just("add"), prompts, st.integers(1, 12), st.sets(token, max_size=40)),
    st.tuples(st.sampled_from(["send", "answer"])),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
)


@given(st.lists(events, max_size=60), st.integers(1, 3))
@settings(max_examples=150, deadline=None)
def test_each_sequence_gets_its_own_tokens_whatever_comes_beside_it(happens, num_stages):
    host, added, cancelled = Host(num_stages), [], set()
    for kind, *values in happens:
        if kind == "add":
            added.append(sequence(values[0], values[1], tuple(values[2])))
            host.waiting.append(added[-1])
        elif kind == "cancel" and values[0] < len(added) and added[values[0]].future.cancel():
            cancelled.add(added[values[0]])
        elif kind in ("send", "answer"):
            getattr(host, kind)()
    host.run()
    assert sorted(map(id, host.scheduler.ended)) == sorted(map(id, added))
    assert (host.scheduler.num_running, host.scheduler.num_free) == (0, SLOTS)
    for one in added:
        prompt = one.tokens[: one.num_prompt]
        wanted = expected(prompt, one.sampling.max_new_tokens, one.sampling.ends)
        if one in cancelled:
            assert one.new_tokens == wanted[: len(one.new_tokens)]
        elif POISON in prompt or NOT_FINITE in prompt:
            assert isinstance(one.failure, StageError)
            assert one.new_tokens == []
        else:
            assert one.failure is None
            assert one.new_tokens == wanted


def test_as_many_groups_are_under_way_as_stages():
    host = Host(num_stages=3)
    host.waiting += [sequence([number], 5) for number in range(3)]
    steps = [host.send(), host.send(), host.send(), host.send()]
    assert [len(step.parts) for step in steps[:3]] == [1, 1, 1]
    assert steps[3] is None


def test_prompts_take_their_share_beside_sequences_that_decode():
    step_s = {1: 0.001, 4: 0.01, 8: 0.02}
    host = Host(1, [Bucket(bucket.variant, bucket.sizes, step_s[bucket.sizes["tokens"]]) for bucket in BUCKETS])
    decoding = sequence([1], 30)
    host.scheduler.add(decoding)
    host.send()
    host.answer()
    host.scheduler.add(sequence(range(30), 1))
    seconds = []
    while not host.scheduler.ended:
        step = host.send()
        assert step.parts[0].generation is decoding  # it never waits for a prompt
        seconds.append(step_s[step.num_tokens])
        host.answer()
    prompt_s = sum(seconds) - 0.001 * len(seconds)
    assert prompt_s <= PROMPT_SHARE * sum(seconds) + 0.019
    assert {0.001, 0.02} <= set(seconds)  # some steps had no chunk, some a whole one


def test_chunks_of_a_prompt_follow_each_other_without_waiting():
    host = Host(num_stages=2)
    host.scheduler.add(sequence(range(16), 1))
    first, second = host.send(), host.send()
    assert [(part.start, part.end) for step in (first, second) for part in step.parts] == [(0, 8), (8, 16)]
    host.run()
    assert host.scheduler.ended[0].new_tokens == expected(range(16), 1)


@pytest.mark.parametrize(("num_stages", "size"), [(1, 8), (2, 4)])
def test_a_prompt_that_waits_alone_runs_in_small_chunks_on_several_stages(num_stages, size):
    """Beside single tokens of others, a large chunk let the other stage wait."""
    host = Host(num_stages)
    for number in range(2):
        host.scheduler.add(sequence([number], 30))
    for _ in range(4):
        host.send()
        host.answer()
    host.scheduler.add(sequence(range(16), 1))
    assert host.send().num_tokens == size
    host.run()
    assert host.scheduler.ended[0].new_tokens == expected(range(16), 1)


def test_a_prompt_takes_the_variants_with_the_fewest_seconds():
    """They took the largest one, and most of the second step was padding."""
    seconds = {8: 0.008, 1: 0.001, 4: 0.0015}
    host = Host(num_stages=1)
    host.scheduler = Scheduler([replace(one, seconds=seconds[one.sizes["tokens"]]) for one in BUCKETS], SLOTS, 1)
    host.scheduler.add(sequence(range(9), 1))
    sizes = []
    while not host.scheduler.ended:
        sizes.append(host.send().num_tokens)
        host.answer()
    assert sizes == [4, 4, 1]


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.dictionaries(st.integers(1, 14), st.integers(0, 20), max_size=3),
    st.integers(0, 20),
)
@settings(max_examples=100, deadline=None)
def test_rooms_take_the_fewest_seconds_of_all_orders_of_rooms(units, some, largest_s):
    rooms = [*some.items(), (6, largest_s)]

    def least_s(left, choose):
        """The seconds of all that is left, with each room that ``choose`` gives, filled in order."""
        found = []
        for size, seconds in choose(left):
            taken = sum(total <= size for total in np.cumsum(left))
            if taken:
                found.append(seconds + least_s(left[taken:], choose))
        return min(found) if left else 0

    def chosen(left):
        size = best_rooms(left, rooms)[-1] if left else 0
        return [min(room for room in rooms if room[0] == size)] if left else []

    assert least_s(units, chosen) == least_s(units, lambda left: rooms)


def test_only_the_sequence_that_fails_alone_fails():
    host = Host(num_stages=1)
    good, bad = sequence([5, 6], 3), sequence([7, POISON], 3)
    host.waiting += [good, bad]
    host.run()
    assert (good.failure, good.new_tokens) == (None, expected([5, 6], 3))
    assert isinstance(bad.failure, StageError)
    assert host.caches.steps[:3] == [{1, 2}, {1}, {2}]


def test_a_sequence_alone_goes_on_after_one_failed_step_and_ends_after_two():
    """Workers were killed twice at the step of the last sequence, and it was lost."""
    host = Host(num_stages=1)
    one = sequence([5, 6], 3)
    host.scheduler.add(one)
    for num_failed in (1, 2):
        host.scheduler.finish(host.scheduler.next_step(), failure=WorkerError("killed"))
        assert (one.failure is None) == (num_failed == 1)


def test_failure_of_the_pipeline_is_that_of_its_sequences():
    host = Host()
    running = [sequence([one]) for one in range(3)]
    host.waiting += running
    step = host.send()
    host.scheduler.finish(step, failure=WorkerError("gone"))
    host.scheduler.fail_all(WorkerError("gone"))
    assert {type(one.failure) for one in running} == {WorkerError}
    assert len(host.scheduler.ended) == 3


def test_whole_sources_stand_in_a_step_beside_the_first_tokens_of_their_answers():
    """As many as fit. After a step that failed, each is sent anew with its source. A replica has fewer places than a step."""
    source = Source(max_rows=8, num_beside=3, num_start=1, start=(0,), vocabulary=97)
    buckets = [Bucket(number, {"tokens": size}, 0.001 * size) for number, size in enumerate((1, 2, 3, 7, 11))]
    scheduler = Scheduler(buckets, SLOTS, 1, source=source)
    ones = [sequence([0], 3, source=np.arange(1, count + 1)) for count in (5, 3, 4)]
    for one in ones:
        scheduler.add(one)

    def sent():
        step = scheduler.next_step()
        ids, slots, positions, sampling, seen, rows, row_slots, places = (tensor.tolist() for tensor in step.inputs())
        assert {len(ids), len(positions), len(sampling), len(seen)} == {len(slots)}
        assert len(rows) == len(row_slots) == len(places)
        told = {
            (slot, place): (row, number) for slot, place, row, number in zip(slots, positions, ids, seen, strict=True) if slot
        }
        return step, told, [pair for pair in zip(row_slots, places, rows, strict=True) if pair[0]]

    def rows_of(slot):
        return [(slot, place, place + 1) for place in range(len(ones[slot - 1].source))]

    step, told, rows = sent()
    assert (step.num_tokens, told, rows) == (11, {(1, 0): (0, 5), (2, 0): (0, 3)}, rows_of(1) + rows_of(2))
    scheduler.finish(step, failure=StageError("together"))
    for slot in (1, 2):
        step, told, rows = sent()
        assert (list(told), rows) == ([(slot, 0)], rows_of(slot))
        scheduler.finish(step, [7])
    step, told, rows = sent()
    assert told == {(1, 1): (7, 5), (2, 1): (7, 3), (3, 0): (0, 4)}
    assert (step.num_tokens, rows) == (7, rows_of(3))
    scheduler.finish(step, [7, 7, 7])
    step, told, rows = sent()
    assert (step.num_tokens, set(told), rows) == (3, {(1, 2), (2, 2), (3, 1)}, [])
    scheduler, ones = Scheduler(buckets, 1, 1, source=source), [sequence([0], 3, source=np.arange(1, 5))]
    scheduler.add(ones[0])
    step, told, rows = sent()
    assert (step.num_tokens, len(step.inputs()[0]), told, rows) == (7, 3, {(1, 0): (0, 4)}, rows_of(1))

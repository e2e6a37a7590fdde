import gc
import threading
import time

import numpy as np
import pytest
import torch
from generating.caches import BUCKETS, NOT_FINITE, POISON, VOCABULARY, Pipeline, expected
from pipelines import wait_until

from autosplit.errors import DeadlineError, RefusedError, StageError, UsageError, WorkerError
from autosplit.generating.generators import Generator
from autosplit.generating.sampling import Sampling
from autosplit.generating.sequences import Capacity, new_generation

SLOTS, LENGTH = 3, 80


@pytest.fixture
def pipeline():
    made = Pipeline(SLOTS, LENGTH)
    yield made
    made.release()
    made.close()


def opened(pipeline, **options):
    return Generator(pipeline, BUCKETS, Capacity(SLOTS, LENGTH, VOCABULARY), 2, **options)


def test_prompts_of_any_lengths_run_side_by_side(pipeline):
    prompts = [[number, *range(number)] for number in range(12)]
    with opened(pipeline) as generator:
        assert generator.generate(prompts, max_new_tokens=9) == [expected(prompt, 9) for prompt in prompts]
        stats = generator.stats(clear=True)
        assert (stats.num_sequences, stats.num_failed, stats.num_tokens) == (12, 0, 108)
        assert stats.first_token.count == stats.per_token.count == 12
        assert generator.stats().num_steps == 0
    assert pipeline.steps[0] == {1, 2, 3}, "the first step began before all prompts were there"


def test_tokens_stream_and_equal_those_of_the_future(pipeline):
    with opened(pipeline) as generator:
        assert list(generator.stream(torch.tensor([3, 4]), max_new_tokens=6)) == expected([3, 4], 6)
        assert generator.submit([3, 4], max_new_tokens=6).result() == expected([3, 4], 6)
        end = expected([3, 4], 6)[2]
        assert list(generator.stream([3, 4], max_new_tokens=6, eos=end)) == expected([3, 4], 6, [end])


def test_a_stream_that_is_left_ends_its_sequence(pipeline):
    with opened(pipeline) as generator:
        stream = generator.stream([1], max_new_tokens=LENGTH)
        assert next(stream) == expected([1], 1)[0]
        pipeline._holds = True
        stream.close()
        pipeline.release()
        del stream
        gc.collect()
        assert generator.generate([[2]] * SLOTS, max_new_tokens=3) == [expected([2], 3)] * SLOTS


def test_a_stream_that_is_closed_before_its_first_token_ends_its_sequence(pipeline):
    with opened(pipeline) as generator:
        pipeline._holds = True
        generator.stream([1], max_new_tokens=LENGTH).close()
        pipeline.release()
        assert generator.generate([[2]] * SLOTS, max_new_tokens=3) == [expected([2], 3)] * SLOTS
        assert generator.stats().num_failed == 1


def test_a_caller_waits_for_no_more_sequences_of_another_one_than_it_has_itself(pipeline):
    """It waited for all of them: 59 s behind a request of 256."""
    ended, many, few = [], [[1]] * 12, [[2]] * 2
    pipeline._holds = True
    with opened(pipeline) as generator:
        for prompts in (many, few):
            some = [new_generation(prompt, None, Sampling(3), generator.capacity) for prompt in prompts]
            for one in some:
                one.future.add_done_callback(lambda _, prompt=prompts[0]: ended.append(prompt))
            generator.submit_all(some)
        wait_until(lambda: generator.num_running == SLOTS)
        pipeline.release()
    places = [place for place, prompt in enumerate(ended) if prompt == [2]]
    assert len(ended) == 14 and places[-1] < SLOTS + 2 * len(few), places


def test_a_stream_that_nobody_reads_takes_no_slot_for_ever(pipeline):
    with opened(pipeline) as generator:
        streams = [generator.stream([number], max_new_tokens=5) for number in range(2 * SLOTS)]
        assert generator.generate([[50]], max_new_tokens=5) == [expected([50], 5)]
        assert [list(stream) for stream in streams] == [expected([number], 5) for number in range(2 * SLOTS)]


@pytest.mark.parametrize(
    ("prompt", "options", "fault"),
    [
        ([], {}, r"\(1 fault\):\n.*it is empty"),
        ("text", {}, "a prompt is ids, but is 'text'.* call stream_text"),
        ([1] * 81, {}, "81 tokens, and the caches hold 80"),
        ([1] * 80, {"max_new_tokens": 2}, "max_length 80 leaves room for 1 new ones, and max_new_tokens is 2"),
        ([0, VOCABULARY, -1], {"max_new_tokens": 1}, r"97 is no token id; ids are 0 to 96 \(2 such tokens\)"),
        (["a"], {"max_new_tokens": 1}, "'a' is no token id"),
        (torch.zeros(1, 3), {}, "one prompt at a time"),
        (np.array([0, VOCABULARY]), {"max_new_tokens": 1}, "97 is no token id"),
        (list(np.array([0, VOCABULARY])), {"max_new_tokens": 1}, "^[^.]* 97 is no token id"),
        (None, {}, "a prompt is ids, but is None; give a list of integers"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens must be at least 1"),
        ([1], {"heat": 2}, "no option 'heat'; there are max_new_tokens"),
    ],
)
def test_bad_prompts_are_refused_with_the_way_out(pipeline, prompt, options, fault):
    with opened(pipeline) as generator:
        for call in (generator.submit, generator.stream):
            with pytest.raises(UsageError, match=fault):
                call(prompt, **options)
        with pytest.raises(UsageError, match=fault):
            generator.generate([[1], prompt], **options)
    assert pipeline.steps == []


@pytest.mark.parametrize(
    ("call", "fault"),
    [
        (lambda one: one.generate(None), "prompts must be Iterable, but is None"),
        (lambda one: one.generate([1, 2]), "a prompt is ids, but is 1; give a list of integers for each prompt"),
        (lambda one: one.generate([[1]], stop=5), "stop must be str or Sequence, but is 5"),
        (lambda one: one.stream([1], on_token=print), "leave out on_token"),
        (lambda one: one.stream_text(5), "prompt must be str, but is 5"),
    ],
)
def test_arguments_of_other_types_are_refused_by_name(pipeline, call, fault):
    with opened(pipeline) as generator, pytest.raises(UsageError, match=fault):
        call(generator)


@pytest.mark.parametrize("kind", [StageError, WorkerError])
def test_a_sequence_fails_alone(pipeline, kind):
    pipeline.poison = kind("poison")
    with opened(pipeline) as generator:
        futures = [generator.submit(prompt, max_new_tokens=4) for prompt in ([1, 2], [POISON], [3], [4, NOT_FINITE])]
        assert [futures[0].result(), futures[2].result()] == [expected([1, 2], 4), expected([3], 4)]
        with pytest.raises(kind, match="poison"):
            futures[1].result()
        with pytest.raises(StageError, match="after token 2 of a sequence are not finite"):
            futures[3].result()
        assert generator.stats().num_failed == 2


def test_a_function_for_tokens_that_raises_ends_its_sequence_alone(pipeline):
    def refuse(token):
        raise ZeroDivisionError

    with opened(pipeline) as generator:
        bad, good = generator.submit([1], on_token=refuse), generator.submit([2], max_new_tokens=3)
        assert good.result() == expected([2], 3)
        assert isinstance(bad.exception(), ZeroDivisionError)


def test_full_caches_and_a_full_queue():
    pipeline = Pipeline(SLOTS, LENGTH, holds=True)
    with opened(pipeline, queue_capacity=2) as generator:
        running = []
        for number in range(3):
            running.append(generator.submit([number], max_new_tokens=2))
            while generator.num_running <= number:
                time.sleep(0.001)
        waiting = [generator.submit([number], max_new_tokens=2) for number in range(3, 5)]
        with pytest.raises(RefusedError, match=r"2 sequences are waiting \(limit 2\) and 3 have a place"):
            generator.submit([9], timeout_s=0)
        late = threading.Timer(0.05, pipeline.release)
        late.start()
        last = generator.submit([9], max_new_tokens=2)  # waits until there is room
        assert [one.result() for one in [*running, *waiting, last]] == [expected([number], 2) for number in (0, 1, 2, 3, 4, 9)]
        late.join()
    pipeline.close()


def test_lower_priority_gets_a_slot_sooner_and_late_sequences_end():
    pipeline, many = Pipeline(SLOTS, LENGTH, holds=True), range(2 * SLOTS)
    with opened(pipeline) as generator:
        with generator._turns._changed:  # so that all of them are there before the first step
            late = generator.submit([1], deadline_s=1e-6)
            ones = [generator.submit([one], max_new_tokens=2, priority=-one) for one in many]
        with pytest.raises(DeadlineError, match="after 0 new tokens"):
            late.result()
        assert [one.tokens[0] for one in generator._turns._schedulers[0]._running] == [5, 4, 3]
        pipeline.release()
        assert [future.result() for future in ones] == [expected([one], 2) for one in many]
    pipeline.close()


@pytest.mark.parametrize("options", [{"priority": None}, {"priority": "high"}, {"deadline_s": "1"}, {"on_token": "print"}])
def test_options_of_other_types_are_refused_and_end_no_other_sequence(options):
    pipeline = Pipeline(SLOTS, LENGTH, holds=True)
    with opened(pipeline) as generator:
        others = [generator.submit([number], max_new_tokens=2) for number in range(2 * SLOTS)]
        with pytest.raises(UsageError, match=f"{next(iter(options))} must be .*, but is "):
            generator.submit([1], max_new_tokens=2, **options)
        pipeline.release()
        assert [one.result() for one in others] == [expected([number], 2) for number in range(2 * SLOTS)]
    pipeline.close()


def test_cancelled_and_late_sequences_free_their_slots():
    pipeline = Pipeline(SLOTS, LENGTH, holds=True)
    with opened(pipeline) as generator:
        gone = [generator.submit([number], max_new_tokens=30) for number in range(SLOTS)]
        late = generator.submit([7], deadline_s=1e-6)
        assert all(future.cancel() for future in gone)
        pipeline.release()
        assert isinstance(late.exception(), DeadlineError)
        assert generator.generate([[8]], max_new_tokens=2) == [expected([8], 2)]
    pipeline.close()


def test_a_pipeline_that_gives_up_fails_all(pipeline):
    with opened(pipeline) as generator:
        pipeline.failure = WorkerError("gone")
        pipeline.outcome = lambda inputs, variant: pipeline.failure
        with generator._turns._changed:  # so that all of them are there before the first step
            futures = [generator.submit([number]) for number in range(2 * SLOTS)]
        assert {type(future.exception()) for future in futures} == {WorkerError}
        with pytest.raises(WorkerError, match="gone"):
            generator.submit([1])


def test_an_error_of_the_scheduler_itself_fails_all_and_hangs_nobody(pipeline, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda error: None)
    with opened(pipeline) as generator:
        pipeline.outcome = lambda inputs, variant: torch.zeros(0)  # no tokens
        with generator._turns._changed:  # so that all of them are there before the first step
            futures = [generator.submit([number]) for number in range(2 * SLOTS)]
        assert {type(future.exception(30)) for future in futures} == {IndexError}
        with pytest.raises(IndexError):
            generator.submit([1])


def test_close_answers_what_was_taken_in_or_fails_it(pipeline):
    generator = opened(pipeline)
    futures = [generator.submit([number], max_new_tokens=5) for number in range(8)]
    generator.close()
    assert [future.result() for future in futures] == [expected([number], 5) for number in range(8)]
    with pytest.raises(RefusedError, match="closed"):
        generator.submit([1])
    generator = opened(pipeline)
    future = generator.submit([1], max_new_tokens=LENGTH)
    generator.close(drain=False)
    assert isinstance(future.exception(), RefusedError) or future.result() == expected([1], LENGTH)


def test_callbacks_may_submit_and_may_not_close(pipeline):
    found, done = [], threading.Event()
    with opened(pipeline) as generator:

        def again(_):
            found.append(generator.submit([4], max_new_tokens=2))
            with pytest.raises(UsageError, match="another thread"):
                generator.close()
            done.set()

        generator.submit([3], max_new_tokens=1).add_done_callback(again)
        assert done.wait(30)
        assert found[0].result() == expected([4], 2)

"""The health of a worker: what the kernel says of its process now."""

import mmap
import os

from pipelines import double, local

from autosplit.running.monitor import worker_health
from autosplit.running.statusblock import STATUS_WORDS


def test_resident_bytes_are_those_that_the_process_holds_now() -> None:
    stage, words = local("stage0", double, "x", "y"), memoryview(bytearray(8 * STATUS_WORDS)).cast("q")
    before = worker_health(stage, 0, os.getpid(), True, words, 0).resident_bytes
    with mmap.mmap(-1, 32 << 20) as block:
        block.write(b"1" * (32 << 20))
        assert worker_health(stage, 0, os.getpid(), True, words, 0).resident_bytes - before > 24 << 20
    assert worker_health(stage, 0, os.getpid(), False, words, 0).resident_bytes == 0

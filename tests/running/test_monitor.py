"""The health of a worker: what the kernel says of its process now."""

import mmap
import os
from types import SimpleNamespace
from typing import Any

from autosplit.running.monitor import worker_health
from autosplit.running.statusblock import STATUS_WORDS


def test_resident_bytes_are_those_that_the_process_holds_now() -> None:
    words = memoryview(bytearray(8 * STATUS_WORDS)).cast("q")
    alive: Any = SimpleNamespace(pid=os.getpid(), alive=lambda: True)
    before = worker_health("net", "stage0", 0, "cpu:0", alive, words, 0).resident_bytes
    with mmap.mmap(-1, 32 << 20) as block:
        block.write(b"1" * (32 << 20))
        assert worker_health("net", "stage0", 0, "cpu:0", alive, words, 0).resident_bytes - before > 24 << 20
    dead: Any = SimpleNamespace(pid=os.getpid(), alive=lambda: False)
    assert worker_health("net", "stage0", 0, "cpu:0", dead, words, 0).resident_bytes == 0

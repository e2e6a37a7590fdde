"""The modules that a worker has loaded for its stage: after a swap of weights, requests choose theirs by number."""

from dataclasses import replace
from typing import TYPE_CHECKING

from autosplit.devices.forking import freed_memory_returned
from autosplit.running.messages import Version, WorkerConfig
from autosplit.running.modules import Module

if TYPE_CHECKING:
    from autosplit.backends.base import Runnable


class Versions:
    """The modules of a stage, oldest first; swapped weights make a new version.

    Attributes:
        num_contexts: requests that the stage can work on at once; above 1 they are begun one by one.
    """

    def __init__(self, config: WorkerConfig) -> None:
        self.num_contexts = 1
        self._config = config
        self._used: list[tuple[Version, Runnable]] = []

    @property
    def note(self) -> str:
        """The remark of the newest module about itself, or ''."""
        return str(getattr(self._used[-1][1], "note", ""))

    def load(self, module: Module) -> None:
        """Load a module beside those in use, and warm it up."""
        stage = replace(self._config.stage, module=module)
        with freed_memory_returned():
            run = stage.load(self._config.replica, shared=self._config.spin_s == 0)
        self._loaded = module, run
        stage.warm_up(run)

    def use(self, first: int) -> None:
        """From request ``first`` on use the module that was loaded last."""
        module, run = self._loaded
        self._used.append((Version(first, module), run))
        self.num_contexts = getattr(run, "num_contexts", 1)

    def of(self, sequence: int) -> "tuple[Version, Runnable]":
        """The module of a request. A version is dropped once none of its requests can be replayed."""
        used = self._used
        while len(used) > 1 and sequence >= used[1][0].first + self._config.status_block.num_places:
            used.pop(0)
        if len(used) == 1:
            return used[0]
        return next(one for one in reversed(used) if one[0].first <= sequence)

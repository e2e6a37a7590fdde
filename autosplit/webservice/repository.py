"""Repository: models by name, each a plan file that runs as a network of one host."""

import itertools
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from autosplit.backends.workspace import Workspace
from autosplit.deploying.networks import deploy
from autosplit.deploying.replanning import devices_left
from autosplit.deploying.setup import Setup
from autosplit.errors import RefusedError, UsageError, raise_faults
from autosplit.generating.generators import Generator
from autosplit.generating.opening import generator_on
from autosplit.keeping import stored_profile
from autosplit.loadedplan import LoadedPlan, load
from autosplit.parsing import shown
from autosplit.running.engine import Engine
from autosplit.running.wiring import Replan
from autosplit.serving.hostmanager import HostManager
from autosplit.shapes.service import ShapedService
from autosplit.tracing.importing import same_function
from autosplit.tracing.tensorspec import TensorSpec
from autosplit.values.plan import Plan
from autosplit.values.planfile import read_plan
from autosplit.webservice.tensors import FIXED, Free, unserved

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")

MOST_CALLS = 16
"""Most calls to load or unload a model that may wait for each other; a further one is refused."""


@dataclass(frozen=True)
class ServedModel:
    """One version of a model that takes requests.

    Attributes:
        name: its name in the protocol.
        version: 1 for the first plan under this name, one more for each that replaced another.
        networks: its network of the host, or one for each replica of a model that generates: a sequence stays in one.
        inputs: the tensors of a request.
        outputs: the tensors of an answer.
        kept: its resources while it runs; closed once it was unloaded.
        free: axes of inputs and outputs that may have any size up to the spec's.
        service: joins and pads requests of several sizes; None for requests of one size, which go to the network.
        generator: continues sequences, for a model that generates; the model then has no inputs and outputs.
        created_s: when it was loaded, in seconds since 1970.
    """

    name: str
    version: int
    networks: tuple[str, ...]
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    kept: ExitStack = field(repr=False, compare=False)
    free: Free = field(default_factory=dict)
    service: ShapedService | None = None
    generator: Generator | None = None
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def num_sequences(self) -> dict[str, int] | None:
        """Sequences without and with a place in the caches; None where the model does not generate."""
        found = self.generator
        return None if found is None else {"num_waiting": found.num_waiting, "num_running": found.num_running}

    def close(self, *, drain: bool) -> None:
        """Close the service over the network, after the last answer; without ``drain`` sequences fail."""
        if self.service is not None:
            self.service.close()
        if self.generator is not None:
            self.generator.close(drain=drain)


class Repository:
    """Models by name. Requests may be sent from any thread; calls to load and unload are carried out one after the other.

    Args:
        host: runs the models.
        plans: name to plan file, for models that may be loaded.
        folder: further plan files, each under its name without ``.yaml``; looked through again at each call.
        trusted: specs of models in code of the user's own, which plans may name.
        devices: names of the devices on which plans may go on after one was lost, by profiles in the folder ``store``: those of
            plans for requests of one size. By default those of each plan, and a lost device ends it.
    Raises: UsageError: a name that the protocol cannot hold.
    """

    def __init__(
        self,
        host: HostManager,
        plans: Mapping[str, Path],
        folder: Path | None = None,
        trusted: Sequence[str] = (),
        devices: str | None = None,
        store: Path | None = None,
    ) -> None:
        faults = [f"'{name}' is no name of a model; use letters, digits, _ . -" for name in plans if not _NAME.fullmatch(name)]
        raise_faults(UsageError, "the models cannot be served", faults)
        self._host, self._plans, self._folder, self._trusted = host, dict(plans), folder, tuple(trusted)
        self._devices, self._store = devices, store
        self._served: dict[str, ServedModel] = {}
        self._versions: dict[str, Iterator[int]] = {}
        self._free_calls = threading.Semaphore(MOST_CALLS)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="autosplit-repository")

    def get(self, name: str) -> ServedModel | None:
        """A model that takes requests; None if there is none of this name."""
        return self._served.get(name)

    @property
    def served(self) -> list[ServedModel]:
        """The models that take requests."""
        return list(self._served.values())

    def files(self) -> dict[str, Path]:
        """Name to plan file, of all models that may be loaded."""
        found = {} if self._folder is None else {path.stem: path for path in sorted(self._folder.glob("*.yaml"))}
        return {**{name: path for name, path in found.items() if _NAME.fullmatch(name)}, **self._plans}

    def is_ready(self, model: ServedModel) -> bool:
        """Whether each copy of each stage of a model is at work."""
        try:
            engines = [self._host[network] for network in model.networks]
        except (UsageError, RefusedError):
            return False
        return all(engine.failure is None and all(worker.state != "dead" for worker in engine.health()) for engine in engines)

    def load(self, name: str) -> "Future[None]":
        """Load a model, or load its plan file again: requests go to the new version once all of its stages are ready.

        The future raises: UsageError: there is no such plan file. RefusedError: too many calls. What ``loadedplan.load`` and
        ``deploy`` raise. The version before goes on then.
        """
        return self._call(partial(self._load, name))

    def unload(self, name: str) -> "Future[None]":
        """Take a model out of service after its last answer. The future raises: UsageError: it is not in service."""
        return self._call(partial(self._unload, name))

    def close(self) -> None:
        """End the calls under way. The host closes the networks."""
        self._thread.shutdown(cancel_futures=True)
        for model in self.served:
            model.close(drain=False)
            model.kept.close()

    def _call(self, work: "partial[None]") -> "Future[None]":
        if not self._free_calls.acquire(blocking=False):
            raise RefusedError(f"{MOST_CALLS} calls to load or unload models wait already; try again later")
        future = self._thread.submit(work)
        future.add_done_callback(lambda _: self._free_calls.release())
        return future

    def _load(self, name: str) -> None:
        files = self.files()
        if name not in files:
            raise UsageError(f"there is no plan for a model {shown(name)}; there are plans for: {', '.join(files) or 'none'}")
        spec = read_plan(files[name]).model.spec
        loaded = load(files[name], next((one for one in self._trusted if same_function(one, spec)), None), devices=self._devices)
        graph, specs, family = loaded.traced.graph, loaded.traced.specs, loaded.family
        generates = loaded.plan.sequences is not None
        names = ((), ()) if generates else (graph.inputs, graph.outputs)
        inputs, outputs = (tuple(specs[one] for one in some) for some in names)
        raise_faults(UsageError, f"model '{name}' cannot be served", unserved((*inputs, *outputs)))
        version = next(self._versions.setdefault(name, itertools.count(1)))
        with ExitStack() as kept, ExitStack() as undone:
            workspace, networks = kept.enter_context(Workspace()), list[str]()
            replan = None if generates else self._replan(loaded, kept)

            def deployed(plan: Plan) -> Engine:
                its_name = f"{name}/{version}" + f"/{len(networks)}" * bool(networks)
                engine = deploy(self._host, its_name, family or loaded.traced, plan, loaded.machine, workspace, replan)
                undone.callback(self._host.remove_network, its_name)
                networks.append(its_name)
                return engine

            service, free, generator = None, FIXED, None
            if family is not None and generates:
                generator = generator_on(deployed, family, loaded.plan)
            else:
                engine = deployed(loaded.plan)
                if family is not None:
                    service, free = ShapedService(family, engine), {**family.dims, **family.out_dims}
            workspace.keep_files_only()
            before, named = self._served.get(name), (name, version, tuple(networks))
            self._served[name] = ServedModel(*named, inputs, outputs, kept.pop_all(), free, service, generator)
            undone.pop_all()
        if before is not None:
            self._remove(before)

    def _replan(self, loaded: LoadedPlan, kept: ExitStack) -> Replan | None:
        """The function that a pipeline calls when it loses a device. Raises: UsageError: no profile is stored."""
        if self._devices is None:
            return None
        profile = stored_profile(loaded.traced, loaded.plan, loaded.machine, Setup(store=self._store))
        if profile is None:
            name = loaded.traced.graph.name
            raise UsageError(f"no profile of '{name}' is stored for {self._devices}; run autosplit profile, or omit --devices")
        return kept.enter_context(devices_left(loaded.family or loaded.traced, loaded.plan, profile, loaded.machine))

    def _unload(self, name: str) -> None:
        model = self._served.pop(name, None)
        if model is None:
            raise UsageError(f"model {shown(name)} is not in service")
        self._remove(model)

    def _remove(self, model: ServedModel) -> None:
        with model.kept:
            model.close(drain=True)
            for network in model.networks:
                self._host.remove_network(network)

"""measure(): a model on the devices of this machine becomes a Profile, from the store where nothing changed.

One pinned worker for each device. Each backend has a turn, and what it gave is stored before the next one begins; then all
have a second turn, and a third one those whose devices slowed each other down, or met a slow moment twice.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from math import isfinite
from pathlib import Path

from autosplit.deploying.workspace import Workspace
from autosplit.devices import discovering
from autosplit.devices.accelerators import Facts, is_accelerator
from autosplit.devices.processes import WorkerProcess
from autosplit.errors import BackendError
from autosplit.measuring.asking import (
    able_backends,
    handed_over,
    refused_devices,
    require_measurable,
    settings_of,
    stamps_of,
)
from autosplit.measuring.attributing import attribute, proportional, value_aliases, without_stretched
from autosplit.measuring.bench import open_bench
from autosplit.measuring.cutting import loses_at_cuts, typical_cut
from autosplit.measuring.links import LinkBench
from autosplit.measuring.parts import Part, graph_of, joined
from autosplit.measuring.recalling import recall, recall_links
from autosplit.measuring.steps import Progress, Step, Steps
from autosplit.measuring.store import Store
from autosplit.measuring.timing import PREEMPTED_S, Rounds, Timed
from autosplit.measuring.turns import ALONE_S, CUT_S, TURN_S, Turns, sampled, seems_slowed
from autosplit.measuring.worker import Prepared
from autosplit.tracing.capturing import Traced
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.profile import Profile
from autosplit.values.samples import Measured, Precision, Provenance, Setting

WAITED_LIMIT = 0.03
"""A worker that waited longer than this share of its time for its core was not alone there."""
MAX_AT_ONCE = 16
"""Devices that time a model at once; more would need more memory than a pipeline of the model does."""

NUM_PASSES = 12
"""Of each backend on each device: a reference, a warm-up, one to rouse it, two rounds of two, some alone, and then three more."""


def measure(
    traced: Traced,
    machine: Machine,
    backends: Sequence[str] = ("eager",),
    *,
    threads: Mapping[str, Sequence[int]] | None = None,
    store: Store | Path | None = None,
    budget_s: float | None = None,
    progress: Callable[[Progress], None] | None = None,
    remeasure: bool = False,
    links: bool = True,
    precision: Precision = "f32",
    workspace: Workspace | None = None,
) -> Profile:
    """Seconds of every op of a model on every device and backend, and of the links between the devices.

    Args:
        traced: the model.
        machine: the devices; CPU core sets and CUDA devices.
        backends: names, eager first or not at all.
        threads: device name to the thread counts to measure; by default one thread for each core.
        store: where measurements are kept and reused; None keeps nothing.
        budget_s: seconds that timing may take, start-up and exports left out; by default about 1.4 s for each backend, and at
            least two passes in each of two turns.
        progress: called with the share done and the seconds left.
        remeasure: measure again what is stored.
        links: measure the links too, unless they are stored.
        precision: what the backends compute in; those that cannot are left out.
        workspace: where the model is saved and prepared, if a search or a run is to find it there.
    Returns: a profile whose notes say what was measured again, and why. A backend that refuses the model or the precision, or
        gives wrong numbers, is left out, with a note, unless it is the only one.
    Raises:
        DeviceError: a device that this machine does not have, or that has no cores.
        BackendError, MissingExtraError: the only backend refuses the model, or a runtime is not installed.
        WorkerError: a worker died or an op failed in it; what was measured before is kept in the store.
    """
    require_measurable(machine, backends)
    backends, refused = able_backends(backends, precision)
    refused += refused_devices(machine, backends)
    keeper = Store(store) if isinstance(store, Path) else store
    wanted = settings_of(machine, backends, threads)
    job = _Job(traced, machine, wanted, keeper, stamps_of(backends, precision), Steps(progress), precision, workspace)
    exclusive = partial(keeper.measuring, job.steps.wait) if keeper is not None else nullcontext
    profile = Profile.empty(traced.graph, precision) if remeasure else job.known()
    known = (recall_links(machine, keeper, job.link_stamp) if keeper is not None and not remeasure else None) if links else ()
    with ExitStack() as stack:
        linking = stack.enter_context(LinkBench(machine.devices)) if known is None else None
        if len(profile.measured) < len(set(wanted)):
            with exclusive():
                # Another process may have measured the same while this one waited for its turn.
                profile = profile if remeasure else replace(job.known(), notes=profile.notes)
                profile = job.measure_missing(profile, budget_s, linking)
        if linking is not None and not linking.found:
            with exclusive(), linking.own_workers() as workers:
                job.measure_links(linking, workers)
        profile = profile.with_links(linking.found if linking is not None else known or ())
    job.steps.finish()
    return replace(profile, notes=(*refused, *handed_over(profile, wanted), *profile.notes))


@dataclass(frozen=True)
class _Job:
    """One call of ``measure``: what is wanted, where it is kept, and what measurements are stamped with."""

    traced: Traced
    machine: Machine
    wanted: Sequence[Setting]
    store: Store | None
    stamps: Mapping[str, Provenance]
    steps: Steps
    precision: Precision
    workspace: Workspace | None

    @cached_property
    def facts(self) -> Mapping[str, Facts]:
        """What the accelerators of the machine are."""
        return discovering.facts_of(tuple(device.name for device in self.machine.devices if is_accelerator(device)))

    @property
    def graph(self) -> Graph:
        return self.traced.graph

    @property
    def stamp(self) -> Provenance:
        """What is stamped with no backend, such as links: any of them."""
        return next(iter(self.stamps.values()))

    @property
    def link_stamp(self) -> Provenance:
        """The same with the accelerators that links lead to."""
        parts = {f"{name} {key}": value for name, facts in self.facts.items() for key, value in facts.identity.items()}
        return replace(self.stamp, accelerator=parts)

    def known(self) -> Profile:
        """What the store holds of the wanted settings and is still true."""
        if self.store is None:
            return Profile.empty(self.graph, self.precision)
        return recall(self.graph, self.machine, self.wanted, self.store, self.stamps, self.precision, self.facts)

    def measure_missing(self, profile: Profile, budget_s: float | None, linking: LinkBench | None) -> Profile:
        """Measure each group of settings that lacks one, and store it as soon as it is done."""
        groups = [group for group in _groups(self.wanted) if any(setting not in profile.measured for setting in group)]
        if not groups:
            return profile
        turn_s = TURN_S if budget_s is None else max(0.05, 0.45 * budget_s / len(groups))
        rounds = Rounds(turn_s, least=2)
        self._plan_steps([group[0].backend for group in groups], turn_s)
        refused: dict[str, str] = {}
        parts = [_batches(group, MAX_AT_ONCE) for group in groups]
        with open_bench(self.traced, self.machine, linking, self.workspace) as bench:
            turns = Turns(bench, self.machine, self.precision, self.graph.weight_bytes * sum(map(len, groups)))
            early = self._make_ready(turns, parts, refused)
            for batches in parts:
                name = batches[0][0].backend
                for part in batches:
                    if name not in refused:
                        with self._refusing(name, refused):
                            profile = self._first_turn(profile, part, turns, rounds, early if part is parts[0][0] else {})
                self.steps.done()
            if linking is not None:
                self.measure_links(linking, bench.workers)
            twice = [b for b in parts if b[0][0].backend not in refused and not bench.is_divided(b[0][0].backend)]
            for batches in parts:
                profile = self._measure_again(profile, batches if batches in twice else [], turns, rounds)
                self.steps.done()
            for batches in twice:
                slowed = [part for part in batches if any(seems_slowed(profile.measured[setting]) for setting in part)]
                profile = self._measure_again(profile, slowed, turns, rounds)
        return replace(profile, notes=(*profile.notes, *refused.values()))

    def _plan_steps(self, backends: Sequence[str], turn_s: float) -> None:
        """What a measurement will do, for the backends of its groups."""
        names = dict.fromkeys(backends)
        self.steps.plan([Step(f"preparing {name}", 1.0 if name == "eager" else 6.0) for name in names])
        self.steps.plan([Step("starting the workers", 2.0)])
        self.steps.plan([Step(f"timing {name}", turn_s + ALONE_S + CUT_S + 2.0) for name in backends])
        self.steps.plan([Step(f"timing {name} once more", turn_s / 2) for name in backends])

    def _make_ready(
        self, turns: Turns, parts: Sequence[Sequence[Sequence[Setting]]], refused: dict[str, str]
    ) -> Mapping[str, Prepared]:
        """Prepare all backends; the answers of the devices of the first batch, which are ready by then if it is of eager.

        The workers start, load the model and warm up in eager while the host prepares the other backends: both leave cores
        idle. Weights of ops are timed, so a backend that wants them waits until the host is quiet.
        """
        bench, first = turns.bench, parts[0][0]
        bench.load(self.machine.devices)
        for name in dict.fromkeys(batches[0][0].backend for batches in parts):
            with self._refusing(name, refused):
                bench.prepare(name, self.precision)
                if name == "eager":
                    bench.begin(turns.prepares(first))
            self.steps.done()
        early = bench.finish()
        bench.take_canaries(self.machine.devices)
        self.steps.done()
        return early if first[0].backend == "eager" else {}

    def _first_turn(
        self, profile: Profile, group: Sequence[Setting], turns: Turns, rounds: Rounds, early: Mapping[str, Prepared]
    ) -> Profile:
        """The first turn of one setting on each device, on what is left of the model where its backend fails on the whole."""
        try:
            return self._measure_group(profile, group, turns, rounds, early)
        except BackendError as failure:
            turns.bench.divide(group[0].backend, self.precision, failure)
            return self._measure_group(profile, group, turns, rounds, {})

    @contextmanager
    def _refusing(self, backend: str, refused: dict[str, str]) -> Iterator[None]:
        """Note why a backend refuses the model, or gives wrong numbers; raise it if there is no other one."""
        try:
            yield
        except BackendError as failure:
            if len({setting.backend for setting in self.wanted}) == 1:
                raise
            refused[backend] = f"{backend} is left out: {failure}"

    def _measure_group(
        self, profile: Profile, group: Sequence[Setting], turns: Turns, rounds: Rounds, early: Mapping[str, Prepared]
    ) -> Profile:
        """The first turn of one setting on each device; ``early``: the answers of devices that are ready already.

        Raises: BackendError: a worker cannot load it, or the numbers are wrong.
        """
        backend, bench = group[0].backend, turns.bench
        parts = bench.parts(backend)
        shared = replace(rounds, seconds=rounds.seconds / len(parts))
        found = [self._measure_part(profile, group, turns, part, shared, early) for part in parts]
        cuts = turns.cuts(group, rounds) if not bench.is_divided(backend) else {}
        for setting in group:
            measured = joined([part[setting][0] for part in found], bench.refused(backend))
            busy = _disturbed(max(part[setting][1] for part in found))
            stamp = replace(
                self.stamps[setting.backend],
                date=datetime.now(UTC).isoformat(timespec="seconds"),
                canary_s=bench.canaries[setting.device],
                note=busy,
                accelerator=self.facts[setting.device].identity if setting.device in self.facts else {},
            )
            if busy:
                note = f"{setting}: {busy}; measure again (--remeasure) when it is quiet"
                profile = replace(profile, notes=(*profile.notes, note))
            cut = float(f"{cuts[setting.device]:.3g}") if setting.device in cuts else None
            measured = replace(measured, provenance=stamp, cut_s_per_byte=cut)
            kept = tuple(stage for stage in profile.stages if stage.setting != setting)
            profile = replace(profile, stages=kept).with_measured(setting, measured)
        if self.store is not None:
            self.store.save(self.graph, profile, group)
        uncut = [setting.device for setting in group if setting.device not in cuts and not bench.is_divided(backend)]
        uncut = [device for device in uncut if not is_accelerator(self.machine[device])]
        if uncut and loses_at_cuts(backend) and typical_cut(self.graph) is not None:
            note = f"{backend} on {', '.join(uncut)}: what a cut costs could not be timed"
            note = f"{note}, so plans with several stages there may be slower than predicted"
            profile = replace(profile, notes=tuple(dict.fromkeys((*profile.notes, note))))
        return profile

    def _measure_part(
        self,
        profile: Profile,
        group: Sequence[Setting],
        turns: Turns,
        part: Part,
        rounds: Rounds,
        early: Mapping[str, Prepared],
    ) -> dict[Setting, tuple[Measured, float]]:
        """What was measured of some of the ops in each setting, and the share of the time that others had its core."""
        bench = turns.bench
        bench.require(self.machine.devices, part)
        weights = [setting for setting in group if setting.backend != "eager" and _eager(profile, setting) is None]
        prepared, timed, alone = turns.first(group, rounds, weights, early)
        graph = graph_of(self.graph, part)
        values = value_aliases(graph)
        kept_names = bench.names(group[0].backend, part)
        names = {**values, **{name: values[source] for name, source in kept_names.items() if source in values}}
        found = {}
        for setting in group:
            ready = prepared[setting.device]
            measured = _measured(graph, setting, timed[setting.device], names, _eager(profile, setting) or ready.weights)
            measured = replace(measured, alone=alone.get(setting.device), error=float(f"{ready.error:.3g}"))
            found[setting] = measured, timed[setting.device].waited
        return found

    def _measure_again(self, profile: Profile, groups: Sequence[Sequence[Setting]], turns: Turns, rounds: Rounds) -> Profile:
        """One more turn of settings of a backend that had their first."""
        for group in groups:
            turns.bench.require(self.machine.devices, turns.bench.parts(group[0].backend)[0])
            for setting, measured in turns.another({setting: profile.measured[setting] for setting in group}, rounds).items():
                profile = profile.with_measured(setting, measured)
            if self.store is not None:
                self.store.save(self.graph, profile, group)
        return profile

    def measure_links(self, linking: LinkBench, workers: Mapping[str, WorkerProcess]) -> None:
        """Measure the machine's links now, by workers that are idle, and store them."""
        self.steps.plan([Step("measuring the links", 2.0)])
        found = linking.measure(workers)
        if self.store is not None:
            self.store.save_links(replace(self.link_stamp, date=datetime.now(UTC).isoformat(timespec="seconds")), found)
        self.steps.done()


def least_s(profile: Profile) -> float:
    """About what it takes at least to measure the model again, or one of the same ops for other microbatches."""
    num_devices = max(1, len({setting.device for setting in profile.measured}))
    wholes_s = [profile.whole_s(*setting) for setting in profile.measured]
    return NUM_PASSES * sum(seconds for seconds in wholes_s if isfinite(seconds)) / num_devices


def _measured(graph: Graph, setting: Setting, timed: Timed, names: Mapping[str, str], weights: Mapping[str, float]) -> Measured:
    """What the rounds say of one setting."""
    whole = sampled(timed.whole_s)
    if setting.backend == "eager":
        pooled: dict[str, list[float]] = {}
        by_op = {node.name: node.samples_s for node in timed.nodes}
        for op in graph.ops:
            pooled.setdefault(op.signature, []).extend(by_op[op.name])
        return Measured({key: sampled(values) for key, values in pooled.items()}, "signature", "in-graph", whole)
    if timed.nodes:
        nodes = without_stretched(timed.nodes, PREEMPTED_S) if timed.waited > WAITED_LIMIT else timed.nodes
        ops, source = attribute(graph, nodes, names, weights)
    else:
        ops, source = proportional(graph, timed.whole_s, weights), "proportional"
    return Measured({op: sampled(samples.samples_s) for op, samples in ops.items()}, "op", source, whole)


def _disturbed(waited: float) -> str:
    """What to note of a device whose worker often had to wait for its core."""
    return f"other processes had the core for {waited:.0%} of the time" if waited > WAITED_LIMIT else ""


def _eager(profile: Profile, setting: Setting) -> dict[str, float] | None:
    """Eager's seconds of every op on the same device and threads, if they were measured."""
    eager = setting._replace(backend="eager")
    if eager not in profile.measured:
        return None
    return {op: profile.op_s(op, *eager) for op in profile.signatures}


def _groups(settings: Sequence[Setting]) -> list[list[Setting]]:
    """Settings to be timed at once: one backend, one setting a device; the second thread count of each device after the first."""
    groups: dict[tuple[str, int], list[Setting]] = {}
    seen: dict[tuple[str, str], int] = {}
    for setting in settings:
        turn = seen[setting.backend, setting.device] = seen.get((setting.backend, setting.device), -1) + 1
        groups.setdefault((setting.backend, turn), []).append(setting)
    return list(groups.values())


def _batches(group: Sequence[Setting], size: int) -> list[Sequence[Setting]]:
    return [group[start : start + size] for start in range(0, len(group), size)]

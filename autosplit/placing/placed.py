"""Placed: a model whose every op has one device and one backend, with the copies between devices as ops."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from autosplit import tables
from autosplit.errors import UsageError, close_names
from autosplit.memory.arena import MemoryPlan
from autosplit.placing.costs import cost_text
from autosplit.placing.drawing import dot_text, draw
from autosplit.placing.interpreting import Runner
from autosplit.placing.moves import DeviceCopy, Reads, copies_of, graph_with, homes_of, program_with
from autosplit.placing.parts import Part, parts_of
from autosplit.placing.sites import Choice
from autosplit.placing.storages import memory_of
from autosplit.planning.predicting import predict, threads_on
from autosplit.tracing.aliasing import Aliases, aliases_of
from autosplit.tracing.capturing import Traced
from autosplit.values.graph import Graph
from autosplit.values.machine import Machine
from autosplit.values.plan import QUEUE_DEPTH, UNKNOWN, Plan, Stage
from autosplit.values.profile import Profile
from autosplit.values.samples import Precision
from autosplit.values.shapes import Shapes


@dataclass(frozen=True, eq=False)
class Placed(tables.Tabular):
    """A placed graph.

    Attributes:
        traced: the model, without copies.
        machine: the devices.
        choices: op name to its site and the reason, for every op.
        removed: a sentence for each explicit copy of the model that is removed because it changes nothing.
        profile: measured seconds, where they are known; ``why`` and ``plan`` read them.
        planned: the planner's own plan, where it placed ops.
        shapes: the sizes of requests, where they have several; the ops and their values are then those of the largest.
    """

    INDEX = "op"
    traced: Traced
    machine: Machine
    choices: Mapping[str, Choice]
    removed: tuple[str, ...] = ()
    profile: Profile | None = None
    planned: Plan | None = None
    shapes: Shapes | None = None

    @property
    def copies(self) -> tuple[DeviceCopy, ...]:
        """The copies between devices, in the order of first use."""
        return self._copies[0]

    @property
    def reads(self) -> Reads:
        """(op, value) to the name of the copy that the op reads in its place."""
        return self._copies[1]

    @cached_property
    def _copies(self) -> tuple[tuple[DeviceCopy, ...], Reads]:
        return copies_of(self.traced.graph, self.choices, self.machine)

    @cached_property
    def graph(self) -> Graph:
        """The graph with the copies as ops."""
        return graph_with(self.traced, self.copies, self.reads)

    @cached_property
    def program(self) -> fx.GraphModule:
        """The flat program with the copies as nodes of ``autosplit.device_copy``."""
        return program_with(self.traced, self.copies, self.reads)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The connected parts on each device, in an order in which each reads only from the ones before it."""
        return parts_of(self.traced.graph, self.choices)

    @cached_property
    def memory(self) -> Mapping[str, MemoryPlan]:
        """The name of each memory to the plan of all values in it; a device without memory of its own has none."""
        memory = {op: self.machine[choice.site.device].memory for op, choice in self.choices.items()}
        filled = {copy.name: self.machine[copy.target].memory for copy in self.copies}
        return memory_of(self.graph, {**memory, **filled}, {**self.homes, **filled}, self.copies, self.aliases)

    @cached_property
    def homes(self) -> Mapping[str, str]:
        """Value name to the name of the memory in which it is made, or first read, without the copies."""
        return {value: self.machine[device].memory for value, device in homes_of(self.traced.graph, self.choices).items()}

    @cached_property
    def aliases(self) -> Aliases:
        """The values of the model that share memory."""
        return aliases_of(self.traced)

    @cached_property
    def devices(self) -> Mapping[str, str]:
        """Op name to device, for the copies too, which fill the memory of their target."""
        return {op: choice.site.device for op, choice in self.choices.items()} | {copy.name: copy.target for copy in self.copies}

    def same_as(self, other: "Placed") -> bool:
        """Whether both put each op of one graph on the same site."""
        mine, theirs = ({op: choice.site for op, choice in one.choices.items()} for one in (self, other))
        return self.traced.graph.hash == other.traced.graph.hash and mine == theirs

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The outputs of the model, computed in this process with a thread for each device; bit for bit the model's on eager.

        Raises: UsageError: other inputs than those of the trace. StageError: an op failed.
        """
        inputs = self.traced.flatten_inputs(*args, **kwargs)
        return self.traced.unflatten_outputs(self.runner(inputs))

    @property
    def runner(self) -> Runner:
        """The parts, compiled for torch's present number of threads: it can change the last bits of eager."""
        threads = torch.get_num_threads()
        if threads not in self._runners:
            self._runners[threads] = Runner.of(self.traced, self.machine, self.parts, self.homes)
        return self._runners[threads]

    @cached_property
    def _runners(self) -> dict[int, Runner]:
        return {}

    def plan(self) -> Plan:
        """The parts as the stages of a pipeline, with a prediction where the profile knows every op in the plan's precision."""
        precisions = {part.site.precision for part in self.parts}
        own: Precision = precisions.pop() if len(precisions) == 1 else "f32"
        stages = []
        for number, part in enumerate(self.parts):
            device, site = part.site.device, part.site
            stage = Stage(f"stage{number}", part.ops, (device,), site.backend, threads_on(self.machine, device))
            stages.append(stage if site.precision == own else replace(stage, precision=site.precision))
        plan = Plan(
            source=self.traced.source,
            graph_hash=self.traced.graph.hash,
            profile_hash=self.profile.hash if self.profile else "",
            stages=tuple(stages),
            prediction=UNKNOWN,
            objective=self.planned.objective if self.planned else "throughput",
            method=f"annotated, {self.planned.method}" if self.planned else "annotated",
            microbatch=self.traced.source.batch,
            queue_depth=self.planned.queue_depth if self.planned else QUEUE_DEPTH,
            precision=own,
            shapes=self.shapes,
        )
        held = {stage.ops: stage.memory for stage in self.planned.stages} if self.planned else {}
        counted = tuple(replace(stage, memory=held.get(stage.ops)) for stage in plan.stages)
        plan = replace(plan, stages=counted).verify(self.traced.graph, self.machine)
        alike = self.profile is not None and {self.profile.precision} == set(plan.precisions)
        known = self.profile.measured if self.profile is not None and alike else {}
        if self.profile is not None and all(setting in known for _, setting in plan.workers):
            bound_s = self.planned.prediction.bound_s if self.planned else 0.0
            return replace(predict(plan, self.traced.graph, self.machine, self.profile, bound_s), status="manual")
        return plan

    def why(self, op: str) -> str:
        """Why an op is on its device, and its seconds on the next best device. Raises: UsageError: there is no such op.

        A copy's reason is the ops that read it.
        """
        copies = {copy.name: copy for copy in self.copies}
        if op in copies:
            copy = copies[op]
            readers = [reader for (reader, _), name in self.reads.items() if name == op]
            return f"'{op}' copies '{copy.value}' from {copy.source} to {copy.target} for {', '.join(map(repr, readers))}"
        if op not in self.choices:
            raise UsageError(f"op '{op}' is not in the placed graph{close_names(op, [*self.choices, *copies])}")
        choice, cost = self.choices[op], cost_text(self.traced.graph, self.choices, self.machine, self.profile, op)
        return f"op '{op}' is on {choice.site} by {choice.reason}{cost}"

    def rows(self) -> list[dict[str, Any]]:
        """One row an op, copies too, in graph order: op, operator, device, backend, bytes of its outputs, storage and offset."""
        rows = []
        for op in self.graph.ops:
            choice, device = self.choices.get(op.name), self.devices[op.name]
            storages = self.memory[self.machine[device].memory].storage_of
            found = [storages[value] for value in op.outputs if value in storages]
            rows.append(
                {
                    "op": op.name,
                    "operator": op.operator,
                    "device": device,
                    "backend": "copy" if choice is None else f"{choice.site.backend} {choice.site.precision}",
                    "output_bytes": sum(self.graph.values[value].num_bytes for value in op.outputs),
                    "storage": ",".join(str(storage.number) for storage in dict.fromkeys(found)) or "-",
                    "offset": found[0].offset if found else None,
                    "by": "copy" if choice is None else choice.kind,
                }
            )
        return rows

    def text(self) -> str:
        """One line an op: name, device, backend, bytes, storage."""
        rows = [
            (
                row["op"],
                row["device"],
                row["backend"],
                tables.bytes_text(row["output_bytes"]),
                "view" if row["offset"] is None else f"storage {row['storage']} at {row['offset']}",
            )
            for row in self.rows()
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)

    def dot(self) -> str:
        """The placed graph in the DOT language: a colour for each device, copies as boxes on dashed edges."""
        return dot_text(self.graph, self.devices, self._labels)

    def picture(self) -> Any:
        """The placed graph as a figure: a colour for each device, copies as marked edges."""
        return draw(self.graph, self.devices, self._labels, self.summary())

    @property
    def _labels(self) -> dict[str, str]:
        return {copy.name: f"{copy.value} to {copy.target}" for copy in self.copies}

    def summary(self) -> str:
        """One sentence: the ops and backends of each device, the copies."""
        counts: dict[str, int] = {}
        for choice in self.choices.values():
            counts[str(choice.site)] = counts.get(str(choice.site), 0) + 1
        where = ", ".join(f"{count} ops on {site}" for site, count in counts.items())
        moved = tables.bytes_text(sum(copy.num_bytes for copy in self.copies))
        gap = self.plan().prediction.gap if self.planned is not None else 0.0
        proof = "" if self.planned is None else f"; within {gap:.1%} of the planner's bound"
        return f"{self.traced.graph.name}: {where}, {len(self.copies)} copies of {moved}{proof}"

    def __repr__(self) -> str:
        return f"Placed({self.summary()})"

    def _repr_html_(self) -> str:
        return tables.html(self.rows(), self.summary()) + str(self.picture().html())

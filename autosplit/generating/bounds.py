"""The bottleneck of each stage of a generator in each phase: computing, reading weights or caches, sending tensors, or the host.

A step of decoding computes little for each weight that it reads, so the bandwidth of memory usually bounds it. Arithmetic
bounds a prefill (Pope et al., "Efficiently scaling transformer inference", MLSys 2023).
"""

import time
from collections.abc import Callable
from math import inf
from typing import Any

import torch

from autosplit.generating.forecast import devices_of, replicas_of, stage_seconds
from autosplit.generating.phases import PhaseProfile
from autosplit.generating.steps import TOKENS, StepFamily
from autosplit.planning.predicting import moved_s
from autosplit.tracing.programs import arguments_of, states_of, weight
from autosplit.values.machine import Machine
from autosplit.values.plan import Plan

READ_BYTES = 256 << 20
"""Bytes that are read to measure the bandwidth of memory: more than the caches of a processor hold."""

BOUNDS = {
    "weights_s": "memory bandwidth",
    "cache_s": "cache",
    "transfer_s": "transfer",
    "host_s": "host",
    "compute_s": "compute",
}
"""The limits in words."""


def memory_bytes_per_s(num_threads: int = 1) -> float:
    """The bandwidth of memory for so many threads here: the fastest of three ways to read ``READ_BYTES``."""
    values, found, threads = torch.ones(READ_BYTES // 4), 0.0, torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        ways: list[tuple[Callable[..., object], tuple[torch.Tensor, ...]]] = [
            (torch.sum, (values,)),
            (torch.dot, (values, values)),
            (torch.mv, (values.view(-1, 1024), values[:1024])),
        ]
        for read, tensors in ways:
            begun_s = time.perf_counter()
            read(*tensors)
            found = max(found, READ_BYTES / (time.perf_counter() - begun_s))
    finally:
        torch.set_num_threads(threads)
    return found


def state_bytes(family: StepFamily) -> dict[str, int]:
    """The bytes of the caches that each op of a step keeps."""
    program = family.variants[0].program
    return {node.name: sum(weight(program, name).nbytes for name in states_of(node)) for node in program.graph.nodes}


def read_bytes(family: StepFamily, group: int, decodes: bool) -> dict[str, float]:
    """The bytes of caches that each attention of a step reads, for a group of sequences in the middle of usual answers.

    Where a model has an encoder, a token sees the earlier ones of its answer in one cache, and all rows of its source in another.
    Of a window it sees no more than that. Tokens of a chunk of a prompt see half of the prompt in the mean, and read it together.

    Args:
        family: the steps, and the sequences.
        group: the sequences of a step.
        decodes: whether the step holds no tokens of prompts.
    """
    sequences, source, program = family.sequences, family.source, family.variants[0].program
    length = sequences.new / 2 + (sequences.prompt if source is None else source.num_start)
    num_rows = 0 if source is None else source.num_rows(sequences.prompt)
    found = {}
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.autosplit.attend.default):
        given, states = arguments_of(node), [weight(program, name) for name in states_of(node)]
        own, window = given.get("kept_slots") is None, given.get("window")
        places = group * (min(length, window or inf) if own else num_rows)
        places += sequences.prompt / 2 if source is None and not decodes else 0
        found[node.name] = places * sum(state.nbytes / (state.shape[0] * state.shape[2]) for state in states)
    return found


def phase_rows(
    plan: Plan, family: StepFamily, machine: Machine, profile: PhaseProfile, bytes_per_s: float
) -> list[dict[str, Any]]:
    """One row for each stage and phase: its predicted seconds, and the seconds of each limit; the largest one bounds it.

    ``host_s`` is the host's processor time between the answer of the last stage and the next step. ``compute_s`` is the predicted
    seconds less those of sending and of reading weights and caches at the full bandwidth.

    Args:
        plan: the plan; of replicas the first ones count.
        family: the steps, and the sequences.
        machine: the devices.
        profile: the measurements of both phases.
        bytes_per_s: the bandwidth of memory for one thread.
    Raises: ProfileError: a measurement is missing.
    """
    sequences, machine = family.sequences, machine.only(devices_of(plan))
    is_beside = min(len(devices_of(plan)), sequences.max_sequences) > 1  # devices compute at once
    plan, *others = replicas_of(plan)
    busy_s, alone_s = stage_seconds(plan, family, machine, profile)
    known = busy_s if is_beside else alone_s
    group, states = sequences.largest_group((1 + len(others)) * len(devices_of(plan))), state_bytes(family)
    rows = []
    for tokens in sorted({min(tokens for tokens in known if tokens >= group), max(known)}):
        decodes, traced = tokens <= sequences.max_sequences, family.at({TOKENS: tokens})
        read = read_bytes(family, group, decodes)
        sent_s = moved_s(plan, traced.graph, machine, profile.phases[tokens])
        for number, stage in enumerate(plan.stages):
            cache_bytes = sum(states[op] for op in stage.ops)
            weight_bytes = family.graph.stage_bytes(stage.ops) - cache_bytes
            is_last = traced.graph.producer[traced.graph.outputs[0]] in stage.ops
            limits = {
                "weights_s": weight_bytes / bytes_per_s,
                "cache_s": sum(read.get(op, 0.0) for op in stage.ops) / bytes_per_s,
                "transfer_s": sent_s[number],
            }
            limits |= {"compute_s": max(known[tokens][number] - sum(limits.values()), 0.0), "host_s": is_last * profile.host_s}
            rows.append(
                {
                    "phase": "decode" if decodes else "prefill",
                    "stage": stage.name,
                    "tokens": tokens,
                    "predicted_s": known[tokens][number],
                    **limits,
                    "bound by": BOUNDS[max(limits, key=limits.__getitem__)],
                    "weight_bytes": weight_bytes,
                    "cache_bytes": cache_bytes,
                }
            )
    return rows

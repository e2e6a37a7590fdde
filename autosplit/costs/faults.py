"""The rules of a problem: a sentence for every rule that blocks break."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from autosplit.costs.cost import TOLERANCE, block_of, memory_bytes, pool_bytes
from autosplit.costs.problem import Block, Problem
from autosplit.costs.streaming import parts_on
from autosplit.tables import bytes_text


def find_faults(problem: Problem, blocks: Sequence[Block], *, contiguous: bool = True) -> list[str]:
    """Every way in which the blocks break the problem's rules, a sentence each; empty when there is none."""
    faults = _shape_faults(problem, blocks)
    if faults:
        return faults
    home = block_of(problem, blocks)
    for block in blocks:
        for device in block.devices:
            for op in np.array(block.ops)[np.isinf(problem.compute_s[list(block.ops), device])]:
                reason = problem.reasons.get((int(op), device), "it cannot run there")
                faults.append(f"op '{problem.ops[op]}' is on '{problem.devices[device]}', but {reason}")
    for group in problem.groups:
        for one, other in pairwise(group):
            if home[one] != home[other]:
                faults.append(f"ops '{problem.ops[one]}' and '{problem.ops[other]}' must stay together, but are in two blocks")
    if contiguous:
        for before, after in problem.order:
            if home[before] > home[after]:
                names = f"op '{problem.ops[after]}' in block {home[after]} reads '{problem.ops[before]}' in block {home[before]}"
                faults.append(f"{names}; a value goes to the same block or a later one")
    return faults + _memory_faults(problem, blocks)


def _shape_faults(problem: Problem, blocks: Sequence[Block]) -> list[str]:
    """Every reason why the blocks are not a partition of the ops over existing devices."""
    faults = []
    counts = np.zeros(problem.num_ops, dtype=np.int64)
    for number, block in enumerate(blocks):
        if any(not 0 <= op < problem.num_ops for op in block.ops):
            return [f"block {number} holds an op that does not exist"]
        if any(not 0 <= device < problem.num_devices for device in block.devices):
            return [f"block {number} is on a device that does not exist"]
        if not block.ops or not block.devices or len(set(block.devices)) < len(block.devices):
            faults.append(f"block {number} has no ops, no devices, or one device twice")
        np.add.at(counts, list(block.ops), 1)
    return faults + [f"op '{problem.ops[op]}' is in {counts[op]} blocks, and must be in 1" for op in np.flatnonzero(counts != 1)]


def _memory_faults(problem: Problem, blocks: Sequence[Block]) -> list[str]:
    faults = []
    for block in blocks:
        if block.resident_bytes < np.inf and parts_on(problem, block) is None:
            names = ", ".join(f"'{problem.devices[device]}'" for device in block.devices)
            largest = max(block.ops, key=lambda op: problem.op_bytes[op])
            faults.append(
                f"the weights of {len(block.ops)} ops on {names} can neither stay nor be streamed: "
                f"{bytes_text(block.resident_bytes)} have no room for two buffers beside shared weights, and op "
                f"'{problem.ops[largest]}' has {bytes_text(problem.op_bytes[largest])}"
            )
    for device, (held, cap) in enumerate(zip(memory_bytes(problem, blocks), problem.memory_bytes, strict=True)):
        if held > cap * (1 + TOLERANCE):
            faults.append(f"device '{problem.devices[device]}' holds {bytes_text(held)}, and its cap is {bytes_text(cap)}")
    for pool, held in zip(problem.pools, pool_bytes(problem, blocks), strict=True):
        if held > pool.num_bytes * (1 + TOLERANCE):
            names = ", ".join(f"'{problem.devices[device]}'" for device in pool.devices)
            faults.append(f"devices {names} hold {bytes_text(held)} together, and their cap is {bytes_text(pool.num_bytes)}")
    return faults

"""Random problems for tests, and a second, slow evaluator that shares no code with the first."""

import math
from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np

from autosplit.costs.problem import HOST, Block, Net, Pool, Problem, SharedWeight, Transfers


class Draw:
    """Coins and dice of one seed; what the test wants is not left to chance."""

    def __init__(self, seed: int, wanted: dict):
        self.random, self.wanted = Random(seed), wanted

    def chance(self, name: str, share: float) -> bool:
        return self.wanted[name] if name in self.wanted else self.random.random() < share

    def compute(self, num_ops: int, num_devices: int, alike: bool) -> np.ndarray:
        column = [self.random.choice([0, 0, 1, 2, 3, 5, 8]) * 1.0 for _ in range(num_ops)]
        factors = [1] if alike else [0.5, 1, 2, 3]
        compute = np.array([[t * self.random.choice(factors) for _ in range(num_devices)] for t in column])
        if num_devices > 1 and self.chance("unsupported", 0.3):
            for op in range(num_ops):
                if self.random.random() < 0.3:
                    compute[op, self.random.randrange(num_devices)] = np.inf
        return compute

    def nets(self, num_ops: int) -> tuple[Net, ...]:
        host = self.chance("host", 0.5)
        nets = []
        for op in range(num_ops):
            readers = tuple(later for later in range(op + 1, num_ops) if self.random.random() < 0.4)
            if host and self.random.random() < 0.3:
                readers += (HOST,)
            if readers:
                nets.append(Net(op, readers, float(self.random.randint(0, 4))))
        if host:
            readers = self.random.sample(range(num_ops), self.random.randint(1, num_ops))
            nets.append(Net(HOST, tuple(sorted(readers)), 1.0))
        return tuple(nets)

    def transfers(self, num_devices: int) -> Transfers:
        transfers = Transfers.free(num_devices)
        for array in transfers.arrays():
            if self.chance("pair_links", 0.4):
                array += np.array([[self.random.choice([0, 0.5, 1]) for _ in array] for _ in array])
            else:
                array += self.random.choice([0, 0.5, 1])
        return transfers

    def pair(self, num_ops: int, name: str, share: float) -> tuple[tuple[int, ...], ...]:
        if num_ops < 2 or not self.chance(name, share):
            return ()
        return (tuple(sorted(self.random.sample(range(num_ops), 2))),)


def random_problem(seed: int, **wanted) -> Problem:
    """A small problem; every feature appears by chance unless ``wanted`` says so (num_ops, num_devices, alike, caps, host...)."""
    draw = Draw(seed, wanted)
    random = draw.random
    num_ops = wanted.get("num_ops") or random.randint(1, 7)
    num_devices = wanted.get("num_devices") or random.randint(1, 3)
    alike = draw.chance("alike", 0.4)
    nets = draw.nets(num_ops)
    order = [(net.producer, op) for net in nets for op in net.consumers if HOST not in (net.producer, op)]
    if draw.chance("loose_order", 0.15):
        order = [(b, a) if random.random() < 0.3 else (a, b) for a, b in order if random.random() < 0.8]
    sizes = np.array([float(random.randint(0, 4)) for _ in range(num_ops)])
    caps = draw.chance("caps", 0.4)
    memory = np.array([random.uniform(0.4, 1.2) * (sizes.sum() + 1) if caps else math.inf for _ in range(num_devices)])
    pooled = num_devices > 1 and draw.chance("pooled", 0.15)
    return Problem(
        name=f"random {seed}",
        ops=tuple(f"op{number}" for number in range(num_ops)),
        devices=tuple(f"dev{number}" for number in range(num_devices)),
        compute_s=draw.compute(num_ops, num_devices, alike),
        nets=nets,
        order=tuple(order),
        transfers=draw.transfers(num_devices),
        op_bytes=sizes,
        memory_bytes=np.full(num_devices, memory[0]) if alike else memory,
        weights=tuple(SharedWeight(2.0, users) for users in draw.pair(num_ops, "shared", 0.3)),
        pools=(Pool((0, 1), float(sizes.sum()) * random.uniform(0.7, 1.3) + 1),) if pooled else (),
        groups=draw.pair(num_ops, "grouped", 0.3),
        send_once=draw.chance("send_once", 0.5),
        overlap=draw.chance("overlap", 0.3),
    ).verify()


def chain(times: list[float], num_devices: int = 2, num_bytes: float = 1.0, **changes) -> Problem:
    """Ops in a row, equal devices, 1 second per byte for sender and receiver alike."""
    num_ops = len(times)
    transfers = Transfers.free(num_devices)
    transfers.send_s_per_byte[:num_devices, :num_devices] = 1.0
    transfers.receive_s_per_byte[:num_devices, :num_devices] = 1.0
    problem = Problem(
        name="chain",
        ops=tuple(f"op{number}" for number in range(num_ops)),
        devices=tuple(f"dev{number}" for number in range(num_devices)),
        compute_s=np.repeat(np.array(times, dtype=float)[:, None], num_devices, axis=1),
        nets=tuple(Net(op, (op + 1,), num_bytes) for op in range(num_ops - 1)),
        order=tuple((op, op + 1) for op in range(num_ops - 1)),
        transfers=transfers,
        op_bytes=np.ones(num_ops),
        memory_bytes=np.full(num_devices, math.inf),
    )
    return replace(problem, **changes).verify()


def slow_loads(problem: Problem, blocks: list[Block]) -> list[float]:
    """The load of each device, straight from the definition: one value, one block, one device at a time."""
    t = problem.transfers
    home = {op: number for number, block in enumerate(blocks) for op in block.ops} | {HOST: HOST}
    devices = [block.devices for block in blocks] + [(HOST,)]
    compute = [0.0] * problem.num_devices
    moved = [0.0] * problem.num_devices
    for block in blocks:
        for device in block.devices:
            for op in block.ops:
                compute[device] += problem.compute_s[op][device] / len(block.devices)
    for net in problem.nets:
        source = home[net.producer]
        targets = {home[reader] for reader in net.consumers} - {source}
        for sender in devices[source]:
            prices = []
            for target in targets:
                pairs = [t.send_s[sender][d] + net.num_bytes * t.send_s_per_byte[sender][d] for d in devices[target]]
                prices.append(sum(pairs) / len(pairs))
            if sender != HOST and prices:
                moved[sender] += (max(prices) if problem.send_once else sum(prices)) / len(devices[source])
        for target in targets - {HOST}:
            for receiver in devices[target]:
                pairs = [t.receive_s[d][receiver] + net.num_bytes * t.receive_s_per_byte[d][receiver] for d in devices[source]]
                moved[receiver] += sum(pairs) / len(pairs) / len(devices[target])
    if problem.overlap:
        return [max(pair) for pair in zip(compute, moved, strict=True)]
    return [sum(pair) for pair in zip(compute, moved, strict=True)]


def random_blocks(problem: Problem, seed: int, contiguous: bool = False) -> list[Block]:
    """Any assignment: ops to at most 4 blocks, one to three devices each."""
    random = Random(seed)
    count = random.randint(1, min(4, problem.num_ops))
    if contiguous:
        cuts = sorted(random.sample(range(1, problem.num_ops), count - 1)) if count > 1 else []
        edges = [0, *cuts, problem.num_ops]
        members = [list(range(a, b)) for a, b in pairwise(edges)]
    else:
        members = [[] for _ in range(count)]
        for op in range(problem.num_ops):
            random.choice(members).append(op)
    sets = []
    for ops in members:
        size = random.randint(1, problem.num_devices)
        if ops:
            sets.append(Block(tuple(ops), tuple(sorted(random.sample(range(problem.num_devices), size)))))
    return sets

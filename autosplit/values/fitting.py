"""Fitting: factors that make the seconds of ops agree with the seconds of measured stages. No torch."""

from collections.abc import Collection, Mapping, Sequence

NUM_ROUNDS, TOLERANCE = 50, 1e-6
LEAST_SHARE = 0.1
"""Least share of the model's time that stages must cover for their ratio to count fully for the ops outside them."""


def fit_factors(op_s: Mapping[str, float], stages: Sequence[tuple[Collection[str], float]]) -> dict[str, float]:
    """Factors by op name that make the seconds of the ops sum to the measured seconds of every stage.

    Iterative proportional fitting (Deming and Stephan, 1940): each stage in turn scales its ops to its sum. Ops outside of all
    stages take the ratio of all stages together. If stages contradict each other, the last ones count.

    Args:
        stages: the ops of each stage, and its measured seconds.

    >>> fit_factors({"a": 1.0, "b": 1.0, "c": 1.0}, [(["a", "b"], 4.0)])
    {'a': 2.0, 'b': 2.0, 'c': 2.0}
    """
    predicted_s = sum(op_s[op] for ops, _ in stages for op in ops)
    measured_s = sum(seconds for _, seconds in stages)
    # Stages of 0 s must not scale other ops: at a ratio of 0 the device would be infinitely fast.
    common = measured_s / predicted_s if measured_s > 0 and predicted_s > 0 else 1.0
    covered_s = sum(op_s[op] for op in frozenset().union(*(ops for ops, _ in stages)))
    weight = min(1.0, covered_s / (LEAST_SHARE * sum(op_s.values()))) if covered_s > 0 else 0.0
    factors = dict.fromkeys(op_s, common**weight)
    for _ in range(NUM_ROUNDS):
        worst = 0.0
        for ops, seconds in stages:
            total_s = sum(op_s[op] * factors[op] for op in ops)
            ratio = seconds / total_s if total_s > 0 else 1.0
            worst = max(worst, abs(ratio - 1))
            for op in ops:
                factors[op] *= ratio
        if worst < TOLERANCE:
            break
    return factors

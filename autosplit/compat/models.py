"""Marks that transformers leaves on classes and configs; without them an error is less exact."""

from typing import Any


def missing_packages(model_class: Any) -> list[str]:
    """The packages that a placeholder for a model class asks for; none for a real class."""
    return list(getattr(model_class, "_backends", ()))


def attention_of(module: Any) -> str:
    """How a model of transformers computes attention, such as ``sdpa``; '' for other models."""
    return str(getattr(getattr(module, "config", None), "_attn_implementation", ""))


def distance_buckets(layer: Any, distances: Any, both_ways: bool) -> Any:
    """The bucket of each distance, place that is seen less place that sees, in the relative attention of a layer of T5."""
    sizes = {"num_buckets": layer.relative_attention_num_buckets, "max_distance": layer.relative_attention_max_distance}
    return layer._relative_position_bucket(distances, bidirectional=both_ways, **sizes)

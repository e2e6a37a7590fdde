"""Find outputs that OpenVINO transposes slowly from channels last, and let torch transpose them.

oneDNN's general kernel writes one element of each channel in turn. If channels begin a multiple of a page apart, as in images
of 64 x 64, they share few sets of the first-level cache and evict each other. 32 channels of 128 x 128 (2 MiB) took 4.6 ms, a
fifth of a pass of the whole U-Net; torch, which transposes in blocks, took 0.5 ms. In other cases, and by its kernel for more
channels (brgemm), OpenVINO is as fast as torch. Only the compiled graph tells which kernel runs.
"""

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

PAGE_BYTES, LINE_BYTES, WAYS = 4096, 64, 8
"""A first-level cache of 32 KiB: an address modulo a page selects the set, and a set holds WAYS lines."""


def slowly_turned(model: Any) -> list[int]:
    """The numbers of the outputs that a compiled model transposes with the slow kernel."""
    return [number for number, node in _ends(model).items() if _turns_slowly(node)]


def transposed(model: Any) -> list[int]:
    """The numbers of the outputs that a compiled model still transposes; channels last makes these no faster."""
    return [
        number
        for number, node in _ends(model).items()
        if "Transpose" in (_fact(node, "layerType"), _fact(_source(node), "layerType"))
    ]


def with_channels_last(model: Any, turned: Collection[int]) -> Any:
    """The model with the outputs ``turned``, of four dimensions each, in the order (0, 2, 3, 1)."""
    from openvino import Layout
    from openvino.preprocess import PrePostProcessor

    if not turned:
        return model
    processor = PrePostProcessor(model)
    for number in turned:
        processor.output(number).model().set_layout(Layout("NCHW"))
        processor.output(number).tensor().set_layout(Layout("NHWC"))
    return processor.build()


def last(shape: Sequence[int]) -> tuple[int, ...]:
    """The shape with its second dimension at the end."""
    batch, channels, *rest = shape
    return (batch, *rest, channels)


def first(value: torch.Tensor) -> torch.Tensor:
    """A dense copy with the last dimension as the second one, made as matrices, which torch transposes in blocks.

    >>> first(torch.zeros(2, 3, 4, 5)).shape
    torch.Size([2, 5, 3, 4])
    """
    batch, *rest, channels = value.shape
    made = value.new_empty((batch, channels, *rest))
    for target, source in zip(made, value, strict=True):
        target.view(channels, -1).copy_(source.view(-1, channels).t())
    return made


def _turns_slowly(node: Any) -> bool:
    if _fact(node, "layerType") != "Reorder" or "brgemm" in _fact(node, "primitiveType"):
        return False
    layouts = _fact(_source(node), "outputLayouts"), _fact(node, "outputLayouts")
    return layouts == ("acdb", "abcd") and crowds_a_cache(tuple(node.get_output_shape(0)), node.get_output_element_type(0).size)


def crowds_a_cache(shape: Sequence[int], item_bytes: int) -> bool:
    """Whether one element of each channel of a dense tensor needs more cache lines than the sets that they share have.

    >>> crowds_a_cache((1, 32, 128, 128), 4), crowds_a_cache((1, 64, 56, 56), 4)
    (True, False)
    """
    _, channels, *rest = shape
    num_sets = PAGE_BYTES // math.gcd(math.prod(rest) * item_bytes, PAGE_BYTES)
    return channels > WAYS * min(num_sets, PAGE_BYTES // LINE_BYTES)


def _ends(model: Any) -> dict[int, Any]:
    """The node of the compiled graph that writes each output, by the output's number, as far as the graph names them."""
    results = {node.get_friendly_name().partition("/sink_port")[0]: node for node in model.get_runtime_model().get_results()}
    named = ((number, [name for name in port.get_names() if name in results]) for number, port in enumerate(model.outputs))
    return {number: _source(results[names[0]]) for number, names in named if names}


def _source(node: Any) -> Any:
    return node.input(0).get_source_output().get_node()


def _fact(node: Any, key: str) -> str:
    return str(node.get_rt_info()[key].astype(str))

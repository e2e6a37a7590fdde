"""Explicit copies in a model: ``copy_to(x, "cpu:1")`` and ``x.to("cuda:0")``. A trace removes them and records where they led.

A copy computes nothing, so the traced graph has none: ``autosplit.annotate`` reads from ``Traced.copied`` on which device an op
wants its input, and puts a copy only where the placement needs one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from autosplit.arguments import checked
from autosplit.tracing.tensorspec import copy_into, empty_like_spec, spec_of

TO_COPY = torch.ops.aten._to_copy.default


def copied_tensor(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a tensor on a device, with its strides, and on a CPU with its distance from a 64-byte boundary."""
    if device.type != "cpu":
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device).copy_(tensor)
    made = empty_like_spec(spec_of("", tensor))
    copy_into(made, tensor)
    return made


@torch.library.custom_op("autosplit::device_copy", mutates_args=())
def device_copy(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy of ``x`` with its strides, for the device of this name."""
    return copied_tensor(x, x.device)


@device_copy.register_fake
def _(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)


DEVICE_COPY = torch.ops.autosplit.device_copy.default


@checked
def copy_to(x: torch.Tensor, device: str) -> torch.Tensor:
    """Ask inside a model that the readers of the result run on ``device``, such as ``cpu:1``; the numbers stay as they are.

    >>> copy_to(torch.ones(2), "cpu:1")
    tensor([1., 1.])
    """
    copied: torch.Tensor = DEVICE_COPY(x, device)
    return copied


def copied_to(node: fx.Node) -> str:
    """The device that an explicit copy leads to, '' for a node that is not an explicit copy.

    A cast to another dtype on another device is an op, and not a copy alone.
    """
    if node.target is DEVICE_COPY:
        return str(node.args[1])
    moves = node.target is TO_COPY and "device" in node.kwargs
    if not moves or node.kwargs.get("dtype") not in (None, _dtype(node.all_input_nodes[0])):
        return ""
    return str(node.kwargs["device"])


def _dtype(node: fx.Node) -> Any:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def chain_of(node: fx.Node) -> tuple[fx.Node, tuple[str, ...]]:
    """The node whose value explicit copies hand on, and the devices that they lead to, in order."""
    devices: list[str] = []
    while device := copied_to(node):
        devices.insert(0, device)
        node = node.all_input_nodes[0]
    return node, tuple(devices)


def chains_into(node: fx.Node) -> dict[fx.Node, tuple[str, ...]]:
    """The nodes whose values an op reads through explicit copies, and the devices that these lead to.

    A cast that names a device beside its dtype copies its input there, too.
    """
    chains = dict(map(chain_of, node.all_input_nodes))
    if node.target is TO_COPY and "device" in node.kwargs:
        [source] = node.all_input_nodes
        if source.meta["val"].device != node.kwargs["device"]:
            value, devices = chain_of(source)
            chains[value] = (*devices, str(node.kwargs["device"]))
    return {value: devices for value, devices in chains.items() if devices}


def in_host_memory(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an op with the host in place of a device that they name."""
    return {name: torch.device("cpu") if isinstance(value, torch.device) else value for name, value in kwargs.items()}


def absent_kinds(copied: Mapping[tuple[str, str], Sequence[str]]) -> list[str]:
    """The kinds of devices that explicit copies name by ``x.to(...)`` and that torch cannot use on this machine."""
    kinds = {device.partition(":")[0] for devices in copied.values() for device in devices}
    return [kind for kind in sorted(kinds & {"cuda", "xpu", "mps"}) if not torch.get_device_module(kind).is_available()]

"""Parts of torch without public names. All are loaded with torch itself.

Containers (``pytree``) are those of ``ExportedProgram.call_spec``; operators are those of a traced graph.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram

from autosplit.compat.tried import needs

with needs("torch"):
    from torch._C._functorch import is_functorch_wrapped_tensor as is_functorch_wrapped_tensor
    from torch._guards import detect_fake_mode as detect_fake_mode
    from torch._library.custom_ops import OPDEFS
    from torch._library.simple_registry import singleton
    from torch._ops import OpOverload as OpOverload
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch.utils import _pytree

pytree = _pytree


def schema_of(operator: OpOverload) -> Any:
    """The schema of an operator: its name, the name of its overload, arguments and results, and whether it writes."""
    return operator._schema


def custom_source(operator: OpOverload) -> str | None:
    """The file with the Python code of an operator, which torch defines too; None for an operator without such code."""
    name = schema_of(operator).name
    rule, made = singleton.find(name).fake_impl.kernel, OPDEFS.get(name)
    if rule is None:
        return None
    file: str = rule.source.rpartition(":")[0] if made is None else made._init_fn.__code__.co_filename
    return file


def renamed(exported: ExportedProgram, paths: Mapping[str, str]) -> None:
    """Rename weights of a program, in place: old name to new name, all others keep theirs."""
    specs = exported.graph_signature.input_specs
    exported._graph_signature = replace(
        exported.graph_signature, input_specs=[replace(spec, target=paths.get(spec.target, spec.target)) for spec in specs]
    )
    exported._state_dict = {paths.get(name, name): item for name, item in exported.state_dict.items()}
    exported._constants = {paths.get(name, name): item for name, item in exported.constants.items()}


def with_graph(exported: ExportedProgram, graph: torch.fx.Graph) -> ExportedProgram:
    """A program with another graph; weights and signature stay those of the first."""
    found = copy.copy(exported)
    found._graph_module = torch.fx.GraphModule(exported.graph_module, graph)
    return found


def expression_of(size: torch.SymInt | torch.SymFloat | torch.SymBool) -> Any:
    """The sympy expression of a symbolic size."""
    return size.node.expr


def stores_of(module: torch.nn.Module) -> tuple[dict[str, Any], ...]:
    """The tables in which a module keeps its attributes, buffers and parameters."""
    return vars(module), module._buffers, module._parameters


def num_writes(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 for a tensor of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version

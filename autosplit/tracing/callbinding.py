"""Bind a call to the parameters of the traced module, so that a served model is called as the module is."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from autosplit.compat.torchparts import pytree
from autosplit.errors import UsageError

NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_ONLY)


def signature_of(module: Any) -> inspect.Signature | None:
    """The signature of a module's ``forward``; None where it takes ``*args`` or ``**kwargs``, whose names say nothing."""
    try:
        signature = inspect.signature(module.forward)
    except (AttributeError, TypeError, ValueError):
        return None
    return signature if all(parameter.kind in NAMED for parameter in signature.parameters.values()) else None


def bind(
    signature: inspect.Signature,
    traced_args: Sequence[Any],
    traced_names: Sequence[str],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call in the form of the trace: the same parameters positional, the same by name, defaults filled in.

    Args:
        traced_args: the positional arguments of the trace.
        traced_names: the parameters that the trace gave by name.
        args, kwargs: the call, positional, by name, or mixed.
    Raises: UsageError: the parameter that is missing, unknown, given twice, or that the trace did not have.
    """
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as failure:
        parameters = ", ".join(signature.parameters)
        raise UsageError(f"the call does not fit the model, which takes ({parameters}): {failure}") from None
    bound.apply_defaults()
    given = dict(bound.arguments)
    positional = list(signature.parameters)[: len(traced_args)]
    for name in set(given) - {*positional, *traced_names}:
        if given[name] is not signature.parameters[name].default:
            raise UsageError(f"parameter '{name}' has its default in the trace; trace again with an example of it")
    return tuple(given[name] for name in positional), {name: given[name] for name in traced_names}


def leaf_places(in_spec: pytree.TreeSpec, signature: inspect.Signature | None) -> list[str]:
    """The place of each leaf of a traced call in the words of the caller, such as ``'mask'`` or ``'sizes'[0]``."""
    args, kwargs = pytree.tree_unflatten(range(in_spec.num_leaves), in_spec)
    known = list(signature.parameters) if signature is not None else []
    named = {known[place] if place < len(known) else f"argument {place}": arg for place, arg in enumerate(args)}
    parts = {name: pytree.tree_flatten_with_path(part)[0] for name, part in {**named, **kwargs}.items()}
    return [f"'{name}'{pytree.keystr(path)}" for name, leaves in parts.items() for path, _ in leaves]

"""TensorSpec: the memory layout of a tensor, which a copy in another process reproduces.

Equal numbers are not enough for equal results: a kernel may take another path for other strides, and BLAS libraries sum in
another order if data starts on another boundary (seen in a float32 matrix product of MKL, 4 bytes past a 64-byte boundary). So
a spec records the strides, and the offset from a 64-byte boundary. A copy takes the extent of the tensor, gaps included; the
repeated elements of an expanded tensor (stride 0) take the memory of one.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeGuard

import torch

from autosplit.compat.torchparts import FakeTensor, FakeTensorMode, is_functorch_wrapped_tensor
from autosplit.memory.lives import ALIGNMENT
from autosplit.parsing import shown

INTEGERS = frozenset(
    (torch.bool, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
)
MAX_DIMS = 64
MAX_BYTES = 1 << 40
"""Largest tensor, and largest stride, that a file may describe."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, shape and memory layout of a tensor.

    ``shape`` and ``stride`` count elements, ``dtype`` is torch's name ('float32'), ``offset_bytes`` is the distance of the first
    element from the 64-byte boundary before it.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    offset_bytes: int = 0

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def in_numpy(self) -> bool:
        """Whether torch converts the dtype to numpy; other packages may teach numpy more dtypes."""
        try:
            torch.empty(0, dtype=self.torch_dtype).numpy()
        except TypeError:
            return False
        return True

    @property
    def num_bytes(self) -> int:
        """Bytes of a dense copy."""
        return prod(self.shape) * self.torch_dtype.itemsize


def spec_from_dict(data: Mapping[str, Any]) -> TensorSpec:
    """The inverse of ``dataclasses.asdict``. Raises: one of ``parsing.MALFORMED``: it is not of a tensor."""
    spec = TensorSpec(data["name"], tuple(data["shape"]), tuple(data["stride"]), data["dtype"], data["offset_bytes"])
    texts, sizes = (spec.name, spec.dtype), (*spec.shape, *spec.stride, spec.offset_bytes)
    if not all(isinstance(text, str) for text in texts) or not all(type(size) is int for size in sizes):
        raise TypeError(f"a tensor has name {shown(spec.name)}, dtype {shown(spec.dtype)} and sizes {shown(list(sizes))}")
    if fault := spec_fault(spec):
        raise ValueError(fault)
    return spec


def spec_fault(spec: TensorSpec) -> str:
    """Why no tensor has this spec, '' if one may have it.

    >>> spec_fault(TensorSpec("x", (2,), (1,), "float32", 2))
    "'x' starts 2 bytes past a boundary of 64 bytes; a multiple of 4 below 64 is needed"
    """
    dtype = getattr(torch, spec.dtype, None) if isinstance(spec.dtype, str) else None
    if not isinstance(dtype, torch.dtype):
        return f"'{spec.name:.60}' has dtype {shown(spec.dtype)}, which is not the name of a dtype of torch, such as 'float32'"
    if not is_plain(dtype):
        return f"'{spec.name:.60}' has dtype {spec.dtype}, whose numbers are quantised or packed"
    layout = f"shape {shown(list(spec.shape))} and strides {shown(list(spec.stride))}"
    if len(spec.shape) != len(spec.stride) or len(spec.shape) > MAX_DIMS or min((0, *spec.shape, *spec.stride)) < 0:
        return f"'{spec.name:.60}' has {layout}, as no tensor has"
    if max((prod(spec.shape) * dtype.itemsize, extent_bytes(spec), *spec.shape, *spec.stride)) > MAX_BYTES:
        return f"'{spec.name:.60}' has {layout}, and at most {MAX_BYTES >> 40} TiB are allowed"
    if spec.offset_bytes not in range(0, ALIGNMENT, dtype.itemsize):
        start = f"starts {spec.offset_bytes} bytes past a boundary of {ALIGNMENT} bytes"
        return f"'{spec.name:.60}' {start}; a multiple of {dtype.itemsize} below {ALIGNMENT} is needed"
    return ""


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """The spec of a tensor.

    >>> spec_of("x", torch.zeros(2, 3).t())
    TensorSpec(name='x', shape=(3, 2), stride=(1, 3), dtype='float32', offset_bytes=0)
    """
    dtype = str(tensor.dtype).removeprefix("torch.")
    offset_bytes = tensor.data_ptr() % ALIGNMENT if tensor.numel() and not isinstance(tensor, FakeTensor) else 0
    return TensorSpec(name, tuple(tensor.shape), tuple(tensor.stride()), dtype, offset_bytes)


def layout(spec: TensorSpec) -> str:
    """Dtype, shape and, unless the tensor is dense and row-major, strides.

    >>> layout(TensorSpec("x", (2, 3), (3, 1), "float32")), layout(TensorSpec("y", (2, 3), (1, 2), "int64"))
    ('float32[2,3]', 'int64[2,3] strides [1,2]')
    """
    text = _size(spec)
    return text if row_major(spec.shape) == spec.stride else f"{text} strides [{','.join(map(str, spec.stride))}]"


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides of a dense tensor in row-major order.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def extent_bytes(spec: TensorSpec) -> int:
    """Bytes from the first element to the last one, gaps included.

    >>> extent_bytes(TensorSpec("mask", (8, 100), (0, 1), "float32"))
    400
    """
    if 0 in spec.shape:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    return (last + 1) * spec.torch_dtype.itemsize


def storage_bytes(spec: TensorSpec) -> int:
    """Bytes of a buffer for ``view_storage``."""
    return spec.offset_bytes + extent_bytes(spec)


def view_storage(buffer: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """A view inside ``buffer``: uint8, one dimension, at least ``storage_bytes(spec)`` long, on a 64-byte boundary."""
    start = spec.offset_bytes
    elements = buffer[start : start + extent_bytes(spec)].view(spec.torch_dtype)
    return elements.as_strided(spec.shape, spec.stride, elements.storage_offset())


def empty_like_spec(spec: TensorSpec) -> torch.Tensor:
    """A new tensor with this spec."""
    if spec.offset_bytes == 0:
        return torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype)
    return view_storage(torch.empty(storage_bytes(spec), dtype=torch.uint8), spec)


def zeros(spec: TensorSpec) -> torch.Tensor:
    """Zeros with the spec's shape, dtype and strides, which a ``view`` in a stage may need; the offset is left out."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.torch_dtype).zero_()


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy ``source`` into ``target``, which may be expanded (stride 0), unlike that of ``torch.Tensor.copy_``."""
    for dim, (size, stride) in enumerate(zip(target.shape, target.stride(), strict=True)):
        if stride == 0 and size > 1:
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)


def is_laid_out(tensor: torch.Tensor, spec: TensorSpec, *, anywhere: bool = False) -> bool:
    """Whether a kernel or a copy may read the memory of a dense tensor as that of the spec.

    It may not if the tensor is lazily conjugated or negated (its memory differs from its values), on a device, of a subclass, or
    followed by autograd. Strides of a dimension of size 1 count too: a kernel may choose its path by them.

    Args:
        tensor: dense (see ``is_dense``), with the spec's shape and dtype: outputs and requests were checked before.
        anywhere: take any distance from a 64-byte boundary, for readers that copy.
    """
    return (
        tensor.stride() == spec.stride
        and tensor.__class__ is torch.Tensor
        and tensor.is_cpu
        and not (tensor.requires_grad or tensor.is_neg() or tensor.is_conj())
        and (anywhere or 0 in spec.shape or tensor.data_ptr() % ALIGNMENT == spec.offset_bytes)
    )


def laid_out(tensor: torch.Tensor, spec: TensorSpec, *, anywhere: bool = False) -> torch.Tensor:
    """The tensor without autograd if ``is_laid_out``, else a copy that is; it is dense and of the spec's shape."""
    if tensor.requires_grad or tensor.__class__ is not torch.Tensor:
        tensor = tensor.detach()
    if tensor.dtype is spec.torch_dtype and is_laid_out(tensor, spec, anywhere=anywhere):
        return tensor
    copy = empty_like_spec(spec)
    with torch.no_grad():
        copy_into(copy, tensor)
    return copy


def is_plain(dtype: torch.dtype) -> bool:
    """Whether each element is one number; elements of other dtypes are quantised, or a part of a byte."""
    return dtype.is_floating_point or dtype.is_complex or dtype in INTEGERS


def is_dense(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor that holds a value for each element in memory of its own."""
    if value.__class__ is not torch.Tensor:
        return kind_of(value) == ""
    strided = value.layout is torch.strided and not (value.is_meta or value.is_nested)
    return strided and not is_functorch_wrapped_tensor(value)


def fake_mode(tensors: Iterable[Any]) -> FakeTensorMode:
    """The mode of the first fake tensor; a new one if none is fake."""
    modes = [one.fake_mode for one in tensors if isinstance(one, FakeTensor)]
    return modes[0] if modes else FakeTensorMode(allow_non_fake_inputs=True)


def kind_of(value: object) -> str:
    """'' for a dense tensor, else what the value is: its type, or its layout and device."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    if type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return type(value).__name__
    if is_functorch_wrapped_tensor(value):
        return "a tensor inside torch.func (vmap, grad or functionalize)"
    if value.layout is not torch.strided or value.is_meta or value.is_nested:
        return f"{'nested' if value.is_nested else value.layout} on {value.device}"
    return ""


Announced = tuple[Sequence[int], torch.dtype]
"""The shape and dtype that a stage announced for an output."""


def announced(specs: Sequence[TensorSpec]) -> tuple[Announced, ...]:
    """The outputs of a stage."""
    return tuple((torch.Size(spec.shape), spec.torch_dtype) for spec in specs)


def check_outputs(outputs: Sequence[torch.Tensor], wanted: Sequence[Announced]) -> None:
    """Raise ValueError if a stage did not make what it announced: whoever takes an output reads as much memory as announced."""
    if len(outputs) != len(wanted):
        raise ValueError(f"it returned {len(outputs)} outputs instead of the {len(wanted)} announced")
    for position, (made, (shape, dtype)) in enumerate(zip(outputs, wanted, strict=True)):
        if (
            made.__class__ is torch.Tensor
            and made.is_cpu
            and made.layout is torch.strided
            and made.dtype is dtype
            and made.shape == shape
        ):
            continue  # as nearly always: this takes a third of a microsecond
        if not is_dense(made):
            raise ValueError(f"output {position} is {kind_of(made)}, and a dense {dtype} {list(shape)} was announced")
        if made.shape != shape or made.dtype != dtype:
            raise ValueError(f"output {position} is {made.dtype} {list(made.shape)}, and {dtype} {list(shape)} was announced")


def differences(specs: Sequence[TensorSpec], tensors: Sequence[torch.Tensor]) -> list[str]:
    """The faults in number, shapes and dtypes of tensors meant for these specs; layouts may differ."""
    if len(specs) != len(tensors):
        return [f"{len(specs)} tensors are expected, and {len(tensors)} are given"]
    faults = []
    for spec, tensor in zip(specs, tensors, strict=True):
        if not is_dense(tensor):
            faults.append(f"'{spec.name}' is {kind_of(tensor)}, and a dense {_size(spec)} is expected")
            continue
        there = spec_of(spec.name, tensor)
        if (there.shape, there.dtype) != (spec.shape, spec.dtype):
            faults.append(f"'{spec.name}' is {_size(there)}, and {_size(spec)} is expected")
    return faults


def _size(spec: TensorSpec) -> str:
    return f"{spec.dtype}[{','.join(map(str, spec.shape))}]"

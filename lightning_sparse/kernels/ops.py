"""The kernels as operators, ``torch.ops.lightning_sparse.*``: each in Triton where that can be, else in plain PyTorch.

Triton is optional: it is imported when an operator is first called on a CUDA device.  With TRITON_INTERPRET=1 in the
environment its interpreter serves tensors of the CPU too; that is slow, and for tests.
"""

import os
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.library import Library, register_fake

from lightning_sparse.kernels import reference

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
_LIBRARY = Library("lightning_sparse", "DEF")


def _operator(plain: Callable[..., Any], module: str, schema: str) -> Any:
    """The operator called as ``plain``, with the function of that name in ``module`` for tensors Triton can work on.

    It is defined as C++ code would define one, since a call of what ``torch.library.custom_op`` makes takes ten times
    as long.  No gradient flows through it; its schema says what it writes to.
    """
    name = plain.__name__
    _LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
    operator = getattr(torch.ops.lightning_sparse, name).default
    written = [i for i, each in enumerate(operator._schema.arguments) if each.alias_info is not None]

    def kernel(*arguments: Any) -> Any:
        for i in written:
            if not arguments[i].is_inference():
                increment_version(arguments[i])  # PyTorch does not see what Triton writes to
        return getattr(import_module(f"lightning_sparse.kernels.{module}"), name)(*arguments)

    _LIBRARY.impl(name, torch.no_grad()(plain), "CompositeExplicitAutograd")
    if HAS_TRITON:
        for device in ("CUDA", "CPU") if INTERPRETED else ("CUDA",):
            _LIBRARY.impl(name, torch.no_grad()(kernel), device)
    if not operator._schema.returns:
        register_fake(f"lightning_sparse::{name}", lambda *arguments: None, lib=_LIBRARY)
    return operator


select = _operator(
    reference.select,
    "select_kernel",
    "(Tensor x, Tensor threshold, float near, int capacity, int most, Tensor? edges) -> (Tensor, Tensor)",
)
scatter = _operator(
    reference.scatter, "scatter_kernel",
    "(Tensor index, Tensor values, Tensor count, int size, Tensor(a!) out) -> ()",
)  # fmt: skip
sketch_encode = _operator(
    reference.sketch_encode, "sketch_kernel",
    "(Tensor x, Tensor offsets, Tensor signs, Tensor(a!) out) -> ()",
)  # fmt: skip
sketch_estimate = _operator(
    reference.sketch_estimate, "sketch_kernel",
    "(Tensor table, Tensor offsets, Tensor signs, Tensor(a!) out) -> ()",
)  # fmt: skip
encode_indices = _operator(
    reference.encode_indices, "index_kernel",
    "(Tensor index, Tensor count, Tensor seen, Tensor near, Tensor? load, int n, Tensor? edges, Tensor(a!) counts, "
    "Tensor(b!) out) -> ()",
)  # fmt: skip
decode_indices = _operator(
    reference.decode_indices, "index_kernel",
    "(Tensor payloads, Tensor counts, int n, int capacity, Tensor? edges, int width) -> (Tensor, Tensor)",
)  # fmt: skip
add_up = _operator(reference.add_up, "sparse_kernel", "(Tensor index, Tensor values, Tensor(a!) out) -> Tensor")
put = _operator(reference.put, "sparse_kernel", "(Tensor index, Tensor values, Tensor(a!) out, bool onto) -> ()")
pick = _operator(reference.pick, "sparse_kernel", "(Tensor index, Tensor x, bool magnitudes) -> Tensor")
among = _operator(reference.among, "sparse_kernel", "(Tensor index, Tensor others, int n) -> Tensor")
take_blocks = _operator(reference.take_blocks, "block_kernel", "(Tensor(a!) values, Tensor(b!) out, int bits) -> ()")
take_rows = _operator(
    reference.take_rows, "block_kernel",
    "(Tensor(a!) values, Tensor(b!) out, int bits, int width, int start, int length, int rotation, int first, "
    "int count) -> ()",
)  # fmt: skip
read_rows = _operator(
    reference.read_rows, "block_kernel",
    "(Tensor payloads, Tensor(a!) out, int bits, int width, int start, int length, int rotation) -> ()",
)  # fmt: skip
add_rows = _operator(
    reference.add_rows, "block_kernel",
    "(Tensor payloads, Tensor(a!) out, int bits, int first, int step, int count, bool onto) -> ()",
)  # fmt: skip
take_floats = _operator(
    reference.take_floats, "float_kernel",
    "(Tensor(a!) values, Tensor(b!) out, int width, int start, int length, int rotation, int first, int count) -> ()",
)  # fmt: skip
read_floats = _operator(
    reference.read_floats, "float_kernel",
    "(Tensor payloads, Tensor(a!) out, int width, int start, int length, int rotation) -> ()",
)  # fmt: skip
add_floats = _operator(
    reference.add_floats, "float_kernel",
    "(Tensor payloads, Tensor(a!) out, int first, int step, int count, bool onto) -> ()",
)  # fmt: skip


@register_fake("lightning_sparse::select", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(
    x: Tensor, threshold: Tensor, near: float, capacity: int, most: int, edges: Tensor | None
) -> tuple[Tensor, Tensor]:
    parts = 1 if edges is None else edges.numel() - 1
    return x.new_empty((parts, capacity), dtype=torch.int64), x.new_empty((3, parts), dtype=torch.int64)


@register_fake("lightning_sparse::decode_indices", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(
    payloads: Tensor, counts: Tensor, n: int, capacity: int, edges: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    rows = len(payloads)
    return payloads.new_empty((rows, capacity), dtype=torch.int64), payloads.new_empty(rows, dtype=torch.int32)


@register_fake("lightning_sparse::add_up", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(index: Tensor, values: Tensor, out: Tensor) -> Tensor:
    return index.new_empty(())


@register_fake("lightning_sparse::pick", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(index: Tensor, x: Tensor, magnitudes: bool) -> Tensor:
    return torch.empty_like(index, dtype=x.dtype)


@register_fake("lightning_sparse::among", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _(index: Tensor, others: Tensor, n: int) -> Tensor:
    return torch.empty_like(index)

"""The kernels as operators, ``torch.ops.lightning_sparse.*``: each in Triton where that can be, else in plain PyTorch.

Triton is optional: it is imported when an operator is first called on a CUDA device.  With TRITON_INTERPRET=1 in the
environment its interpreter serves tensors of the CPU too; that is slow, and for tests.
"""

import os
from collections.abc import Callable, Iterable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from lightning_sparse.kernels import reference

HAS_TRITON = find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def _operator(plain: Callable[..., Any], module: str, mutates: Iterable[str], schema: str) -> Any:
    """The operator called as ``plain``, with the function of that name in ``module`` for tensors Triton can work on."""
    name = plain.__name__
    operator = custom_op(f"lightning_sparse::{name}", plain, mutates_args=mutates, schema=schema)

    def kernel(*arguments: Any) -> Any:
        return getattr(import_module(f"lightning_sparse.kernels.{module}"), name)(*arguments)

    if HAS_TRITON:
        for device in ("cuda", "cpu") if INTERPRETED else ("cuda",):
            operator.register_kernel(device)(kernel)
    return operator


select = _operator(
    reference.select, "select_kernel", (), "(Tensor x, Tensor threshold, float near, int capacity) -> (Tensor, Tensor)"
)
scatter = _operator(
    reference.scatter, "scatter_kernel", ("out",),
    "(Tensor index, Tensor values, Tensor count, int size, Tensor(a!) out) -> ()",
)  # fmt: skip
sketch_encode = _operator(
    reference.sketch_encode, "sketch_kernel", ("out",),
    "(Tensor x, Tensor offsets, Tensor signs, Tensor(a!) out) -> ()",
)  # fmt: skip
sketch_estimate = _operator(
    reference.sketch_estimate, "sketch_kernel", ("out",),
    "(Tensor table, Tensor offsets, Tensor signs, Tensor(a!) out) -> ()",
)  # fmt: skip
encode_indices = _operator(
    reference.encode_indices, "index_kernel", ("out",),
    "(Tensor index, Tensor count, int n, Tensor(a!) out) -> ()",
)  # fmt: skip
decode_indices = _operator(
    reference.decode_indices, "index_kernel", (),
    "(Tensor payload, int n, int capacity, Tensor count) -> (Tensor, Tensor)",
)  # fmt: skip
take_blocks = _operator(
    reference.take_blocks, "block_kernel", ("values", "out"), "(Tensor(a!) values, Tensor(b!) out, int bits) -> ()"
)
read_blocks = _operator(
    reference.read_blocks, "block_kernel", ("out",), "(Tensor payload, Tensor(a!) out, int bits) -> ()"
)
add_blocks = _operator(
    reference.add_blocks, "block_kernel", ("out",), "(Tensor payload, Tensor(a!) out, int bits) -> ()"
)
take_rows = _operator(
    reference.take_rows, "block_kernel", ("values", "out"),
    "(Tensor(a!) values, Tensor(b!) out, int bits, int width, int start, int length, int rotation, int first, "
    "int count) -> ()",
)  # fmt: skip
read_rows = _operator(
    reference.read_rows, "block_kernel", ("out",),
    "(Tensor payloads, Tensor(a!) out, int bits, int width, int start, int length, int rotation) -> ()",
)  # fmt: skip
add_rows = _operator(
    reference.add_rows, "block_kernel", ("out",),
    "(Tensor payloads, Tensor(a!) out, int bits, int first, int step, int count, bool onto) -> ()",
)  # fmt: skip


@select.register_fake  # type: ignore[untyped-decorator]
def _(x: Tensor, threshold: Tensor, near: float, capacity: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(capacity, dtype=torch.int64), x.new_empty(2, dtype=torch.int64)


@decode_indices.register_fake  # type: ignore[untyped-decorator]
def _(payload: Tensor, n: int, capacity: int, count: Tensor) -> tuple[Tensor, Tensor]:
    return payload.new_empty(capacity, dtype=torch.int64), payload.new_empty((), dtype=torch.bool)

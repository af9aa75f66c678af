"""What is on the wire: values, indices, and messages made of both.  Pure functions."""

import torch

from lightning_sparse.kernels.blocks import BLOCK
from lightning_sparse.wire.indices import CAUSE, INDEX_FORMATS, INDEX_LIMIT, CorruptMessage, IndexFormat, cheapest
from lightning_sparse.wire.messages import MessageLayout, Selection, index_format
from lightning_sparse.wire.values import Float, Levels, Sign, Steps, ValueFormat

__all__ = [
    "BFLOAT16",
    "BLOCK",
    "CAUSE",
    "FLOAT16",
    "FLOAT32",
    "INDEX_FORMATS",
    "INDEX_LIMIT",
    "INT2",
    "INT4",
    "INT8",
    "SIGN",
    "WIRE_DTYPES",
    "CorruptMessage",
    "IndexFormat",
    "MessageLayout",
    "Selection",
    "ValueFormat",
    "cheapest",
    "index_format",
    "wire_format",
]

FLOAT32 = Float("float32", torch.float32)
BFLOAT16 = Float("bfloat16", torch.bfloat16)
FLOAT16 = Float("float16", torch.float16)
INT8 = Steps("int8", 8)
INT4 = Steps("int4", 4)
INT2 = Levels("int2")
SIGN = Sign("sign")

#: Name -> format: what ``wire_dtype`` may be.
WIRE_DTYPES: dict[str, ValueFormat] = {f.name: f for f in (FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, INT2, SIGN)}
_ALSO = {"fp32": "float32", "float": "float32", "bf16": "bfloat16", "fp16": "float16", "half": "float16"}


def wire_format(wire_dtype: object) -> ValueFormat:
    """The format called ``wire_dtype``: a name, a usual short form such as "bf16", or a dtype of torch.

    Raises:
        ValueError: if it is none of them.
    """
    name = str(wire_dtype).removeprefix("torch.") if isinstance(wire_dtype, torch.dtype) else wire_dtype
    if isinstance(name, str) and (found := WIRE_DTYPES.get(_ALSO.get(name, name))):
        return found
    raise ValueError(f"wire_dtype must be one of {', '.join(WIRE_DTYPES)}; got {wire_dtype!r}.")

"""What is on the wire: values, indices, and messages made of both.  Pure functions."""

from lightning_sparse.kernels.blocks import BLOCK
from lightning_sparse.wire.formats import BFLOAT16, FLOAT16, FLOAT32, INT2, INT4, INT8, SIGN, WIRE_DTYPES, wire_format
from lightning_sparse.wire.indices import CAUSE, INDEX_FORMATS, INDEX_LIMIT, CorruptMessage, IndexFormat, cheapest
from lightning_sparse.wire.messages import MessageLayout, Selection, check_index_format, index_format
from lightning_sparse.wire.values import ValueFormat

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
    "check_index_format",
    "index_format",
    "wire_format",
]

"""What travels on the wire: values, indices, and messages made of both.  Pure functions."""

from lightning_sparse.wire.indices import CAUSE, INDEX_FORMATS, CorruptMessage, IndexFormat, cheapest
from lightning_sparse.wire.messages import MessageLayout, Selection, check_index_format, index_format
from lightning_sparse.wire.values import INDEX_LIMIT, add, nbytes, read, take

__all__ = [
    "CAUSE",
    "INDEX_FORMATS",
    "INDEX_LIMIT",
    "CorruptMessage",
    "IndexFormat",
    "MessageLayout",
    "Selection",
    "add",
    "cheapest",
    "check_index_format",
    "index_format",
    "nbytes",
    "read",
    "take",
]

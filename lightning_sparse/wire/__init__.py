"""What travels on the wire: values, indices, and picks made of both.  Pure functions."""

from lightning_sparse.wire.indices import CAUSE, INDEX_FORMATS, CorruptMessage, IndexFormat, cheapest
from lightning_sparse.wire.picks import PickLayout, Picks, check_index_format, index_format, joined
from lightning_sparse.wire.values import INDEX_LIMIT, add, nbytes, read, take

__all__ = [
    "CAUSE",
    "INDEX_FORMATS",
    "INDEX_LIMIT",
    "CorruptMessage",
    "IndexFormat",
    "PickLayout",
    "Picks",
    "add",
    "cheapest",
    "check_index_format",
    "index_format",
    "joined",
    "nbytes",
    "read",
    "take",
]

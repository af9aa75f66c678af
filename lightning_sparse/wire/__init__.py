"""What travels on the wire: values, indices, and picks made of both.  Pure functions."""

from lightning_sparse.wire.values import INDEX_LIMIT, pack, take, unpack

__all__ = ["INDEX_LIMIT", "pack", "take", "unpack"]

"""What travels: values rounded for the wire, and (index, value) pairs in one buffer of bytes.  Pure functions."""

import torch
from torch import Tensor

INDEX_LIMIT = 2**31  # indices travel as int32


def take(values: Tensor, out: Tensor) -> None:
    """Move ``values`` [n] float32 onto the wire: ``out`` [n] gets them rounded to its dtype, ``values`` keeps the rest.

    ``values before == out + values after`` exactly, so the rounding error stays unsent and nothing is lost.  A value
    beyond the range of float16 is sent as the largest it can carry; the remainder stays.
    """
    if out.dtype == torch.float32:
        out.copy_(values)
        values.zero_()
        return
    if out.dtype == torch.float16:
        limit = torch.finfo(torch.float16).max
        out.copy_(values.clamp(-limit, limit))
    else:
        out.copy_(values)
    values.sub_(out)


def pack(index: Tensor, values: Tensor) -> Tensor:
    """``index`` [k] (below 2**31) and ``values`` [k] in one buffer of bytes, [k * (4 + bytes of a value)] uint8."""
    return torch.cat([index.to(torch.int32).view(torch.uint8), values.view(torch.uint8)])


def unpack(payload: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """What :func:`pack` packed: index [k] int64 and values [k] of ``dtype``."""
    k = payload.numel() // (4 + dtype.itemsize)
    index, values = torch.split(payload, [4 * k, dtype.itemsize * k])
    # clone: a view of another dtype needs its storage to start on a multiple of that dtype's size
    return index.clone().view(torch.int32).long(), values.clone().view(dtype)

"""Messages of picks that a device packs and unpacks by itself, those of :class:`PickLayout` with block16 indices."""

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.wire import PickLayout
from lightning_sparse.wire.picks import MOST


def pack(layout: PickLayout, found: "kernels.Selection", out: Tensor) -> Tensor:
    """Write what was selected to ``out`` [nbytes] uint8, which is returned; as :meth:`PickLayout.pack`."""
    header, _, index_part = layout.parts(out)
    told = torch.stack([found.count, found.seen, found.near, torch.zeros_like(found.seen)])
    header.view(torch.int32).copy_(told.clamp(max=MOST))
    nbytes = layout.indices.nbytes(layout.n, layout.capacity)
    kernels.encode_indices(found.index, found.count, layout.n, index_part[:nbytes])
    index_part[nbytes:] = 0
    return out


def unpack(layout: PickLayout, payloads: Tensor) -> tuple[Tensor, Tensor]:
    """Read messages, ``payloads`` [P, nbytes] uint8; as :meth:`PickLayout.unpack`, but for damage, which is told.

    Returns:
        Indices [P, capacity] int64, those of each message and then n; and of each message how many, ``seen``, ``near``
        and whether it was intact, [P, 4] int32.  All indices are in [0, n], also where it was not.
    """
    header, _, index_part = layout.parts(payloads)
    told = header.contiguous().view(torch.int32).clone()  # [P, 4]
    nbytes = layout.indices.nbytes(layout.n, layout.capacity)
    rows = []
    for p, count in enumerate(told[:, 0]):
        index, intact = kernels.decode_indices(index_part[p, :nbytes], layout.n, layout.capacity, count)
        rows.append(index)
        told[p, 3] = intact
    return torch.stack(rows), told

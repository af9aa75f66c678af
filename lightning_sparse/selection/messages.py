"""Messages of picks that a device packs and unpacks by itself, those of :class:`PickLayout` with block16 indices.

Where values travel, as many do as there is room for, zeros after those that were picked.  So but for int8, whose scales
come first, they are the bytes of :meth:`PickLayout.pack`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse import kernels, wire
from lightning_sparse.wire import PickLayout
from lightning_sparse.wire.picks import MOST


def pack(layout: PickLayout, found: "kernels.Selection", out: Tensor, values: Tensor | None = None) -> Tensor:
    """Write what was selected to ``out`` [nbytes] uint8, which is returned; as :meth:`PickLayout.pack`.

    Args:
        layout: of the message.
        found: what was selected, as many as the layout has room for.
        out: what it holds is overwritten.
        values: [capacity] float32, zero where there is no element; they keep what rounding left.  None in messages
            without values.
    """
    header, value_part, index_part = layout.parts(out)
    report = torch.stack([found.count, found.seen, found.near, torch.zeros_like(found.seen)])
    header.view(torch.int32).copy_(report.clamp(max=MOST))
    if layout.dtype is not None:
        assert values is not None
        used = wire.nbytes(layout.capacity, layout.dtype)
        wire.take(values, value_part[:used], layout.dtype)
        value_part[used:] = 0
    kernels.encode_indices(found.index, found.count, layout.n, index_part[: layout.index_bytes])
    index_part[layout.index_bytes :] = 0
    return out


def unpack(layout: PickLayout, payloads: Tensor, widths: Sequence[int] = ()) -> tuple[Tensor, Tensor]:
    """Read messages, ``payloads`` [P, nbytes] uint8; as :meth:`PickLayout.unpack`, but for damage, which is reported.

    Args:
        layout: of the messages.
        payloads: one a row.
        widths: [P], elements there are to pick from in each, where these are fewer than the layout's n.

    Returns:
        Indices [P, capacity] int64, those of each message and then n; and of each message how many, ``seen``, ``near``
        and whether it was intact, [P, 4] int32.  All indices are in [0, n], also where it was not.
    """
    header, _, index_part = layout.parts(payloads)
    report = header.contiguous().view(torch.int32).clone()  # [P, 4]
    rows = []
    for p, count in enumerate(report[:, 0]):
        index, intact = kernels.decode_indices(index_part[p, : layout.index_bytes], layout.n, layout.capacity, count)
        if widths:
            intact = intact & ~((index >= widths[p]) & (index < layout.n)).any()
        rows.append(index)
        report[p, 3] = intact & (report[p, 1:3] >= 0).all()
    return torch.stack(rows), report


def values(layout: PickLayout, payloads: Tensor, index: Tensor) -> Tensor:
    """The values in ``payloads`` [P, nbytes] uint8, of which :func:`unpack` gave ``index``: [P, capacity] float32.

    Zero where there is no element.
    """
    assert layout.dtype is not None
    used = wire.nbytes(layout.capacity, layout.dtype)
    _, value_part, _ = layout.parts(payloads)
    read = torch.empty(index.shape, dtype=torch.float32, device=index.device)
    for payload, row in zip(value_part, read, strict=True):
        wire.read(payload[:used], row, layout.dtype)
    return torch.where(index < layout.n, read, 0.0)

"""What the ranks of a member do among themselves: gradients become slices of their mean, and slices whole tensors."""

import json
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from lightning_sparse.network.agreement import everywhere
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.cut import Cut

ALIGNED = 16  # bytes at whose multiples values of every type may begin


def mean_of_slices(
    tensors: Sequence[Tensor | None], like: Sequence[Tensor], cut: Cut, comm: Comm, may_be_none: bool = False
) -> Rounds[Sequence[Tensor | None]]:
    """This rank's slice of the mean of each tensor over the L ranks of ``comm``, float32; None where none has any.

    Each rank sends every owner its own of their slices, and the owner adds in the order of the ranks, so that the bits
    depend on nothing else.  Of n elements a rank sends n (L - 1) / L.

    Args:
        tensors: this rank's; None counts as zeros.
        like: tensors of the same shapes.
        cut: which slice this rank owns.
        comm: the ranks of its member.
        may_be_none: there may be None among ``tensors``; the same on all ranks.
    """
    comm.buffers.reuse()
    slices = [cut.slices(other if x is None else x) for x, other in zip(tensors, like, strict=True)]
    of_rank = list(zip(*slices, strict=True))  # [L][k]
    flags = len(tensors) if may_be_none else 0  # which tensors a rank has, at the end of each row
    width = max(sum(part.numel() for part in parts) for parts in of_rank) + flags
    shape, device = (cut.count, width), like[0].device
    leaving = comm.buffer("leaving", cut.count * width, torch.float32, device).view(shape)
    for row, parts in zip(leaving, of_rank, strict=True):
        for x, part, slot in zip(tensors, parts, _slots(row, parts), strict=True):
            slot.zero_() if x is None else slot.copy_(part)
    if flags:
        has = torch.tensor([x is not None for x in tensors], dtype=torch.float32, device="cpu")
        leaving[:, width - flags :] = has.to(device, non_blocking=True)
    if not width:
        return [part.float() for part in of_rank[cut.index]]
    arriving = comm.buffer("arriving", cut.count * width, torch.float32, device).view(shape)
    rows = yield comm.all_to_all(leaving, out=arriving)
    first, *others = (leaving[rank] if rank == cut.index else row for rank, row in enumerate(rows))
    mean = first.div_(cut.count)
    for row in others:
        mean.add_(row, alpha=1 / cut.count)
    own = _slots(mean, of_rank[cut.index])
    if all(x is not None for x in tensors):  # else the host must ask
        return own
    return [slot if n else None for slot, n in zip(own, mean[width - flags :].tolist(), strict=True)]


def share(wholes: Sequence[Tensor], cut: Cut, comm: Comm) -> Rounds[None]:
    """Set each of ``wholes`` to what the L ranks of ``comm`` have in the slices that they own, bit for bit."""
    comm.buffers.reuse()
    of_rank = list(zip(*(cut.slices(whole.detach()) for whole in wholes), strict=True))  # [L][k]
    width = max(sum(_room(part) for part in parts) for parts in of_rank)
    if not width:
        return
    leaving = comm.buffer("leaving", width, torch.uint8, wholes[0].device)
    for slot, part in zip(_byte_slots(leaving, of_rank[cut.index]), of_rank[cut.index], strict=True):
        slot.copy_(part)
    rows = comm.buffer("arriving", cut.count * width, torch.uint8, leaving.device).view(cut.count, width)
    arriving = yield comm.all_gather(leaving, out=rows)
    for rank, (row, parts) in enumerate(zip(arriving, of_rank, strict=True)):
        if rank != cut.index:
            for slot, part in zip(_byte_slots(row, parts), parts, strict=True):
                part.copy_(slot)


def whole_of(slices: Sequence[Tensor], like: Sequence[Tensor], cut: Cut, comm: Comm | None) -> list[Tensor]:
    """All of each tensor of which the ranks of ``comm`` have ``slices``, of the shapes that ``like`` have."""
    return list(slices) if comm is None else [_whole(x, each, cut, comm) for x, each in zip(slices, like, strict=True)]


def _whole(x: Tensor, like: Tensor, cut: Cut, comm: Comm) -> Tensor:
    """As :func:`whole_of`, in the memory of the whole and a slice: all slices are of one length but the last ones."""
    width = cut.slices(like)[0].numel()
    if not width:
        return x.new_empty(like.shape)
    leaving = x.new_zeros(width)
    leaving[: x.numel()] = x.reshape(-1)
    return comm.all_gather(leaving).wait().view(-1)[: like.numel()].view(like.shape)


def gather_tensors(tensors: Mapping[str, Tensor], comm: Comm, device: torch.device) -> list[dict[str, Tensor]]:
    """What each rank of ``comm`` has, by name, on ``device``; names, types and shapes may differ."""
    own = {name: x.to(device).contiguous() for name, x in sorted(tensors.items())}
    kinds = json.dumps({name: [str(x.dtype).removeprefix("torch."), list(x.shape)] for name, x in own.items()})
    every = [
        {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, (dtype, shape) in each.items()}
        for each in map(json.loads, everywhere(kinds, comm, device))
    ]
    width = max(sum(map(_room, like.values())) for like in every)
    leaving = torch.zeros(width, dtype=torch.uint8, device=device)
    for slot, x in zip(_byte_slots(leaving, list(own.values())), own.values(), strict=True):
        slot.copy_(x)
    rows = comm.all_gather(leaving).wait() if width else leaving.expand(comm.size, 0)
    slots = (_byte_slots(row, list(like.values())) for row, like in zip(rows, every, strict=True))
    return [dict(zip(like, of_rank, strict=True)) for like, of_rank in zip(every, slots, strict=True)]


def _slots(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Views of the beginning of ``row`` [m], one after the other, of the shapes of ``like``."""
    sizes = [each.numel() for each in like]
    slots = row[: sum(sizes)].split(sizes)
    return [slot.view(each.shape) for slot, each in zip(slots, like, strict=True)]


def _byte_slots(row: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """As :func:`_slots`, of ``row`` [bytes], of the types of ``like`` too."""
    slots = row[: sum(map(_room, like))].split([_room(each) for each in like])
    return [slot[: each.nbytes].view(each.dtype).view(each.shape) for slot, each in zip(slots, like, strict=True)]


def _room(x: Tensor) -> int:
    """Bytes for ``x``, after which any other may begin."""
    return -(-x.nbytes // ALIGNED) * ALIGNED

"""What a checkpoint keeps of the gradient not yet sent."""

from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sparse.exchange import Exchange
from lightning_sparse.group import Group

KEY = "lightning_sparse"
RESIDUALS = ("per_rank", "mean", "none")
WORLD = None  # the default process group: the main threads', where checkpoints are written


def gather(exchange: Exchange, residuals: str) -> dict[str, Any]:
    """The state of all ranks, complete on rank 0: tensors, strings and integers only.

    Called on every rank between two steps; one parameter at a time, so that rank 0 never holds a second copy.
    """
    size = exchange.size
    unsent: dict[str, Tensor] = {}  # name -> [P, *shape], or [*shape] of the mean
    for group in exchange.groups:
        for name, parameter, slot in zip(group.names, group.parameters, group.slots(group.unsent), strict=True):
            if residuals == "mean":
                unsent[name] = _mean_on_rank_0(slot, size).view(parameter.shape)
            else:
                unsent[name] = _rows_on_rank_0(slot, size).view(-1, *parameter.shape)
    per_rank = residuals == "per_rank"
    return {
        "residuals": residuals,
        "size": size,
        "steps": exchange.groups[0].step if exchange.groups else 0,
        "unsent": unsent,
        "memory": [_memory_on_rank_0(group, size) for group in exchange.groups] if per_rank else [],
    }


def restore(exchange: Exchange, state: dict[str, Any] | None) -> None:
    """Set what this rank has not sent, from the state in a checkpoint, or to zero with a warning if there is none.

    On the number of ranks that saved "per_rank", each rank gets its own back, and compressors what they kept for groups
    of the same parameters.  Otherwise every rank starts from the mean of the old ones, which conserves what the mean
    gradient still owes, and compressors start anew.
    """
    if state is None:
        rank_zero_warn(
            "The checkpoint holds no residuals (it was written by another strategy, or with residuals='none'): "
            "the gradient not yet sent starts from zero."
        )
        state = {"residuals": "none", "size": 0, "steps": 0, "unsent": {}}
    missing = []
    same_ranks = state["residuals"] == "per_rank" and state["size"] == exchange.size
    kept = {tuple(m["names"]): m["tensors"] for m in state.get("memory", [])} if same_ranks else {}
    for group in exchange.groups:
        group.step = state["steps"]
        group.memory = {key: rows[exchange.rank].clone() for key, rows in kept.get(group.names, {}).items()}
        for name, parameter, slot in zip(group.names, group.parameters, group.slots(group.unsent), strict=True):
            saved = state["unsent"].get(name)
            if saved is not None and state["residuals"] == "per_rank":
                saved = saved[exchange.rank] if same_ranks else saved.mean(0)
            if saved is None or saved.shape != parameter.shape:
                slot.zero_()
                missing.append(name)
            else:
                slot.copy_(saved.reshape(-1))
    if missing and state["unsent"]:
        rank_zero_warn(f"The checkpoint holds no residual that fits {', '.join(missing)}: theirs start from zero.")


def _memory_on_rank_0(group: Group, size: int) -> dict[str, Any]:
    """What the compressor keeps for ``group``, of every rank, [P, *shape] each on rank 0."""
    return {
        "names": list(group.names),
        "tensors": {
            key: _rows_on_rank_0(kept.reshape(-1), size).view(-1, *kept.shape)
            for key, kept in sorted(group.memory.items())
        },
    }


def _rows_on_rank_0(x: Tensor, size: int) -> Tensor:
    """Every rank's ``x`` [n] on rank 0, [P, n] on the CPU; [0, n] elsewhere."""
    x = x.contiguous()
    if size == 1:
        return x.clone().cpu().unsqueeze(0)
    rows = [torch.empty_like(x) for _ in range(size)] if dist.get_rank(WORLD) == 0 else None
    dist.gather(x, rows, dst=0, group=WORLD)
    return torch.stack([row.cpu() for row in rows]) if rows else x.new_empty((0, x.numel()), device="cpu")


def _mean_on_rank_0(x: Tensor, size: int) -> Tensor:
    """The mean over the ranks, [n] on the CPU, meaningful on rank 0."""
    total = x.clone()
    if size > 1:
        dist.reduce(total, dst=0, group=WORLD)
    return total.div_(size).cpu()

"""What a checkpoint keeps of the gradient not yet sent."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.exchange import Exchange
from lightning_sparse.fusion import carry_over
from lightning_sparse.group import Group

KEY = "lightning_sparse"
RESIDUALS = ("per_rank", "mean", "none")


def gather(exchange: Exchange, residuals: str, ranks: dist.ProcessGroup | None) -> dict[str, Any]:
    """The state of all ranks, complete on rank 0: tensors, strings and integers only.

    Called on every rank between two steps; one parameter at a time, so that rank 0 never holds a second copy.
    ``ranks`` are those whose state is kept: of the default process group (None) all, or of each node its leader.
    """
    size = exchange.size
    unsent: dict[str, Tensor] = {}  # name -> [P, *shape], or [*shape] of the mean
    for group in exchange.groups:
        for name, parameter, slot in zip(group.names, group.parameters, group.slots(group.unsent), strict=True):
            if residuals == "mean":
                unsent[name] = _mean_on_rank_0(slot, size, ranks).view(parameter.shape)
            else:
                unsent[name] = _rows_on_rank_0(slot, size, ranks).view(-1, *parameter.shape)
    per_rank = residuals == "per_rank"
    return {
        "residuals": residuals,
        "size": size,
        "steps": exchange.groups[0].step if exchange.groups else 0,
        "unsent": unsent,
        "groups": [_memory_on_rank_0(group, size, ranks) for group in exchange.groups] if per_rank else [],
    }


def restore(exchange: Exchange, state: Mapping[str, Any] | None, compressor: Compressor) -> None:
    """Set what this rank has not sent, from the state in a checkpoint, or to zero if there is none.

    Parameters are found by name, so groups may have changed.  On the number of ranks that saved "per_rank", each rank
    gets its own back, and compressors what they kept.  Otherwise every rank starts from the mean of the old ones, which
    conserves what the mean gradient still owes, and compressors start anew.  One warning names all that could not be
    carried over.
    """
    if state is None:
        rank_zero_warn(
            "The checkpoint holds no residuals (it was written by another strategy, or with residuals='none'): "
            "the gradient not yet sent starts from zero."
        )
        state = {}
    saved = _Saved(state, exchange, compressor)
    carry_over(saved.groups(), list(zip(exchange.groups, exchange.compressors, strict=True)))
    if lost := saved.lost():
        rank_zero_warn(f"Resuming from a checkpoint of another configuration: {'; '.join(lost)}.")


class _Saved:
    """The state in a checkpoint, as this rank goes on with it."""

    def __init__(self, state: Mapping[str, Any], exchange: Exchange, compressor: Compressor) -> None:
        self.state = state
        self.rank, self.size = exchange.rank, exchange.size
        self.compressor = repr(compressor)
        self.parameters = {n: p for g in exchange.groups for n, p in zip(g.names, g.parameters, strict=True)}
        self.unsent: Mapping[str, Tensor] = state.get("unsent", {})  # [P, *shape], or [*shape] of the mean
        self.per_rank = state.get("residuals") == "per_rank"
        self.own = self.per_rank and state["size"] == exchange.size
        shapes = {name: tuple(x.shape[self.per_rank :]) for name, x in self.unsent.items()}
        self.fitting = {name for name, p in self.parameters.items() if shapes.get(name) == tuple(p.shape)}
        self.same_compressor = state.get("compressor") == self.compressor
        self.vouched = "checksum" in state  # else nobody knows what would come of what compressors kept

    def lost(self) -> list[str]:
        """What cannot be carried over, in words."""
        if not self.unsent:
            return []
        known, wanted = self.unsent.keys(), self.parameters.keys()
        found = []
        if self.per_rank and not self.own:
            found.append(
                f"{self.state['size']} ranks wrote it and {self.size} read it, so each starts from the mean of what "
                "they had not sent"
            )
        if not self.same_compressor:
            found.append(
                f"it was written with {self.state.get('compressor')}, so {self.compressor} learns thresholds anew"
            )
        elif not self.vouched:
            found.append(f"it has no checksum, so {self.compressor} learns thresholds anew")
        for names, what in (
            (known - wanted, "what was not sent of parameters that are gone is dropped"),
            ((known & wanted) - self.fitting, "parameters of another shape start from zero"),
            (wanted - known, "new parameters start from zero"),
        ):
            if names:
                found.append(f"{what} ({_some(sorted(names))})")
        return found

    def groups(self) -> list[Group]:
        """The groups it was written with, and one of all other parameters."""
        layout = [group["names"] for group in self.state.get("groups", [])]
        layout = [[name for name in names if name in self.fitting] for names in layout]
        placed = {name for names in layout for name in names}
        layout.append([name for name in self.parameters if name not in placed])
        groups = [Group(i, tuple(n), tuple(self.parameters[name] for name in n)) for i, n in enumerate(layout)]
        for group in groups:
            group.step = self.state.get("steps", 0)
            for name, slot in zip(group.names, group.slots(group.unsent), strict=True):
                if name in self.fitting:
                    slot.copy_(self._own(self.unsent[name]).reshape(-1))
        if self.own and self.same_compressor and self.vouched:
            for group, kept in zip(groups, self.state["groups"], strict=False):
                if group.names == tuple(kept["names"]):
                    for key, rows in kept["memory"].items():  # what has values in float32 lies beside the gradients
                        device = group.unsent.device if rows.dtype == torch.float32 else None
                        group.memory[key] = rows[self.rank].clone().to(device)
        return groups

    def _own(self, rows: Tensor) -> Tensor:
        """This rank's part of what was unsent of a parameter."""
        if self.own:
            return rows[self.rank]
        return rows.mean(0) if self.per_rank else rows


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def nbytes(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors in what :func:`gather` returned on this rank."""
    tensors = [*state["unsent"].values(), *(x for group in state["groups"] for x in group["memory"].values())]
    return sum(x.numel() * x.element_size() for x in tensors)


def _memory_on_rank_0(group: Group, size: int, ranks: dist.ProcessGroup | None) -> dict[str, Any]:
    """What the compressor keeps for ``group``, of every rank, [P, *shape] each on rank 0."""
    return {
        "names": list(group.names),
        "memory": {
            key: _rows_on_rank_0(kept.reshape(-1).to(group.unsent.device), size, ranks).view(-1, *kept.shape)
            for key, kept in sorted(group.memory.items())
        },
    }


def _rows_on_rank_0(x: Tensor, size: int, ranks: dist.ProcessGroup | None) -> Tensor:
    """Every rank's ``x`` [n] on rank 0, [P, n] on the CPU; [0, n] elsewhere."""
    x = x.contiguous()
    if size == 1:
        return x.clone().cpu().unsqueeze(0)
    rows = [torch.empty_like(x) for _ in range(size)] if dist.get_rank(ranks) == 0 else None
    if dist.get_rank(ranks) >= 0:  # else another rank of its node speaks for it
        dist.gather(x, rows, dst=0, group=ranks)
    return torch.stack([row.cpu() for row in rows]) if rows else x.new_empty((0, x.numel()), device="cpu")


def _mean_on_rank_0(x: Tensor, size: int, ranks: dist.ProcessGroup | None) -> Tensor:
    """The mean over the ranks, [n] on the CPU, meaningful on rank 0."""
    total = x.clone()
    if size > 1 and dist.get_rank(ranks) >= 0:
        dist.reduce(total, dst=0, group=ranks)
    return total.div_(size).cpu()

"""What a checkpoint keeps of the gradient not yet sent."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.fusion.groups import carry_over, not_carried
from lightning_sparse.network.collect import Collector
from lightning_sparse.settings import as_text

KEY = "lightning_sparse"
RESIDUALS = ("per_rank", "mean", "none")


def gather(exchange: Exchange, residuals: str, collector: Collector) -> dict[str, Any]:
    """The state of all ranks, complete on rank 0: tensors, strings and integers only.

    Called on every rank between two steps; one parameter at a time, so that rank 0 never holds a second copy.
    """
    unsent: dict[str, Tensor] = {}  # name -> [P, *shape], or [*shape] of the mean
    for group in exchange.groups:
        for name, parameter, slot in zip(group.names, group.parameters, group.slots(group.unsent), strict=True):
            if residuals == "mean":
                unsent[name] = collector.mean(slot).view(parameter.shape)
            else:
                unsent[name] = collector.rows(slot).view(-1, *parameter.shape)
    per_rank = residuals == "per_rank"
    return {
        "residuals": residuals,
        "size": exchange.size,
        "steps": exchange.groups[0].step if exchange.groups else 0,
        "unsent": unsent,
        "groups": [_memory_of(group, collector) for group in exchange.groups] if per_rank else [],
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
    saved = [] if state is None else _groups(state, exchange, compressor)
    carry_over(saved, list(zip(exchange.groups, exchange.compressors, strict=True)))
    if state is None:
        return
    if lost := [*_otherwise(state, exchange, compressor), *not_carried(saved, exchange.groups)]:
        rank_zero_warn(f"Resuming from a checkpoint of another configuration: {'; '.join(lost)}.")


def rows_of(state: Mapping[str, Any], rank: int, size: int) -> range:
    """The rows [P, *shape] of a state from which ``rank`` of ``size`` goes on; none of a mean, which has no rows."""
    if state["residuals"] != "per_rank":
        return range(0)
    return range(rank, rank + 1) if state["size"] == size else range(state["size"])


def used(x: Tensor, rows: range) -> Tensor:
    """That part of what was saved, [P, *shape] or the mean [*shape], and no other is read."""
    return x[rows.start : rows.stop] if rows else x


def _otherwise(state: Mapping[str, Any], exchange: Exchange, compressor: Compressor) -> Iterator[str]:
    """What is not as when ``state`` was saved, parameters apart, in words."""
    if state["residuals"] == "per_rank" and state["size"] != exchange.size:
        yield (
            f"{state['size']} ranks wrote it and {exchange.size} read it, so each starts from the mean of what they "
            "had not sent"
        )
    if state["compressor"] != as_text(compressor):
        yield f"it was written with {state['compressor']}, so {compressor} learns thresholds anew"
    elif "checksum" not in state:  # nobody knows what would come of what compressors kept
        yield f"it has no checksum, so {compressor} learns thresholds anew"


def _groups(state: Mapping[str, Any], exchange: Exchange, compressor: Compressor) -> list[Group]:
    """The groups that ``state`` was saved with, and one of all other parameters, with what this rank goes on with."""
    rows = rows_of(state, exchange.rank, exchange.size)
    same = next(_otherwise(state, exchange, compressor), None) is None
    grouped = {name for kept in state["groups"] for name in kept["names"]}
    rest = {"names": [name for name in state["unsent"] if name not in grouped], "memory": {}}
    groups = []
    for index, kept in enumerate([*state["groups"], rest]):
        saved = [state["unsent"][name] for name in kept["names"]]
        group = Group(index, tuple(kept["names"]), tuple(x[0] if rows else x for x in saved))
        group.step = state["steps"]
        for slot, x in zip(group.slots(group.unsent), saved, strict=True):
            slot.copy_(_joined(used(x, rows), rows).reshape(-1))
        if same:
            group.memory = {key: _beside(x[exchange.rank], exchange.device) for key, x in kept["memory"].items()}
        groups.append(group)
    return groups


def _joined(x: Tensor, rows: range) -> Tensor:
    """What one rank goes on with: the only row of ``x``, or the mean over its ``rows``, or ``x`` if it has none."""
    return x.squeeze(0) if len(rows) == 1 else x.mean(0) if rows else x


def _beside(kept: Tensor, device: torch.device) -> Tensor:
    """A copy of what a compressor kept, beside the gradients if it has values in float32."""
    return kept.clone().to(device if kept.dtype == torch.float32 else None)


def nbytes(state: Mapping[str, Any]) -> int:
    """Bytes of the tensors in what :func:`gather` returned on this rank."""
    tensors = [*state["unsent"].values(), *(x for group in state["groups"] for x in group["memory"].values())]
    return sum(x.numel() * x.element_size() for x in tensors)


def _memory_of(group: Group, collector: Collector) -> dict[str, Any]:
    """What the compressor keeps for ``group``, of every rank, [P, *shape] each on rank 0."""
    return {
        "names": list(group.names),
        "memory": {
            key: collector.rows(kept.reshape(-1).to(group.unsent.device)).view(-1, *kept.shape)
            for key, kept in sorted(group.memory.items())
        },
    }

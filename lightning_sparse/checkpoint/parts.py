"""What of a training differs between ranks with local steps, beside the weights, in a checkpoint and back."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.checkpoint.optimizers import set_tensors, tensors_everywhere
from lightning_sparse.checkpoint.state import State, mean_used
from lightning_sparse.checks import uncompiled
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.network.agreement import ranks_having
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.torch_comm import TorchComm

SCALER = ("scale", "_growth_tracker")  # what of a GradScaler's state changes from step to step


@dataclass(frozen=True)
class Parts:
    """What of a training, beside its model, differs between ranks with local steps."""

    optimizers: Sequence[Optimizer]
    scaler: "torch.amp.GradScaler | None"  # each rank scales its loss by itself
    module: nn.Module  # some of its buffers differ
    is_loaded: bool  # its weights are from the checkpoint already, where one is read

    @property
    def tensors(self) -> dict[str, Tensor]:
        named = chain(self.module.named_parameters(), self.module.named_buffers())
        return {uncompiled(name): x for name, x in named}

    def others(self, exchange: Exchange) -> dict[str, Tensor]:
        """What a checkpoint keeps and ``exchange`` does not average, by name.

        Buffers of whole numbers, and what ranks have not seen change.
        """
        kept = self.module.state_dict(keep_vars=True)
        whole = {name: x for name, x in self.module.named_buffers() if name in kept and not x.is_floating_point()}
        return whole | dict(exchange.not_averaged)


def gather_local(
    exchange: Exchange, ranks: TorchComm, rows: Callable[[Tensor], Tensor] | None, parts: Parts
) -> dict[str, Any]:
    """What else differs between ranks with local steps; ``rows`` gathers it, or is None where means are kept."""
    average = rows or (lambda x: ranks.mean(x.reshape(-1).to(exchange.device)).view(x.shape))
    _check_same_number(len(parts.optimizers), ranks, exchange.device)
    kept: dict[str, Any] = {
        **exchange.state(),
        "optimizers": [
            {key: average(x) for key, x in tensors_everywhere(optimizer, ranks, exchange.device).items()}
            for optimizer in parts.optimizers
        ],
    }
    if rows is None:
        return kept
    if exchange.sampled is not None:
        kept["sampled"] = rows(exchange.sampled)
    if parts.scaler is not None and (state := parts.scaler.state_dict()):
        kept["scaler"] = rows(torch.tensor([state[key] for key in SCALER], dtype=torch.float64, device="cpu"))
    others = parts.others(exchange)
    if different := _different(others, ranks, exchange.device):
        kept["buffers"] = {name: rows(others[name]) for name in different}
    return kept


def _check_same_number(optimizers: int, ranks: Comm, device: torch.device) -> None:
    """Raise a RuntimeError on every rank unless all know as many optimizers."""
    every = ranks.all_gather(torch.tensor([optimizers], dtype=torch.int64, device=device)).wait().flatten().tolist()
    if len(having := ranks_having(every)) > 1:
        known = "; ".join(f"{number} on {which}" for number, which in having.items())
        raise RuntimeError(
            f"every rank must know the same optimizers, whose states are saved; got {known}: one that a rank has not "
            "stepped yet, after an overflow say, is not known there. Give them: state_dict(optimizers=[optimizer])."
        )


def _different(buffers: Mapping[str, Tensor], ranks: Comm, device: torch.device) -> list[str]:
    """The names of those that are not the same on all ranks."""
    if not buffers:
        return []
    sums = ranks.all_gather(torch.stack([checksum(x).cpu() for x in buffers.values()]).to(device)).wait()
    return [name for name, differs in zip(buffers, (sums != sums[0]).any(0).tolist(), strict=True) if differs]


@torch.no_grad()
def start_from_mean(state: State, parts: Parts) -> None:
    """Have averaged gradients go on where local steps were: from the mean of all ranks' own."""
    rows = range(state.ranks)
    for name, tensor in parts.tensors.items():
        if name in state.unsent and state.unsent[name].shape[bool(rows) :] == tensor.shape:
            mean = mean_used(state.unsent[name], rows).to(tensor.device, tensor.dtype)
            tensor.copy_(torch.where(mean.isfinite(), mean, tensor))
    for optimizer, tensors in zip(parts.optimizers, state.optimizers, strict=False):
        set_tensors(optimizer, {key: mean_used(x, rows) for key, x in tensors.items()})


def is_set(name: str, tensors: Mapping[str, Tensor], state: State) -> bool:
    """Whether a tensor holds anything else than the average that was saved beside ``state``."""
    saved = state.local["checksums"].get(name)
    return saved is not None and name in tensors and bool(checksum(tensors[name]).cpu() != saved)


@torch.no_grad()
def restore_parts(local: Mapping[str, Any], exchange: Exchange, parts: Parts) -> None:
    """Set this rank's own loss scale, and its own of what is not averaged."""
    rank, others = exchange.rank, parts.others(exchange)
    if parts.scaler is not None and "scaler" in local and (now := parts.scaler.state_dict()):
        scale, growth = local["scaler"][rank].tolist()
        parts.scaler.load_state_dict(now | dict(zip(SCALER, (scale, int(growth)), strict=True)))
    for name, every in local.get("buffers", {}).items():
        if name in others and others[name].shape == every.shape[1:]:
            others[name].copy_(every[rank])

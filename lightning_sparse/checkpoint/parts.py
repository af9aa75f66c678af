"""What of a training differs between ranks with local steps, beside the weights, in a checkpoint and back."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_sparse.checkpoint.optimizers import set_tensors, tensors_everywhere
from lightning_sparse.checkpoint.state import State, mean_used
from lightning_sparse.checks import uncompiled
from lightning_sparse.engine.averager import LocalState
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.local_steps.buffers import bytes_of, from_bytes, saved_names
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

    def others(self, local: LocalState) -> dict[str, Tensor]:
        """What a checkpoint keeps and ``local`` does not average, by name: buffers, and what has not changed."""
        kept = saved_names(self.module)
        return {name: x for name, x in local.buffers.items() if name in kept} | dict(local.not_averaged)


def gather_local(
    local: LocalState,
    ranks: TorchComm,
    device: torch.device,
    rows: Callable[[Tensor], Tensor] | None,
    parts: Parts,
) -> dict[str, Any]:
    """What else differs between ranks with local steps; ``rows`` gathers it, or is None where means are kept."""
    average = rows or (lambda x: ranks.mean(x.reshape(-1).to(device)).view(x.shape))
    _check_same_number(len(parts.optimizers), ranks, device)
    kept: dict[str, Any] = {
        **local.state(),
        "optimizers": [
            {key: average(x) for key, x in tensors_everywhere(optimizer, ranks, device).items()}
            for optimizer in parts.optimizers
        ],
    }
    if rows is None:
        return kept
    if local.sampled is not None:
        kept["sampled"] = rows(local.sampled)
    if parts.scaler is not None and (state := parts.scaler.state_dict()):
        kept["scaler"] = rows(torch.tensor([state[key] for key in SCALER], dtype=torch.float64, device="cpu"))
    others = parts.others(local)
    if different := _different(others, ranks, device):
        kept["buffers"] = {name: _rows_of(others[name], rows) for name in different}
    return kept


def _rows_of(x: Tensor, rows: Callable[[Tensor], Tensor]) -> Tensor:
    """What ``rows`` gathers of a tensor of any type, [P, *s] on the first rank and [0, *s] elsewhere."""
    every = rows(bytes_of(x))
    return from_bytes(every, torch.Size([len(every), *x.shape]), x.dtype)


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
    """The names of those that are not the same on all ranks, and of the same size."""
    if not buffers:
        return []
    own = [
        torch.stack([checksum(x).cpu(), torch.tensor(x.nbytes, dtype=torch.int64, device="cpu")])
        for x in buffers.values()
    ]
    every = ranks.all_gather(torch.stack(own).to(device)).wait()  # [P, k, 2]
    differ = (every != every[0]).any(0).tolist()
    return [name for name, (bits, sizes) in zip(buffers, differ, strict=True) if bits and not sizes]


def with_buffers_apart(state: State, buffers: Collection[str]) -> State:
    """What versions up to 0.2.0 saved, which averaged some ``buffers``, as it is saved now."""
    if not (among := state.unsent.keys() & set(buffers)):
        return state
    rows = {name: state.unsent[name] for name in among} if state.ranks else {}
    return replace(
        state,
        unsent={name: x for name, x in state.unsent.items() if name not in among},
        groups=[group for group in state.groups if among.isdisjoint(group["names"])],
        local={**state.local, "buffers": {**state.local.get("buffers", {}), **rows}},
    )


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
def restore_parts(state: State, rank: int, local: LocalState, parts: Parts) -> None:
    """Set this rank's own loss scale, and its own of what is not averaged."""
    kept, others = state.local, parts.others(local)
    if parts.scaler is not None and "scaler" in kept and (now := parts.scaler.state_dict()):
        scale, growth = kept["scaler"][rank].tolist()
        parts.scaler.load_state_dict(now | dict(zip(SCALER, (scale, int(growth)), strict=True)))
    saved = {name: every[rank] for name, every in kept.get("buffers", {}).items() if name in others}
    own = {name: x for name, x in saved.items() if others[name].shape == x.shape}
    for name in own.keys() - local.buffers.keys():
        others[name].copy_(own.pop(name))
    other = {name for name in own if is_set(name, parts.tensors, state)}  # than what the checkpoint's model has
    local.hold({name: x for name, x in own.items() if name not in other or not parts.is_loaded}, late=other)

"""What is unsent of sharded gradients, on its way into a checkpoint and back.

R replicas, S shards; see ``sharded/model.py``.  A distributed checkpoint holds it as tensors that are sharded as
their parameters are, so that it can be read with other shards; a single file holds all of each parameter.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Shard

from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.groups import carry_over, not_carried
from lightning_sparse.network.torch_comm import TorchComm
from lightning_sparse.sharded.model import SHARD, ShardedModel, as_dtensor

KEY = "lightning_sparse_sharded"  # in a checkpoint, and the folder of tensors beside a distributed one
MEAN = "mean"  # of all replicas, in the place of a replica's number


def gather(
    averager: Averager, model: ShardedModel, residuals: str, compressor: str, plan: Mapping[str, Any], folder: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a checkpoint keeps: what is said of it, complete on rank 0, and tensors for a ``folder``.

    For a single file the tensors are in the first, on rank 0, in the memory of the host.  Called on every rank.
    """
    replica = str(averager.rank) if residuals == "per_rank" else MEAN
    column = TorchComm(model.process_group)
    unsent = {}
    for group in averager.groups:
        for name, shape, slot in zip(group.names, group.shapes, group.slots(group.unsent), strict=True):
            x = slot if residuals == "per_rank" else column.all_reduce(slot.clone()).wait() / column.size
            unsent[name] = as_dtensor(x.view(shape), model.sharded[name])
    memory = [dict(sorted(group.memory.items())) for group in averager.groups] if residuals == "per_rank" else []
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, dict(plan))
    said: dict[str, Any] = {
        "replicas": [str(r) for r in range(averager.size)] if residuals == "per_rank" else [MEAN],
        "mesh": list(model.mesh.shape),
        "steps": averager.group_step,
        "group steps": [group.step for group in averager.groups],
        "compressor": compressor,
        "groups": [list(group.names) for group in averager.groups],
        "shapes": {name: list(x.shape) for name, x in unsent.items()},
        "plans": plans[: model.shard_size],
    }
    if folder:
        tensors: dict[str, Tensor] = {f"unsent/{replica}/{name}": x for name, x in unsent.items()}
        for i, kept in enumerate(memory):
            tensors |= {f"memory/{dist.get_rank()}/{i}/{key}": x for key, x in kept.items()}
        return said, tensors
    return said | _on_first_rank(unsent, memory, column, model), {}


def _on_first_rank(
    unsent: Mapping[str, DTensor], memory: Sequence[Mapping[str, Tensor]], column: TorchComm, model: ShardedModel
) -> dict[str, Any]:
    """All of each parameter and of each rank's memory, on rank 0; one parameter at a time."""
    rows: dict[str, Tensor] = {}
    for name, x in unsent.items():
        full = x.full_tensor()
        if model.mesh[SHARD].get_local_rank() == 0:
            rows[name] = column.gather(full.reshape(-1)).view(-1, *full.shape)  # [R, *shape], or [0, *shape]
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object([{key: x.cpu() for key, x in kept.items()} for kept in memory], every)
    return {"unsent": rows, "memory": every} if dist.get_rank() == 0 else {}


def save_tensors(tensors: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Write the tensors of a distributed ``checkpoint``.  Called on every rank."""
    save(dict(tensors), checkpoint_id=checkpoint / KEY)


def restore(
    said: Mapping[str, Any] | None, checkpoint: Path | None, averager: Averager, model: ShardedModel, compressor: str
) -> None:
    """Set what this rank has not sent, from what :func:`gather` returned, or to zero if there is nothing.

    As many replicas as saved it get their own back, on as many shards with what compressors remember, and go on bit for
    bit.  Otherwise each starts from the mean of all, which conserves what is unsent of the mean gradient.
    """
    lost: list[str] = []
    saved: list[Group] = []
    if said is None:
        lost.append("the checkpoint holds no residuals, so the gradient not yet sent starts from zero")
    else:
        if checkpoint is not None and not (checkpoint / KEY).is_dir():
            raise ValueError(
                f"{checkpoint} must have a folder {KEY} with the gradient not yet sent, which its metadata describes; "
                "it is missing, so saving was interrupted or the folder was removed. Resume from an older checkpoint."
            )
        lost += _differences(said, averager, model, compressor)
        saved = _groups(said, checkpoint, averager, model, memories=not lost)
    carry_over(saved, list(zip(averager.groups, averager.compressors, strict=True)))
    if said is not None:
        known = {name for group in saved for name in group.names}
        if gone := sorted(said["shapes"].keys() - known):
            lost.append(f"what was not sent of {', '.join(gone[:5])} is dropped")
        lost += not_carried(saved, averager.groups)
    if lost:
        rank_zero_warn(f"Resuming from a checkpoint of another configuration: {'; '.join(lost)}.")


def _differences(said: Mapping[str, Any], averager: Averager, model: ShardedModel, compressor: str) -> Iterator[str]:
    replicas, mesh = said["replicas"], said["mesh"]
    if len(replicas) != averager.size or replicas == [MEAN]:
        yield f"{mesh[0]} replicas wrote it, and each of {averager.size} starts from the mean of what was not sent"
    elif mesh != list(model.mesh.shape):
        yield f"it was written with {mesh[1]} shards, so {compressor} learns thresholds anew"
    if said["compressor"] != compressor:
        yield f"it was written with {said['compressor']}, so {compressor} learns thresholds anew"


def _groups(
    said: Mapping[str, Any], checkpoint: Path | None, averager: Averager, model: ShardedModel, memories: bool
) -> list[Group]:
    """The groups that were saved, as far as their parameters are known, with what this rank goes on with."""
    own_row = len(said["replicas"]) == averager.size and said["replicas"] != [MEAN]
    rows = [said["replicas"][averager.rank]] if own_row else said["replicas"]
    names = [name for name, p in model.sharded.items() if said["shapes"].get(name) == list(p.shape)]
    unsent = {name: torch.zeros_like(model.shards[name], dtype=torch.float32) for name in names}
    for replica in rows:
        for name, x in _unsent(said, checkpoint, replica, names, model).items():
            unsent[name].add_(x, alpha=1 / len(rows))
    memory = _memory(said, checkpoint, averager) if memories else None
    groups = []
    for i, group_names in enumerate(said["groups"]):
        have = tuple(name for name in group_names if name in unsent)
        group = Group(i, have, tuple(unsent[name] for name in have))
        group.step = said["group steps"][i] if "group steps" in said else said["steps"]
        for name, slot in zip(have, group.slots(group.unsent), strict=True):
            slot.copy_(unsent[name].reshape(-1))
        if memory is not None and len(have) == len(group_names):
            group.memory = memory[i]
        groups.append(group)
    return groups


def _unsent(
    said: Mapping[str, Any], checkpoint: Path | None, replica: str, names: Sequence[str], model: ShardedModel
) -> dict[str, Tensor]:
    """What a ``replica`` had not sent, this rank's shard of each parameter."""
    if checkpoint is None:
        row = said["replicas"].index(replica)
        return {name: _own_shard(said["unsent"][name][row], model.sharded[name]) for name in names}
    zeros = {name: torch.zeros_like(model.shards[name], dtype=torch.float32) for name in names}
    state = {f"unsent/{replica}/{name}": as_dtensor(x, model.sharded[name]) for name, x in zeros.items()}
    load(state, checkpoint_id=checkpoint / KEY)
    return zeros


def _own_shard(full: Tensor, like: DTensor) -> Tensor:
    """This rank's shard of a ``full`` tensor, cut as FSDP cuts its parameter."""
    placement, rank, own = like.placements[0], like.device_mesh.get_local_rank(), like.to_local()
    assert isinstance(placement, Shard)
    parts = full.chunk(like.device_mesh.size(), placement.dim)
    return parts[rank].to(own.device) if rank < len(parts) else torch.empty_like(own, dtype=full.dtype)


def _memory(said: Mapping[str, Any], checkpoint: Path | None, averager: Averager) -> list[dict[str, Tensor]]:
    """What this rank's compressors remembered of each group; values in float32 lie beside the gradients."""
    rank = dist.get_rank()
    if checkpoint is None:
        kept: list[dict[str, Tensor]] = said["memory"][rank]
    else:
        prefix = f"memory/{rank}/"
        found = FileSystemReader(checkpoint / KEY).read_metadata().state_dict_metadata
        state = {
            key: torch.empty(each.size, dtype=each.properties.dtype, device="cpu")  # type: ignore[union-attr]  # they are tensors
            for key, each in found.items()
            if key.startswith(prefix)
        }
        load(dict(state), checkpoint_id=checkpoint / KEY)
        kept = [{} for _ in said["groups"]]
        for key, x in state.items():
            i, _, name = key.removeprefix(prefix).partition("/")
            kept[int(i)][name] = x
    return [
        {key: x.clone().to(averager.device if x.dtype == torch.float32 else None) for key, x in each.items()}
        for each in kept
    ]

"""What is unsent in sharded models, on its way into a checkpoint and back.

R replicas, S shards; see ``sharded/model.py``.  A distributed checkpoint holds it as tensors that are sharded as
their parameters are, so that it can be read with other shards; a single file holds all of each parameter.  With local
steps what is kept of a replica is its own weights, and beside them what else each rank has for itself.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
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

from lightning_sparse.checkpoint.rank_local import RankLocalState, different_on, own_tensors, set_tensors
from lightning_sparse.checkpoint.residuals import ANEW, steps_of, written_with, zero_everywhere
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.averager import Averager, LocalState
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.engine.groups import OF_WEIGHTS, carry_over, not_carried
from lightning_sparse.local_steps.buffers import saved_names
from lightning_sparse.network.cut import as_shard_of, shard_of
from lightning_sparse.network.torch_comm import TorchComm, world
from lightning_sparse.sharded.model import SHARD, ShardedModel

KEY = "lightning_sparse_sharded"  # in a checkpoint, and the folder of tensors beside a distributed one
MEAN = "mean"  # of all replicas, in the place of a replica's number
MEMORY, OWN = "memory", "own"  # what compressors remember of each group, and what else a rank has for itself
DUE = "due"  # means of gradients that no optimizer has taken yet


def gather(
    averager: Averager,
    model: ShardedModel,
    residuals: str,
    compressor: str,
    plan: Mapping[str, Any],
    folder: bool,
    parts: RankLocalState,
    keep_means: bool,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what a checkpoint keeps: what is said of it, complete on rank 0, and tensors for a ``folder``.

    For a single file the tensors are in the first, on rank 0, in the memory of the host.  ``keep_means``: the step will
    be made again if it is saved before its optimizer has stepped.  Called on every rank.
    """
    replica, local = str(averager.rank) if residuals == "per_rank" else MEAN, averager.local
    column = TorchComm(model.process_group)
    groups = list(averager.kept(keep_means))
    means = averager.due_means if keep_means else {}
    due = {name: as_shard_of(model.tensors[name], x.to(averager.device)) for name, x in means.items()}
    unsent, zero = {}, []
    for group in groups:
        slots = group.slots(group.unsent)
        are_zero = zero_everywhere(slots, averager, world())
        zero += [name for name, is_zero in zip(group.names, are_zero, strict=True) if is_zero]
        for name, shape, slot in zip(group.names, group.shapes, slots, strict=True):
            x = slot if residuals == "per_rank" else column.all_reduce(slot.clone()).wait() / column.size
            unsent[name] = as_shard_of(model.tensors[name], x.view(shape))
    memory = [dict(sorted(group.memory.items())) for group in groups] if residuals == "per_rank" else []
    plans: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(plans, dict(plan))
    said: dict[str, Any] = {
        "replicas": [str(r) for r in range(averager.size)] if residuals == "per_rank" else [MEAN],
        "mesh": list(model.mesh.shape),
        "steps": steps_of(averager),
        "group steps": [group.step for group in groups],
        "compressor": compressor,
        "groups": [list(group.names) for group in groups],
        "shapes": {name: list(x.shape) for name, x in unsent.items()},
        "zero": zero,  # of which nothing else is kept
        DUE: list(due),
        "plans": plans[: model.shard_size],
    }
    for name in zero:
        del unsent[name]
    own: dict[str, Tensor] = {}
    if local is not None:
        said["local"], (own, said["differing"]) = True, _own(local, parts, averager.device)
    if folder:
        tensors: dict[str, Tensor] = {f"unsent/{replica}/{name}": x for name, x in unsent.items()}
        for i, kept in enumerate(memory):
            tensors |= {f"{MEMORY}/{dist.get_rank()}/{i}/{key}": x for key, x in kept.items()}
        tensors |= {f"{DUE}/{name}": x for name, x in due.items()}
        return said, tensors | {f"{OWN}/{dist.get_rank()}/{key}": x for key, x in own.items()}
    said["means"] = {name: _whole(x).cpu() for name, x in due.items()}  # of which rank 0's is kept
    return said | _on_first_rank(unsent, [*memory, own], column, model), {}


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _on_first_rank(
    unsent: Mapping[str, Tensor], of_rank: Sequence[Mapping[str, Tensor]], column: TorchComm, model: ShardedModel
) -> dict[str, Any]:
    """All of each parameter and of what each rank has for itself, on rank 0; one parameter at a time."""
    rows: dict[str, Tensor] = {}
    for name, x in unsent.items():
        full = _whole(x)
        if model.mesh[SHARD].get_local_rank() == 0:
            rows[name] = column.gather(full.reshape(-1)).view(-1, *full.shape)  # [R, *shape], or [0, *shape]
    every: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object([{key: x.cpu() for key, x in kept.items()} for kept in of_rank], every)
    if every is None:
        return {}
    return {"unsent": rows, MEMORY: [kept[:-1] for kept in every], OWN: [kept[-1] for kept in every]}


def save_tensors(tensors: Mapping[str, Tensor], checkpoint: Path) -> None:
    """Write the tensors of a distributed ``checkpoint``.  Called on every rank."""
    save(dict(tensors), checkpoint_id=checkpoint / KEY)


def restore(
    said: Mapping[str, Any] | None,
    checkpoint: Path | None,
    averager: Averager,
    model: ShardedModel,
    compressor: str,
    parts: RankLocalState,
) -> None:
    """Set what this rank has not sent, from what :func:`gather` returned, or to zero if there is nothing.

    As many replicas as saved it get their own back, on as many shards with what compressors remember, and go on bit for
    bit.  Otherwise each starts from the mean of all, which conserves what is unsent of the mean gradient.

    Raises:
        ValueError: the tensors are missing, or were saved with local steps and are read without.
    """
    local = averager.local
    lost: list[str] = []
    saved: list[Group] = []
    said = _of_this_kind(said, local is not None)
    if local is not None:
        model.reshard()
        local.abandon(is_loaded=True)
    if said is None:
        lost.append("the checkpoint holds no residuals, so the gradient not yet sent starts from zero")
    else:
        if checkpoint is not None and not (checkpoint / KEY).is_dir():
            raise ValueError(
                f"{checkpoint} must have a folder {KEY} with the gradient not yet sent, which its metadata describes; "
                "it is missing, so saving was interrupted or the folder was removed. Resume from an older checkpoint."
            )
        lost += _differences(said, averager, model, compressor)
        if local is not None:
            local.adopt(said["groups"])
        saved = _groups(said, checkpoint, averager, model, _carried(said, model, bool(lost)))
    carry_over(saved, list(zip(averager.groups, averager.compressors, strict=True)))
    averager.hand_back({} if said is None else _due(said, checkpoint, model))
    if local is not None:
        _restore_local(said, checkpoint, averager, saved, model, parts)
    if said is not None:
        known = {name for group in saved for name in group.names}
        if gone := sorted(said["shapes"].keys() - known):
            lost.append(f"what was not sent of {', '.join(gone[:5])} is dropped")
        lost += not_carried(saved, averager.groups)
    if lost:
        rank_zero_warn(f"lightning_sparse: Resuming from a checkpoint of another configuration: {'; '.join(lost)}.")


def _of_this_kind(said: Mapping[str, Any] | None, local: bool) -> Mapping[str, Any] | None:
    """Return what is ``said`` if it is of gradients, or of ``local`` steps, as is needed.

    Raises:
        ValueError: it is of local steps, and gradients are averaged.
    """
    was_local = said is not None and said.get("local", False)
    if was_local and not local:
        raise ValueError(
            "a checkpoint of a sharded model that was written with local_steps must be read with local_steps, since "
            "each replica has weights and optimizer states of its own; got local_steps=0. Give local_steps as before, "
            "or load the weights alone, which are the average, and start a new fit."
        )
    if said is not None and local and not was_local:
        rank_zero_warn(
            "lightning_sparse: The checkpoint was written without local_steps and is read with: what the ranks had "
            "not sent is of another kind, and is dropped."
        )
        return None
    return said


def _differences(said: Mapping[str, Any], averager: Averager, model: ShardedModel, compressor: str) -> Iterator[str]:
    replicas, mesh = said["replicas"], said["mesh"]
    if len(replicas) != averager.size or replicas == [MEAN]:
        yield f"{mesh[0]} replicas wrote it, and each of {averager.size} starts from the mean of what was not sent"
    elif mesh != list(model.mesh.shape):
        yield f"it was written with {mesh[1]} shards, so {ANEW}"
    if said["compressor"] != compressor:
        yield written_with(said["compressor"], compressor)
    if averager.local is not None and mesh != list(model.mesh.shape):
        yield "states of optimizers and buffers are those of the first replica"


def _carried(said: Mapping[str, Any], model: ShardedModel, is_other: bool) -> Collection[str] | None:
    """The names of what goes on of that which was remembered of groups; None: all of it."""
    if not is_other:
        return None
    return OF_WEIGHTS if said["mesh"] == list(model.mesh.shape) and said["replicas"] != [MEAN] else ()


def _groups(
    said: Mapping[str, Any],
    checkpoint: Path | None,
    averager: Averager,
    model: ShardedModel,
    carried: Collection[str] | None,
) -> list[Group]:
    """The groups that were saved, as far as their parameters are known, with what this rank goes on with."""
    own_row = len(said["replicas"]) == averager.size and said["replicas"] != [MEAN]
    rows = [said["replicas"][averager.rank]] if own_row else said["replicas"]
    names = [name for name, p in model.tensors.items() if said["shapes"].get(name) == list(p.shape)]
    unsent = {name: _zeros(model.tensors[name]) for name in names}
    for replica in rows:
        for name, x in _unsent(said, checkpoint, replica, names, model).items():
            unsent[name].add_(x, alpha=1 / len(rows))
    memory = _memory(said, checkpoint, averager, carried) if carried is None or carried else None
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


def _zeros(p: Tensor) -> Tensor:
    return torch.zeros_like(shard_of(p.detach()), dtype=torch.float32)


def _unsent(
    said: Mapping[str, Any], checkpoint: Path | None, replica: str, names: Sequence[str], model: ShardedModel
) -> dict[str, Tensor]:
    """What a ``replica`` had not sent, this rank's shard of each parameter, but for zeros."""
    zero = set(said.get("zero", ()))
    names = [name for name in names if name not in zero]
    if checkpoint is None:
        row = said["replicas"].index(replica)
        return {name: _own_shard(said["unsent"][name][row], model.tensors[name]) for name in names}
    return _read(checkpoint, f"unsent/{replica}", names, model)


def _due(said: Mapping[str, Any], checkpoint: Path | None, model: ShardedModel) -> dict[str, Tensor]:
    """The means that no optimizer had taken, this rank's shard of each parameter."""
    names = [name for name in said.get(DUE, ()) if list(model.tensors[name].shape) == said["shapes"][name]]
    if checkpoint is None:
        return {name: _own_shard(said["means"][name], model.tensors[name]) for name in names}
    return _read(checkpoint, DUE, names, model)


def _read(checkpoint: Path, kind: str, names: Sequence[str], model: ShardedModel) -> dict[str, Tensor]:
    """Tensors of a distributed ``checkpoint``, this rank's shard of each parameter."""
    found = {name: _zeros(model.tensors[name]) for name in names}
    if found:
        state = {f"{kind}/{name}": as_shard_of(model.tensors[name], x) for name, x in found.items()}
        load(state, checkpoint_id=checkpoint / KEY)
    return found


def _own_shard(full: Tensor, like: Tensor) -> Tensor:
    """This rank's shard of a ``full`` tensor, cut as FSDP cuts its parameter."""
    if not isinstance(like, DTensor):
        return full.to(like.device)
    placement, rank, own = like.placements[0], like.device_mesh.get_local_rank(), like.to_local()
    assert isinstance(placement, Shard)
    parts = full.chunk(like.device_mesh.size(), placement.dim)
    return parts[rank].to(own.device) if rank < len(parts) else torch.empty_like(own, dtype=full.dtype)


def _memory(
    said: Mapping[str, Any], checkpoint: Path | None, averager: Averager, carried: Collection[str] | None
) -> list[dict[str, Tensor]]:
    """What was remembered of each group on this rank; values in float32 lie beside the gradients."""
    if checkpoint is None:
        kept: list[dict[str, Tensor]] = said[MEMORY][dist.get_rank()]
    else:
        kept = [{} for _ in said["groups"]]
        for key, x in _of_this_rank(MEMORY, checkpoint).items():
            i, _, name = key.partition("/")
            kept[int(i)][name] = x
    return [
        {
            key: x.clone().to(averager.device if x.dtype == torch.float32 else None)
            for key, x in each.items()
            if carried is None or key in carried
        }
        for each in kept
    ]


def _of_this_rank(kind: str, checkpoint: Path) -> dict[str, Tensor]:
    """The tensors of a distributed ``checkpoint`` that this rank has saved for itself, by the rest of their names."""
    prefix = f"{kind}/{dist.get_rank()}/"
    found = FileSystemReader(checkpoint / KEY).read_metadata().state_dict_metadata
    state = {
        key: torch.empty(each.size, dtype=each.properties.dtype, device="cpu")  # type: ignore[union-attr]  # they are tensors
        for key, each in found.items()
        if key.startswith(prefix)
    }
    load(dict(state), checkpoint_id=checkpoint / KEY)
    return {key.removeprefix(prefix): x for key, x in state.items()}


# - local steps: what each rank has for itself

NOTHING = {  # is known of second moments
    "squares": torch.empty((2, 0), dtype=torch.float32, device="cpu"),
    "looks": torch.zeros((), dtype=torch.int64, device="cpu"),
    "lowered by": torch.empty((2, 0), dtype=torch.float32, device="cpu"),
}


def _own(local: LocalState, parts: RankLocalState, device: torch.device) -> tuple[dict[str, Tensor], list[str]]:
    """All of it by name, such as "optimizer/0/3.exp_avg"; and the names of buffers that are to be sent next."""
    state = local.state()
    found = {f"{kind}/{name}": x for kind in ("moments", "seen", "averages") for name, x in state[kind].items()}
    if local.sampled is not None:
        found["sampled"] = local.sampled
    for i, optimizer in enumerate(parts.optimizers):
        found |= {f"optimizer/{i}/{path}": x for path, x in own_tensors(optimizer).items()}
    kept = saved_names(parts.module)
    buffers = {name: x for name, x in local.buffers.items() if name in kept}
    found |= {f"buffers/{name}": buffers[name] for name in different_on(buffers, world(), device)}
    for name, x in local.not_averaged.items():
        if name in state["seen"] and not torch.equal(checksum(shard_of(x)).cpu(), state["seen"][name]):
            found[f"changed/{name}"] = shard_of(x)
    return {key: x.detach() for key, x in found.items()}, state["differing"]


@torch.no_grad()
def _restore_local(
    said: Mapping[str, Any] | None,
    checkpoint: Path | None,
    averager: Averager,
    saved: Sequence[Group],
    model: ShardedModel,
    parts: RankLocalState,
) -> None:
    """Go on with local steps, each group's ``unsent`` being this rank's own weights; from nothing if nothing is said.

    What each rank had for itself it gets back on the same mesh alone.
    """
    local, own = averager.local, dict[str, Tensor]()
    assert local is not None
    if said is not None and said["mesh"] == list(model.mesh.shape):
        own = said[OWN][dist.get_rank()] if checkpoint is None else _of_this_rank(OWN, checkpoint)

    def part(kind: str) -> dict[str, Tensor]:
        return {key.removeprefix(f"{kind}/"): x for key, x in own.items() if key.startswith(f"{kind}/")}

    names = {name for group in saved for name in group.names}
    averages = {name: x.to(averager.device) for name, x in part("averages").items()}
    local.unpack(None if said is None else said["steps"], names, averages, late=False)
    for i, optimizer in enumerate(parts.optimizers):
        set_tensors(optimizer, part(f"optimizer/{i}"))
    moments, differing = part("moments") or NOTHING, said["differing"] if said is not None and own else []
    local.resume({"moments": moments, "seen": part("seen"), "differing": differing}, own.get("sampled"))
    for name, x in part("changed").items():
        shard_of(local.not_averaged[name]).copy_(x)
    local.hold(part("buffers"), late=())

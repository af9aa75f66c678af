"""Parameters as FSDP2 has sharded them: the groups that its hooks are called for, and what they may not be.

R = replicas of the model, S = shards of each; see ``sharded_model.py``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_sparse.checks import uncompiled

REPLICATE, SHARD = "replicate", "shard"  # dimensions of the mesh


@dataclass(eq=False)
class ShardGroup:
    """What is trained of the parameters of one call of ``fully_shard``."""

    names: list[str]
    parameters: list[DTensor]
    shards: list[Tensor]  # of each parameter this rank's, which may be empty
    fsdp: Any  # FSDP's own group, whose layout of gradients is in no public place
    #: Elements of each gradient as FSDP reduces it: shards of a parameter are padded to one size.
    padded_sizes: list[int]
    is_deferred: bool = False  # .grad has gradients that were reduced inside the node alone

    def places(self, reduced: Tensor) -> list[Tensor]:
        """The gradient of each shard, of its shape, in what FSDP has reduced."""
        offsets = accumulate(self.padded_sizes, initial=int(reduced.storage_offset()))
        places = zip(self.shards, offsets, strict=False)  # the last offset is the end
        return [reduced.as_strided(shard.shape, shard.stride(), offset) for shard, offset in places]

    def gradients(self) -> list[Tensor | None]:
        """What is in ``.grad`` of each parameter, this rank's shard of it."""
        return [_own_gradient(p) for p in self.parameters]

    def set_gradient(self, i: int, gradient: Tensor) -> None:
        """Have ``.grad`` of a parameter hold this rank's shard ``gradient``."""
        p = self.parameters[i]
        own = _own_gradient(p)
        if own is None:
            p.grad = as_dtensor(gradient, p)
        elif own.data_ptr() != gradient.data_ptr():
            own.copy_(gradient)


def _own_gradient(p: DTensor) -> Tensor | None:
    return p.grad.to_local() if isinstance(p.grad, DTensor) else None


def as_dtensor(shard: Tensor, like: DTensor) -> DTensor:
    """This rank's ``shard`` as a part of a tensor that is sharded ``like`` another."""
    mesh, placements = like.device_mesh, like.placements
    return DTensor.from_local(shard, mesh, placements, run_check=False, shape=like.shape, stride=like.stride())


def named_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Each parameter of ``module``, under the name that it has where nothing is compiled."""
    for name, p in module.named_parameters():
        yield uncompiled(name), p


def fsdp_groups(module: FSDPModule) -> list[Any]:
    """FSDP's groups of the parameters of one call of ``fully_shard``: one, unless their meshes differ."""
    state: Any = module._get_fsdp_state()
    groups: list[Any] = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]  # before PyTorch 2.12
    return [group for group in groups if group is not None]


def shard_groups(module: nn.Module, mesh: DeviceMesh) -> Iterator[ShardGroup]:
    """The groups of trained parameters, in the order in which backward reaches their modules."""
    name_of = {p: name for name, p in named_parameters(module)}
    found: dict[int, Any] = {}
    for name, child in module.named_modules():
        if isinstance(child, FSDPModule):
            of_child = fsdp_groups(child)
            if len(of_child) > 1:
                raise ValueError(
                    f"fully_shard({name or 'the model'}) must make one group of parameters; got {len(of_child)}, from "
                    "a shard_placement_fn that returns several meshes, of which FSDP calls no hook. Give one mesh."
                )
            found.update((id(group), group) for group in of_child)
    sharded: set[Tensor] = set()
    for fsdp in reversed(found.values()):
        trained = [each for each in fsdp.fsdp_params if each.sharded_param.requires_grad]
        parameters = [each.sharded_param for each in trained]
        sharded.update(parameters)
        if not trained:
            continue
        names = [name_of[p] for p in parameters]
        _check_group(names, parameters, fsdp, mesh)
        sizes = [each.padded_sharded_param_size.numel() for each in trained]
        yield ShardGroup(names, parameters, [p.to_local().detach() for p in parameters], fsdp, sizes)
    if plain := [name for p, name in name_of.items() if p.requires_grad and p not in sharded]:
        raise ValueError(
            f"every parameter that is trained must be sharded; got {', '.join(plain[:3])}"
            f"{', ...' if len(plain) > 3 else ''} unsharded, which nothing would average. Call fully_shard on the "
            'module that has them too, at last on the whole model: fully_shard(model, mesh=self.device_mesh["shard"]).'
        )


def _check_group(names: Sequence[str], parameters: Sequence[Any], fsdp: Any, mesh: DeviceMesh) -> None:
    """Raise a ValueError for what cannot be averaged here."""
    for name, p in zip(names, parameters, strict=True):
        if p.device_mesh != mesh[SHARD]:
            raise ValueError(
                f'{name} must be sharded over the mesh\'s dimension "shard" alone: fully_shard(module, '
                f'mesh=self.device_mesh["shard"]); got {p.device_mesh}. What crosses nodes is this strategy\'s to send.'
            )
        if getattr(p, "_post_accumulate_grad_hooks", None):
            raise ValueError(
                f"{name} must have no hook that runs once its gradient is accumulated, since that is before replicas "
                "have averaged it; got one. Step the optimizer after backward."
            )
    if any(each.offload_to_cpu for each in fsdp.fsdp_params):
        raise ValueError(
            f"offload_policy must not be CPUOffloadPolicy: what is unsent lies beside the shards; got it for {names[0]}"
            ". Leave it out."
        )
    policy = fsdp.fsdp_params[0].mp_policy  # PyTorch 2.15 keeps none for the group
    dtype = policy.reduce_dtype or policy.param_dtype or parameters[0].dtype
    if dtype == torch.float16 or parameters[0].dtype == torch.float16:
        raise ValueError(
            f"gradients must be reduced in float32 or bfloat16; got float16 for {names[0]}, which FSDP scales before "
            "and after. Give MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)."
        )


# - within a backward


def with_zeros(reduced: Tensor, group: ShardGroup, trained: Sequence[bool]) -> Tensor:
    """What FSDP has ``reduced`` of the parameters that are ``trained`` now, with zeros for those frozen meanwhile."""
    sizes = [size for size, is_trained in zip(group.padded_sizes, trained, strict=True) if is_trained]
    if reduced.numel() == sum(sizes):
        parts = iter(reduced.split(sizes))
        return torch.cat(
            [
                next(parts) if is_trained else reduced.new_zeros(size)
                for size, is_trained in zip(group.padded_sizes, trained, strict=True)
            ]
        )
    raise RuntimeError(
        "a backward that reaches a module given to fully_shard must give a gradient to every parameter of it that was "
        f"trained when the strategy was set up, and to no other; of the module with {', '.join(group.names[:3])} it "
        "did not. Call fully_shard by itself on the part that may be unused, or is thawed later; or, for unused ones, "
        "from PyTorch 2.13 on set_reduce_scatter_unused_params(True) on the module."
    )


def check_factors(group: ShardGroup) -> None:
    """Raise a RuntimeError where FSDP changes a gradient after its hook, or divides it by a number of the user's."""
    for setting in ("gradient_divide_factor", "force_sum_reduction_for_comms"):
        if given := getattr(group.fsdp, setting, None):
            raise RuntimeError(
                f"set_{setting} must not be called on a sharded model that this strategy averages: gradients are means "
                f"over all ranks here; got {given} for the module with {group.names[0]}. Leave it out."
            )

"""A model that FSDP2 shards inside nodes: what each node has reduced is handed to the averager, which averages nodes.

R = replicas of the model, S = shards of each.  Rank r * S + s has shard s of replica r; the R ranks that have the same
shard are a column, and exchange among themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_sparse.checks import uncompiled
from lightning_sparse.engine.averager import Averager, LocalState
from lightning_sparse.engine.bucket import PendingBucket
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.network.cut import as_shard_of

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
    #: What FSDP has reduced in this backward.  It reads that on another stream than the one whose memory it is, and
    #: refers to it no longer.
    reduced: Tensor | None = None

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
            p.grad = as_shard_of(p, gradient)
        elif own.data_ptr() != gradient.data_ptr():
            own.copy_(gradient)


class ShardBucket(PendingBucket):
    """The gradients of one call of ``fully_shard``: of each parameter this rank's shard, reduced inside the node."""

    def __init__(
        self, buffer: Tensor, shards: Sequence[Tensor], places: Sequence[Tensor], used: Sequence[Tensor]
    ) -> None:
        super().__init__(buffer, shards)
        self.places = places  # of each shard's gradient, views of ``buffer``
        self.used = used

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(self.parameters, self.places, strict=True)


class ShardedModel:
    """What an averager asks of a ``DistributedDataParallel``, of a module whose parameters FSDP2 shards inside nodes.

    FSDP calls a hook with what it has reduced, in backward, as soon as it has: the hook hands this to the averager and
    does not wait.  Once backward is at its end (see :meth:`backward`) the means are waited for, and ``.grad`` holds
    them.  Parameters that a backward does not use keep what is unsent, as with ``find_unused_parameters=True`` of DDP.

    Args:
        module: after ``fully_shard(..., mesh=mesh["shard"])`` of all that is trained, on its device.
        mesh: of R x S ranks, with the dimensions "replicate" and "shard".

    Raises:
        ValueError: a parameter that is trained is not sharded so, or something cannot be averaged behind FSDP's back.
    """

    find_unused_parameters = True
    static_graph = False
    require_forward_param_sync = True  # buffers have changed, in a forward that trains
    broadcast_buffers = True  # with local steps, in which ranks compare them now and then
    parameters_to_ignore: frozenset[str] = frozenset()
    join_hook: Any = None

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if not hasattr(FSDPModule, "set_all_reduce_hook"):
            raise ValueError(f"PyTorch must be 2.7 or newer for sharded models; got {torch.__version__}. Upgrade it.")
        self.module, self.mesh, self.shard_size = module, mesh, mesh[SHARD].size()
        self.parts = [each for each in module.modules() if isinstance(each, FSDPModule)]
        self.reshard()  # which FSDP leaves out after an evaluation
        self.process_group, self.inside = mesh[REPLICATE].get_group(), mesh[SHARD].get_group()
        self.replicas: list[list[int]] = mesh.mesh.tolist()  # the ranks of each
        self.columns: list[list[int]] = mesh.mesh.t().tolist()
        self.groups = list(shard_groups(module, mesh))
        every = dict(pair for group in self.groups for pair in zip(group.names, group.shards, strict=True))
        self.tensors = dict(named_parameters(module))  # by name, in the order of definition; sharded ones are so here
        every_sharded = {name: p for name, p in self.tensors.items() if isinstance(p, DTensor)}
        #: What is trained, by name.
        self.sharded = {name: p for name, p in every_sharded.items() if p.requires_grad}
        #: What is not.
        self.frozen = {name: p for name, p in every_sharded.items() if not p.requires_grad}
        self.shards = {name: every[name] for name in self.sharded}  # this rank's of each
        #: The parameter of each shard, which optimizers have.
        self.held: dict[Tensor, Tensor] = {shard: self.sharded[name] for name, shard in self.shards.items()}
        self._handed_over: list[tuple[ShardGroup, ShardBucket, list[Tensor | None]]] = []  # in this backward
        self._is_in_backward = False  # within `backward`, which sees where it ends
        self._is_local = False  # this backward has reached something, and each replica keeps its own gradients
        self._is_closed = False
        self._synchronise()

    def reshard(self) -> None:
        """Have the module hold shards: a root stays whole after a forward, and would be used once more as it is."""
        for each in self.parts:
            each.reshard()

    @torch.no_grad()
    def _synchronise(self) -> None:
        """Have all replicas start from the first one's shards, and all ranks from rank 0's buffers, as DDP does."""
        first = dist.get_process_group_ranks(self.process_group)[0]
        for x in (*self.module.parameters(), *self.module.buffers()):
            if isinstance(x, DTensor):
                _broadcast(x.to_local().detach(), first, self.process_group)
            else:
                _broadcast(x.detach(), 0, dist.group.WORLD)

    # - as a DistributedDataParallel

    def parameters(self) -> Iterator[Tensor]:
        """This rank's shards of what is trained."""
        return iter(self.shards.values())

    def average_with(self, hand_over: Callable[[PendingBucket], object], averager: Callable[[], Averager]) -> None:
        """Hand every gradient to ``hand_over`` from now on, for the averager that ``averager`` returns."""
        self._hand_over, self._averager = hand_over, averager
        group_of = {id(group.fsdp): group for group in self.groups}
        for part in self.parts:
            for fsdp in fsdp_groups(part):
                group = group_of.get(id(fsdp))
                part.set_all_reduce_hook(partial(self._take, group) if group else _refuse_thawed)

    @contextmanager
    def backward(self, always: bool = False) -> Iterator[None]:
        """Wait for the means once the block has ended, in which a backward runs.

        Outside of such a block autograd's callback at the end of a backward waits for them.  A reentrant checkpoint
        fires it after each of its parts.  ``always``: also where nothing that is trained was reached, as others may.
        """
        self._is_in_backward = True
        try:
            yield
        except BaseException:
            self._handed_over.clear()
            self._is_local = False
            raise
        finally:
            self._is_in_backward = False
        is_due = any(group.fsdp.reduce_grads and group.fsdp.all_reduce_grads for group in self.groups)
        self._end_backward(always and is_due)

    def _gradients(self) -> GradientAverager:
        averager = self._averager()
        assert isinstance(averager, GradientAverager)
        return averager

    def close(self) -> None:
        """Have a backward from now on say that nothing averages its gradients."""
        self._is_closed = True

    # - in backward

    def _take(self, group: ShardGroup, reduced: Tensor) -> None:
        """FSDP's hook: take up what it ``reduced`` inside the node; what it does with it afterwards is set right later.

        That is to add it to ``.grad``, or to have ``.grad`` refer to it.
        """
        if self._is_closed:
            raise RuntimeError(
                "the strategy that averaged this model's replicas was torn down, so a backward would have them drift "
                "apart; to train on, fit with lightning_sparse's SparseHSDPStrategy again, or make a new model."
            )
        group.reduced = reduced
        if (local := self._averager().local) is not None:
            self._note_own(group, local)
            return
        if not group.fsdp.all_reduce_grads:
            group.is_deferred = True
            return
        check_factors(group)
        trained = [p.requires_grad for p in group.parameters]
        if reduced.numel() != sum(group.padded_sizes):
            reduced = with_zeros(reduced, group, trained)
        if any(group is other for other, *_ in self._handed_over):  # once more in this backward
            self._end_backward()
        self._see_end(has_begun=bool(self._handed_over))
        self._pass_on(group, reduced, trained)

    def _note_own(self, group: ShardGroup, local: LocalState) -> None:
        """Leave ``.grad`` as FSDP sets it, to the mean of the replica, which takes a step of its own."""
        local.check_backward()
        if group.fsdp.all_reduce_grads:
            self._see_end(has_begun=self._is_local)
            self._is_local = True

    def _see_end(self, has_begun: bool) -> None:
        """Have :meth:`_end_backward` called at the end of a backward, unless that ``has_begun`` before."""
        if not has_begun and not self._is_in_backward:
            Variable._execution_engine.queue_callback(self._end_backward)  # as FSDP does

    def _pass_on(self, group: ShardGroup, reduced: Tensor | None, trained: Sequence[bool] = ()) -> None:
        """Hand over what was ``reduced``, and what was deferred; or that nothing was."""
        before = group.gradients()
        used = [shard for shard, is_trained in zip(group.shards, trained, strict=False) if is_trained]
        if group.is_deferred:
            used = group.shards
        if reduced is None:
            buffer = group.shards[0].new_zeros(sum(group.padded_sizes))
        elif any(x is not None for x in before) or reduced.dtype != group.parameters[0].dtype:
            buffer = reduced.to(group.parameters[0].dtype, copy=True)
        else:
            buffer = reduced  # which is what .grad will refer to
        places = group.places(buffer)
        earlier: list[Tensor | None] = [None] * len(places)  # means of a backward before, which are not sent again
        for i, (place, x) in enumerate(zip(places, before, strict=True)):
            self._gradients().look(group.shards[i], x)
            if x is not None and group.is_deferred:
                place.add_(x)
            elif x is not None:
                earlier[i] = x.clone()
        group.is_deferred = False
        bucket = ShardBucket(buffer, group.shards, places, used)
        self._handed_over.append((group, bucket, earlier))
        self._hand_over(bucket)

    def _end_backward(self, always: bool = False) -> None:
        """Wait for the means, and set ``.grad`` to them."""
        if (local := self._averager().local) is not None and (self._is_local or always):
            self._forget_reduced()
            self._is_local = False
            local.end_backward()
            return
        if not self._handed_over and not always:
            return
        arrived = {id(group) for group, *_ in self._handed_over}
        for group in self.groups:
            if id(group) not in arrived:
                self._pass_on(group, None)
        handed_over, self._handed_over = self._handed_over, []
        here = {id(shard) for _, bucket, _ in handed_over for shard in bucket.used}
        averager, shards = self._gradients(), self.shards.values()
        flags = torch.tensor([float(id(shard) in here) for shard in shards], dtype=torch.float32, device="cpu")
        replicas_using = averager.lanes.run_message_beside(
            lambda comm: comm.all_reduce(flags.to(averager.device, non_blocking=True))
        )
        for _, bucket, _ in handed_over:
            bucket.future.wait()
        used = here
        if len(here) < len(flags):  # else nobody needs to know
            used = {id(shard) for shard, n in zip(shards, replicas_using.result().tolist(), strict=True) if n}
        for group, bucket, earlier in handed_over:
            for i, (place, mean) in enumerate(zip(bucket.places, earlier, strict=True)):
                if id(group.shards[i]) not in used:  # on no replica
                    continue
                group.set_gradient(i, place if mean is None else place.add_(mean))
        averager.handed_back()
        self._forget_reduced()

    def _forget_reduced(self) -> None:
        """Let memory go that is read no more, since the caller's stream has waited for this backward."""
        for group in self.groups:
            group.reduced = None


def _broadcast(x: Tensor, source: int, group: Any) -> None:
    """Have ``x`` hold what it holds on rank ``source``; however it lies in memory."""
    for dim, stride in enumerate(x.stride()):
        x = x.narrow(dim, 0, 1) if stride == 0 and x.shape[dim] else x  # expanded: the same element over and over
    if x.numel():
        sent = x.contiguous()
        dist.broadcast(sent, source, group=group)
        if sent.data_ptr() != x.data_ptr():
            x.copy_(sent)


def _refuse_thawed(reduced: Tensor) -> None:
    del reduced
    raise RuntimeError(
        "parameters that are trained must be so when the strategy is set up, since it averages no others; got a "
        "gradient of a module whose parameters were all frozen then. Freeze them in on_train_start at the earliest."
    )


# - parameters as FSDP2 has sharded them


def _own_gradient(p: DTensor) -> Tensor | None:
    return p.grad.to_local() if isinstance(p.grad, DTensor) else None


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

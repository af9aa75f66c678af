"""A model that FSDP2 shards inside nodes: what each node has reduced is handed to the engine, which averages nodes.

R = replicas of the model, S = shards of each.  Rank r * S + s has shard s of replica r; the R ranks that have the same
shard are a column, and exchange among themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.shard_groups import (
    REPLICATE,
    SHARD,
    ShardGroup,
    check_factors,
    fsdp_groups,
    named_parameters,
    shard_groups,
    with_zeros,
)
from lightning_sparse.engine.step import PendingBucket


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
    """What the engine asks of a ``DistributedDataParallel``, of a module whose parameters FSDP2 shards inside nodes.

    FSDP calls a hook with what it has reduced, in backward, as soon as it has: the hook hands this to the engine and
    does not wait.  Once backward is at its end (see :meth:`backward`) the means are waited for, and ``.grad`` holds
    them.  Parameters that a backward does not use keep what is unsent, as with ``find_unused_parameters=True`` of DDP.

    Args:
        module: after ``fully_shard(..., mesh=mesh["shard"])`` of all that is trained, on its device.
        mesh: of R x S ranks, with the dimensions "replicate" and "shard".

    Raises:
        ValueError: a parameter that is trained is not sharded so, or something cannot be averaged behind FSDP's back.
    """

    find_unused_parameters = True
    static_graph = broadcast_buffers = False
    parameters_to_ignore: frozenset[str] = frozenset()
    join_hook: Any = None

    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if not hasattr(FSDPModule, "set_all_reduce_hook"):
            raise ValueError(f"PyTorch must be 2.7 or newer for sharded models; got {torch.__version__}. Upgrade it.")
        self.module, self.mesh, self.shard_size = module, mesh, mesh[SHARD].size()
        for each in module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()  # which FSDP leaves out after an evaluation
        self.process_group = mesh[REPLICATE].get_group()
        self.columns: list[list[int]] = mesh.mesh.t().tolist()
        self.groups = list(shard_groups(module, mesh))
        every = dict(pair for group in self.groups for pair in zip(group.names, group.shards, strict=True))
        #: What is trained, by name, in the order of definition.
        self.sharded = {name: p for name, p in named_parameters(module) if isinstance(p, DTensor) and p.requires_grad}
        self.shards = {name: every[name] for name in self.sharded}  # this rank's of each
        #: The parameter of each shard, which optimizers have.
        self.held: dict[Tensor, Tensor] = {shard: self.sharded[name] for name, shard in self.shards.items()}
        self._handed_over: list[tuple[ShardGroup, ShardBucket, list[Tensor | None]]] = []  # in this backward
        self._is_in_backward = False  # within `backward`, which sees where it ends
        self._is_closed = False
        self._synchronise()

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

    def average_with(self, hand_over: Callable[[PendingBucket], object], exchange: Callable[[], Exchange]) -> None:
        """Hand every gradient to ``hand_over`` from now on, for the engine that ``exchange`` returns."""
        self._hand_over, self._exchange = hand_over, exchange
        for module in self.module.modules():
            if not isinstance(module, FSDPModule):
                continue
            for fsdp in fsdp_groups(module):
                group = next((g for g in self.groups if g.fsdp is fsdp), None)
                module.set_all_reduce_hook(partial(self._take, group) if group else _refuse_thawed)

    @contextmanager
    def backward(self, always: bool = False) -> Iterator[None]:
        """Wait for the means once the block has ended, in which a backward runs.

        Elsewhere they are waited for where autograd says that a backward has ended, which a reentrant checkpoint makes
        it say after each of its parts.  ``always``: also where nothing that is trained was reached, as others may.
        """
        self._is_in_backward = True
        try:
            yield
        except BaseException:
            self._handed_over.clear()
            raise
        finally:
            self._is_in_backward = False
        is_due = any(group.fsdp.reduce_grads and group.fsdp.all_reduce_grads for group in self.groups)
        self._end_backward(always and is_due)

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
        if not group.fsdp.all_reduce_grads:
            group.is_deferred = True
            return
        check_factors(group)
        trained = [p.requires_grad for p in group.parameters]
        if reduced.numel() != sum(group.padded_sizes):
            reduced = with_zeros(reduced, group, trained)
        if any(group is other for other, *_ in self._handed_over):  # once more in this backward
            self._end_backward()
        if not self._handed_over and not self._is_in_backward:
            Variable._execution_engine.queue_callback(self._end_backward)  # as FSDP does
        self._pass_on(group, reduced, trained)

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
            self._exchange().look(group.shards[i], x)
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
        if not self._handed_over and not always:
            return
        arrived = {id(group) for group, *_ in self._handed_over}
        for group in self.groups:
            if id(group) not in arrived:
                self._pass_on(group, None)
        handed_over, self._handed_over = self._handed_over, []
        here = {id(shard) for _, bucket, _ in handed_over for shard in bucket.used}
        exchange, shards = self._exchange(), self.shards.values()
        flags = torch.tensor([float(id(shard) in here) for shard in shards], dtype=torch.float32, device="cpu")
        replicas_using = exchange.ask_beside(lambda comm: comm.all_reduce(flags.to(exchange.device, non_blocking=True)))
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
        exchange.handed_back()


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

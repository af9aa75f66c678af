"""Models that FSDP2 shards, in plain PyTorch on real ranks: with our hook, or natively over both dimensions."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from lightning_sparse.checkpoint.sharded import save_tensors
from lightning_sparse.sharded.model import ShardedModel
from lightning_sparse.sharded_hook import ShardedHook, options_of

Shard = Callable[..., Any]  # fully_shard over the right mesh


def mesh(replicate: int, shard: int) -> DeviceMesh:
    return init_device_mesh("cpu", (replicate, shard), mesh_dim_names=("replicate", "shard"))


class Net(nn.Module):
    """Blocks whose widths no number of shards divides, and a head as wide as two ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(9, 9), nn.GELU()) for _ in range(2)))
        self.head = nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.blocks(x))
        return y

    def shard(self, fully_shard: Shard) -> None:
        for block in self.blocks:
            fully_shard(block)
        fully_shard(self)


class Tied(Net):
    """With the head's weights in a block too."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][0].weight = self.blocks[1][0].weight

    def shard(self, fully_shard: Shard) -> None:
        fully_shard(self)


class Checkpointed(Net):
    """Whose activations are computed once more in backward."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        y: Tensor = self.head(x)
        return y


class Policy(Net):
    """Sharded with these arguments of ``fully_shard``."""

    def __init__(self, **policy: Any) -> None:
        super().__init__()
        self.policy = policy

    def shard(self, fully_shard: Shard) -> None:
        super().shard(partial(fully_shard, **self.policy))


class Compiled(Net):
    def shard(self, fully_shard: Shard) -> None:
        for block in self.blocks:
            block.compile(backend="eager")
        super().shard(fully_shard)


class Sharded:
    """A training of ``make()`` over a mesh, with a compressor, or as PyTorch does it where there is none."""

    def __init__(
        self, mesh: DeviceMesh, compressor: Any = None, make: Callable[[], nn.Module] = Net, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.mesh, self.module = mesh, make()
        own = mesh if compressor is None else mesh["shard"]
        self.module.shard(lambda module, **policy: fully_shard(module, mesh=own, **policy))  # type: ignore[operator]
        optimizer = options.pop("optimizer", partial(torch.optim.AdamW, lr=0.01))
        self.optimizer: torch.optim.Optimizer = optimizer(self.module.parameters())
        self.given: dict[str, Tensor] = {}  # to the engine in the last backward, by parameter
        if compressor is not None:
            self.sharded = ShardedModel(self.module, mesh)
            given = options_of(
                compressor, options.pop("wire_dtype", None), 0, local_steps=options.pop("local_steps", 0)
            )
            self.hook = ShardedHook(self.sharded, given, None)
            self.averager = self.hook.averager
        self.hooked = compressor is not None

    def step(self, step: int, batches: int = 1) -> Tensor:
        """Take an optimizer step on data of this rank's own; returns the loss."""
        root: Any = self.module
        for batch in range(batches):
            is_last = batch == batches - 1
            for module in root.modules():
                if isinstance(module, FSDPModule):
                    module.set_requires_all_reduce(is_last, recurse=False)
            generator = torch.Generator().manual_seed(1000 * step + 10 * dist.get_rank() + batch)
            x = torch.randn(4, 9, generator=generator, dtype=torch.float32)
            if self.hooked:
                self.hook.begin_forward()
            loss = _loss(root, x)
            if self.hooked:
                self.hook.end_forward()
            loss.backward()
        torch.nn.utils.clip_grad_norm_(root.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def watch(self) -> None:
        """Note what each step gives to the engine."""
        hand_over = self.sharded._hand_over

        def noted(bucket: Any) -> Any:
            name_of = {id(shard): name for name, shard in self.sharded.shards.items()}
            self.given |= {name_of[id(shard)]: place.clone() for shard, place in bucket.gradients()}
            return hand_over(bucket)

        self.sharded.average_with(noted, lambda: self.hook.averager)

    @property
    def weights(self) -> Tensor:
        """All of every weight, in one vector."""
        for each in self.module.modules():
            if isinstance(each, FSDPModule):
                each.reshard()
        return torch.cat([p.full_tensor().detach().reshape(-1) for p in self.module.parameters()])  # type: ignore[attr-defined]

    def average(self) -> Tensor:
        """As :attr:`weights`, of the average, which the module holds from now on."""
        self.hook.show_average()
        return self.weights

    @property
    def unsent(self) -> Tensor:
        """What this rank has not sent, in the order of its groups."""
        return torch.cat([torch.zeros(0), *(group.unsent for group in self.averager.groups)])

    def in_order(self, of: Mapping[str, Tensor]) -> Tensor:
        """One vector of what is of each parameter, in the order of the groups."""
        return torch.cat([of[name].reshape(-1) for group in self.averager.groups for name in group.names])

    def unsent_of_mean(self) -> dict[str, Tensor]:
        """Of each parameter, all of what is unsent of the mean gradient."""
        found = {}
        for group in self.averager.groups:
            for name, slot in zip(group.names, group.slots(group.unsent), strict=True):
                like = self.sharded.sharded[name]
                mean = self.column_sum(slot) / self.averager.size
                own = DTensor.from_local(
                    mean.view(like.to_local().shape),
                    like.device_mesh,
                    like.placements,
                    shape=like.shape,
                    stride=like.stride(),
                )
                found[name] = own.full_tensor()
        return found

    def column_sum(self, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=self.sharded.process_group)
        return total

    def is_same_in_column(self, x: Tensor) -> bool:
        """Whether all ranks that have this shard have the same ``x``."""
        every = [torch.empty_like(x) for _ in range(self.averager.size)]
        dist.all_gather(every, x, group=self.sharded.process_group)
        return all(torch.equal(each, x) for each in every)

    def close(self) -> None:
        if self.hooked:
            self.hook.close()


def keep(training: Sharded, folder: Path, residuals: str = "per_rank", **more: Any) -> None:
    """Save what is unsent in a folder and in a file, and ``more`` beside it."""
    for to_folder in (True, False):
        said, tensors = training.hook.gather(residuals, to_folder)
        if to_folder:
            save_tensors(tensors, folder)
        if dist.get_rank() == 0:
            torch.save((said, more), folder / f"{to_folder}.pt")
    dist.barrier()


def kept(folder: Path) -> list[tuple[dict[str, Any], Path | None, dict[str, Any]]]:
    """What :func:`keep` has saved: what is said of it, the folder or None, and what is beside it."""
    read = {to_folder: torch.load(folder / f"{to_folder}.pt", weights_only=False) for to_folder in (True, False)}
    return [(said, folder if to_folder else None, more) for to_folder, (said, more) in read.items()]


def _loss(module: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = module(x)
    return y.square().mean() + (y - x[:, :2]).square().mean()


def backward(training: Sharded, step: int) -> None:
    """One backward, on data of this rank's own."""
    x = torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
    if training.hooked:
        training.hook.begin_forward()
    loss = training.module(x).square().mean()
    if training.hooked:
        training.hook.end_forward()
    loss.backward()

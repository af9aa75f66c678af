"""Sharded models under a Trainer and under Fabric: names, checkpoints, second fits, what is refused."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

import lightning_sparse as ls
from lightning_sparse.checkpoint.sharded import KEY
from lightning_sparse.fabric import SparseHSDPStrategy as FabricStrategy
from tests.support.models import Small, batch, data, trainer
from tests.support.on_one_device import ACCELERATOR
from tests.support.processes import Ranks

Parallelize = Callable[[nn.Module, Any], object]  # shards a net over the mesh of R x S ranks


def whole(net: Any, mesh: Any) -> nn.Module:
    fully_shard(net[0], mesh=mesh["shard"])
    fully_shard(net, mesh=mesh["shard"])
    return net  # type: ignore[no-any-return]


class ShardedSmall(Small):
    """Sharded by ``parallelize``."""

    def __init__(self, parallelize: Parallelize = whole) -> None:
        super().__init__("adam")
        self.parallelize: Parallelize | None = parallelize

    def configure_model(self) -> None:
        if self.parallelize is not None:
            self.parallelize(self.net, self.device_mesh)
            self.parallelize = None

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("val", self.training_step(batch, index), sync_dist=True)


def fitted(steps: int, strategy: Any = None, module: Any = None, ckpt_path: Any = None, **options: Any) -> L.Trainer:
    torch.manual_seed(0)
    strategy = strategy or ls.SparseHSDPStrategy(ls.MiCRO(density=0.2), replicate_size=2)
    run = trainer(strategy, 4, max_steps=steps, **options)
    run.fit(module or ShardedSmall(), data(5, 4), data(1, 4), ckpt_path=ckpt_path)
    return run


def weights(module: nn.Module) -> Tensor:
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()  # which FSDP leaves out after an evaluation
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in module.parameters()])  # type: ignore[attr-defined]


# - checkpoints


def _resumes(rank: int, size: int, folder: Path) -> None:
    torch.manual_seed(0)
    micro: ls.Compressor = ls.MiCRO(density=0.2)
    ways = [(to_folder, steps, micro) for steps in (0, 2) for to_folder in (True, False)]
    for to_folder, local_steps, compressor in [*ways, (True, 0, ls.Dense()), (False, 0, ls.Dense())]:
        options = {"replicate_size": 2, "save_distributed_checkpoint": to_folder, "local_steps": local_steps}

        def strategy(compressor: Any = compressor, options: Any = options) -> ls.SparseHSDPStrategy:
            return ls.SparseHSDPStrategy(compressor, **options)

        path = folder / f"{to_folder} {local_steps}{' dense' * (compressor != micro)}"
        keep = ModelCheckpoint(dirpath=path, every_n_train_steps=5, save_top_k=-1, filename="{step}")
        through = fitted(10, strategy(), callbacks=[keep, ls.CompressionMonitor()])
        assert through.strategy.averager.steps == 10
        again = fitted(10, strategy(), ckpt_path=path / "step=5.ckpt")
        assert torch.equal(weights(again.lightning_module), weights(through.lightning_module))
        through.validate(through.lightning_module, data(1, 4), ckpt_path=path / "step=5.ckpt", verbose=False)

    if rank == 0:  # what is zero everywhere is not written
        exact = torch.load(folder / "False 0 dense" / "step=5.ckpt", weights_only=False)[KEY]
        assert exact["unsent"] == {}
        assert set(exact["zero"]) == set(exact["shapes"])
        written = FileSystemReader(folder / "True 0 dense" / "step=5.ckpt" / KEY).read_metadata().state_dict_metadata
        assert not any(name.startswith("unsent/") for name in written)
    with pytest.warns(UserWarning, match="holds no residuals") if rank == 0 else nullcontext():
        fitted(7, ls.SparseHSDPStrategy("micro", replicate_size=2), ckpt_path=_without_residuals(folder / "False 0"))


def _without_residuals(folder: Path) -> Path:
    path = folder / "without.ckpt"
    if dist.get_rank() == 0:
        saved = torch.load(folder / "step=5.ckpt", weights_only=False)
        del saved["lightning_sparse_sharded"]
        torch.save(saved, path)
    dist.barrier()
    return path


def test_a_checkpoint_in_a_folder_or_a_file_is_gone_on_from_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_resumes, 4, tmp_path)


# - whole trainings


def _trainings(rank: int, size: int) -> None:
    accumulating = fitted(3, accumulate_grad_batches=2, gradient_clip_val=0.1)
    assert accumulating.strategy.averager.steps == 3
    module = ShardedSmall()
    strategy = ls.SparseHSDPStrategy("sparse_auto", shard_size=2, wire_dtype=None)
    run = fitted(12, strategy, module, precision="bf16-mixed")
    before, unsent = weights(module), run.strategy.averager.unsent_norm()
    run.fit_loop.epoch_loop.max_steps = 12
    run.fit(module, data(5, 4))  # takes no step
    assert run.strategy.averager.unsent_norm() == unsent
    run.fit_loop.epoch_loop.max_steps = 15
    run.fit(module, data(5, 4))
    after = weights(module)
    assert not torch.equal(before, after)
    with torch.no_grad():
        module.net[4].bias.to_local().add_(float(rank == 3))
    with pytest.raises(RuntimeError, match=r"net.4.bias, the first of 1 parameters, is not the same on"):
        run.callbacks[-1].on_train_end(run, module)


@pytest.mark.programs
def test_trainings_with_accumulation_mixed_precision_and_a_second_fit(ranks: Ranks) -> None:
    ranks.run(_trainings, 4)


def _under_fabric(rank: int, size: int, folder: Path, local_steps: int) -> None:
    found = {}
    for stage in ("through", "first", "second"):
        strategy = FabricStrategy(whole, ls.MiCRO(density=0.2), replicate_size=2, local_steps=local_steps)
        fabric = Fabric(accelerator=ACCELERATOR, devices=size, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        model = fabric.setup_module(Small().net)
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
        state = {"model": model, "optimizer": optimizer, "unsent": strategy.hooks[0]}
        if stage == "second":
            fabric.load(folder / "first", state)
        for step in range(6 if stage == "second" else 0, 12 if stage != "first" else 6):
            with fabric.no_backward_sync(model, enabled=step % 2 == 0):
                x, y = (each.to(fabric.device) for each in batch(step, rank))
                fabric.backward(nn.functional.cross_entropy(model(x), y))
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        if stage == "first":
            fabric.save(folder / "first", state)
        found[stage] = weights(model)
        strategy.hooks[0].close()
    assert torch.equal(found["second"], found["through"])


@pytest.mark.parametrize("local_steps", [0, 2])
@pytest.mark.programs
def test_under_fabric_a_training_is_saved_and_gone_on_with(ranks: Ranks, tmp_path: Path, local_steps: int) -> None:
    ranks.run(_under_fabric, 4, tmp_path, local_steps)


class Saves(L.Callback):
    """Saves between the backward and the step of an optimizer, at the start of the second epoch."""

    def __init__(self, path: Path, hook: str) -> None:
        self.path = path
        setattr(self, hook, self.save)

    def save(self, trainer: L.Trainer, *_: object) -> None:
        if trainer.global_step == 5:
            trainer.save_checkpoint(self.path)


def _goes_on_within_a_step(rank: int, size: int, folder: Path) -> None:
    before, after = "on_before_optimizer_step", "on_after_backward"
    cases = ((0, True, before), (0, False, before), (3, True, before), (0, True, after), (0, False, after))
    for number, (local_steps, to_folder, hook) in enumerate(cases):
        options = {"replicate_size": 2, "local_steps": local_steps, "save_distributed_checkpoint": to_folder}
        path = folder / str(number)
        found = []
        for callbacks, start in (([Saves(path, hook)], None), ([], path)):
            strategy = ls.SparseHSDPStrategy(ls.MiCRO(density=0.2), **options)
            found.append(weights(fitted(8, strategy, callbacks=callbacks, ckpt_path=start).lightning_module))
        assert torch.equal(*found), options


@pytest.mark.programs
def test_saved_within_a_step_it_is_made_again_with_the_same_mean(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_goes_on_within_a_step, 4, tmp_path)


class Throws(L.Callback):
    """Looks at gradients after a backward, and throws them away."""

    def on_after_backward(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        own = torch.cat([p.grad.to_local().flatten() for p in module.parameters()])
        column = trainer.strategy.device_mesh["replicate"].get_group()
        every = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(every, own, group=column)
        assert torch.equal(*every)
        for p in module.parameters():
            p.grad = None


def _sets_means(rank: int, size: int) -> None:
    run = fitted(4, ls.SparseHSDPStrategy("sparse_dense", replicate_size=2), callbacks=[Throws()])
    untrained = fitted(0, ls.SparseHSDPStrategy("sparse_dense", replicate_size=2))
    assert torch.equal(weights(run.lightning_module), weights(untrained.lightning_module))


def test_after_a_backward_callbacks_find_the_means_and_may_set_them(ranks: Ranks) -> None:
    ranks.run(_sets_means, 4)


class Odd(ShardedSmall):
    """With buffers that lie oddly and differ between ranks, and blocks that are computed again in a nested backward."""

    def __init__(self, skips: bool = False) -> None:
        super().__init__(_blocks)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self.register_buffer("expanded", torch.full((1, 3), float(rank)).expand(4, 3))
        self.register_buffer("sliced", (torch.arange(48.0).view(6, 8) + 100 * rank)[:, :3])
        self.skips = skips
        self.exchanges: list[int] = []

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        x = x.requires_grad_()
        for i, layer in enumerate(self.net):
            if not (self.skips and i == 1 and self.global_rank >= 2 and index % 2):  # a rank of the second replica
                x = checkpoint(layer, x, use_reentrant=True)
        if self.skips and self.global_rank >= 2 and index == 3:
            return torch.zeros((), requires_grad=True) * 1  # reaches nothing that is trained
        if self.trainer.training:
            self.exchanges.append(self.trainer.strategy.averager.steps)
        return nn.functional.cross_entropy(x, y)


def _blocks(net: Any, mesh: Any) -> None:
    for layer in net:
        fully_shard(layer, mesh=mesh["shard"])


def _odd(rank: int, size: int) -> None:
    for skips in (False, True):
        module = Odd(skips)
        run = fitted(5, module=module)
        assert module.exchanges == [step for step in range(5) if not (skips and rank >= 2 and step == 3)]
        assert run.strategy.averager.steps == 5  # one in each step, however many nested backwards it has
        assert torch.equal(module.sliced.cpu(), torch.arange(48.0).view(6, 8)[:, :3])
        assert not module.expanded.any()
    with pytest.raises(RuntimeError, match="was torn down"):
        module.net(torch.zeros(1, 8, requires_grad=True, device=module.sliced.device)).sum().backward()


def test_a_step_is_one_exchange_whatever_its_backward_is_made_of(ranks: Ranks) -> None:
    """And buffers are those of rank 0, however they lie in memory."""
    ranks.run(_odd, 4)


def _interrupted(rank: int, size: int, folder: Path) -> None:
    run = fitted(2)
    run.save_checkpoint(folder / "last")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lightning_sparse.trainer.hsdp.save_tensors", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.save_checkpoint(folder / "last")
    with pytest.raises(ValueError, match="must have a folder lightning_sparse_sharded"):
        fitted(3, ckpt_path=folder / "last")


def test_a_save_that_was_interrupted_is_not_taken_for_whole(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(_interrupted, 4, tmp_path)


def _freezes(rank: int, size: int) -> None:
    """Half of a module in the second step; and in another training what was frozen is trained."""

    class Freezes(L.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, *_: object) -> None:
            module.net[0].weight.requires_grad_(trainer.global_step != 1)

    fitted(4, callbacks=[Freezes()])

    class Thaws(ShardedSmall):
        def __init__(self) -> None:
            super().__init__()
            self.net[0].requires_grad_(False)

        def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
            self.net[0].requires_grad_(self.trainer.training)
            return super().training_step(batch, index)

    with pytest.raises(RuntimeError, match="must be so when the strategy is set up"):
        fitted(1, module=Thaws())
    nothing = ShardedSmall()
    nothing.net.requires_grad_(False)
    nothing.automatic_optimization = False
    nothing.training_step = nothing.validation_step = lambda batch, batch_idx: None  # type: ignore[method-assign]
    fitted(-1, module=nothing, max_epochs=1)  # trains nothing


def test_parts_may_be_frozen_meanwhile_and_not_thawed(ranks: Ranks) -> None:
    ranks.run(_freezes, 4)


# - what is refused


def _is_refused(rank: int, size: int) -> list[str]:
    def natively(net: Any, mesh: Any) -> None:
        fully_shard(net, mesh=mesh)

    def in_part(net: Any, mesh: Any) -> None:
        fully_shard(net[0], mesh=mesh["shard"])

    def offloaded(net: Any, mesh: Any) -> None:
        fully_shard(net, mesh=mesh["shard"], offload_policy=CPUOffloadPolicy(pin_memory=False))

    def in_half(net: Any, mesh: Any) -> None:
        fully_shard(net, mesh=mesh["shard"], mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))

    def forced(net: Any, mesh: Any) -> None:
        fully_shard(net, mesh=mesh["shard"])
        net.set_force_sum_reduction_for_comms(True)

    if hasattr(FSDPModule, "set_force_sum_reduction_for_comms"):  # from PyTorch 2.8 on
        with pytest.raises(RuntimeError, match="set_force_sum_reduction_for_comms must not be called"):
            fitted(1, module=ShardedSmall(forced))
    said = []
    for parallelize in (natively, in_part, offloaded, in_half):
        with pytest.raises(ValueError) as refused:  # noqa: PT011  each says something of its own
            fitted(1, module=ShardedSmall(parallelize))
        said.append(str(refused.value))
    normed = ShardedSmall()
    normed.net.insert(1, nn.BatchNorm1d(33))
    with pytest.raises(ValueError, match="sync_batchnorm must be False"):
        fitted(1, module=normed, sync_batchnorm=True)
    with pytest.raises(ValueError, match="number of ranks, 4; got replicate_size=3"):
        fitted(1, ls.SparseHSDPStrategy("micro", replicate_size=3))
    return said


def test_what_cannot_be_averaged_is_refused_with_what_to_do(ranks: Ranks) -> None:
    natively, in_part, offloaded, in_half = ranks.run(_is_refused, 4)[0]
    assert 'fully_shard(module, mesh=self.device_mesh["shard"])' in natively
    assert "2.weight, 2.bias, 4.weight, ... unsharded" in in_part.replace("net.", "")
    assert "CPUOffloadPolicy" in offloaded
    assert "float16" in in_half


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"compressor": "mikro"}, "compressor must be one of"),
        ({"replicate_size": 0}, "replicate_size must be .* at least 1"),
        ({"shard_size": 1.5}, "shard_size must be .* at least 1"),
        ({"wire_dtype": "int5"}, "wire_dtype"),
        ({"residuals": "all"}, "residuals must be"),
        ({"local_steps": 2, "compressor": "sparse_auto"}, "local_steps cannot be combined with sparse_auto"),
        ({"local_steps": 2, "compressor": "micro", "residuals": "mean"}, "residuals must be 'per_rank' or 'none'"),
        ({"local_steps": -1, "compressor": "micro"}, "local_steps must be"),
    ],
)
def test_bad_options_are_refused(options: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ls.SparseHSDPStrategy(**options)
    if "residuals" not in options:
        with pytest.raises(ValueError, match=match):
            FabricStrategy(whole, **options)


@pytest.mark.parametrize("option", ["elastic", "fusion", "data_parallel_size", "shard_siz"])
def test_options_of_others_are_refused_with_what_to_do(option: str) -> None:
    with pytest.raises(TypeError, match=f"{option} must be an option of SparseHSDPStrategy"):
        ls.SparseHSDPStrategy("micro", **{option: 2})


def test_names_give_the_strategy_with_a_compressor() -> None:
    for name in ("sparse", *ls.COMPRESSORS, "sparse_auto"):
        strategy = StrategyRegistry.get(f"{name}_hsdp")
        assert isinstance(strategy, ls.SparseHSDPStrategy)
    assert isinstance(StrategyRegistry.get("micro_hsdp").compressor, ls.MiCRO)

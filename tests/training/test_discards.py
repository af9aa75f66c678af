"""Loops that throw gradients away end, in bits, as if the backward that made them had never been."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import DataLoader, Subset

import lightning_sparse as ls
from lightning_sparse.fabric import SparseDDPStrategy
from tests.support.models import Small, data, flat, trainer, unsent, weights
from tests.support.processes import Ranks

BATCHES = 12
SKIPPED = (0, 3, 4, 9)  # the first too, after which copies are kept, so that nothing is lost
COMPRESSORS = ["sparse_dense", "skip_reduce", "micro", "importance", "sketch_fusion", "ok_topk", "low_rank"]
CASES: list[tuple[Any, str | None]] = [(name, None) for name in COMPRESSORS]
CASES += [("sparse_dense", "int4"), (ls.MomentumCorrection(0.9, "sparse_topk"), None)]
RESUMED = [CASES[1], CASES[2], CASES[7]]
GANS = [*RESUMED, CASES[8]]


class Skips(Small):
    """Skips the steps of some batches, in a loop of its own or where Lightning steps."""

    def __init__(self, skipped: tuple[int, ...], is_manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not is_manual
        self.skipped = skipped

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
            self.manual_backward(loss)
            if index not in self.skipped:
                optimizer.step()
            optimizer.zero_grad()
        return loss

    def optimizer_step(self, epoch: int, index: int, optimizer: Any, closure: Any = None) -> None:
        if index in self.skipped:
            closure()
        else:
            super().optimizer_step(epoch, index, optimizer, closure)


def loader(rank: int, size: int, without: tuple[int, ...] = ()) -> DataLoader[Any]:
    """This rank's batches, ``without`` some."""
    dataset = data(BATCHES, size).dataset
    kept = [i for i in range(BATCHES) if i not in without]
    return DataLoader(Subset(dataset, [(i * size + rank) * 4 + j for i in kept for j in range(4)]), batch_size=4)


def in_fabric(rank: int, size: int, compressor: Any, wire_dtype: Any, skipped: tuple[int, ...], gone: Any) -> Any:
    strategy = SparseDDPStrategy(compressor, fusion="bucket", wire_dtype=wire_dtype)
    fabric = Fabric(accelerator="cpu", strategy=strategy, devices=size)
    fabric.launch()
    torch.manual_seed(0)
    module = Small()
    model, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9))
    for index, (x, y) in enumerate(loader(rank, size, gone)):
        fabric.backward(model.training_step((x, y), index))
        if index not in skipped:
            optimizer.step()
        optimizer.zero_grad(set_to_none=index % 2 == 0)
    return weights(module), flat(unsent(strategy.hooks[0]).values())


def in_trainer(rank: int, size: int, compressor: Any, wire_dtype: Any, skipped: Any, gone: Any, manual: bool) -> Any:
    strategy = ls.SparseDDPStrategy(compressor, fusion="bucket", wire_dtype=wire_dtype)
    torch.manual_seed(0)
    model = Skips(skipped, manual)
    trainer(strategy, size, max_epochs=1, use_distributed_sampler=False).fit(model, loader(rank, size, gone))
    return weights(model), flat(unsent(strategy).values())


#: By hand in a LightningModule, where Lightning steps, and with Fabric.
WAYS: list[Any] = [lambda *a: in_trainer(*a, True), lambda *a: in_trainer(*a, False), in_fabric]


def skipping_and_without(rank: int, size: int) -> list[Any]:
    found = []
    for case in CASES:
        for way in WAYS if case in CASES[1:3] else WAYS[:1]:
            found.append((case, way(rank, size, *case, SKIPPED, ()), way(rank, size, *case, (), SKIPPED)))
    return found


def test_a_step_that_is_skipped_never_was(ranks: Ranks) -> None:
    for found in ranks.run(skipping_and_without, 2):
        for i, (case, skipped, without) in enumerate(found):
            for what, x, y in zip(("weights", "unsent"), skipped, without, strict=True):
                assert torch.equal(x, y), (case, i, what)


def resumed_and_whole(rank: int, size: int, folder: Path) -> list[Any]:
    """Skip the last step of an epoch, too, after which a checkpoint is written."""
    found, skipped = [], (0, 5, BATCHES - 1)
    for i, (compressor, wire_dtype) in enumerate(RESUMED):
        for path in (None, folder / f"{i}-0.ckpt"):
            torch.manual_seed(0)
            strategy, model = ls.SparseDDPStrategy(compressor, wire_dtype=wire_dtype), Skips(skipped, True)
            saves = ModelCheckpoint(folder, f"{i}-{{epoch}}", auto_insert_metric_name=False, save_top_k=-1)
            run = trainer(
                strategy, size, max_epochs=2, callbacks=[] if path else [saves], use_distributed_sampler=False
            )
            run.fit(model, loader(rank, size), ckpt_path=path)
            found.append((weights(model), flat(unsent(strategy).values())))
    return found


def test_a_training_that_skips_steps_resumes_bit_for_bit(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks.run(resumed_and_whole, 2, tmp_path):
        for case, whole, resumed in zip(RESUMED, found[::2], found[1::2], strict=True):
            for what, x, y in zip(("weights", "unsent"), whole, resumed, strict=True):
                assert torch.equal(x, y), (case, what)


class Gan(L.LightningModule):
    """The usual loop, whose generator's loss reaches the discriminator's weights, unless they are ``apart``."""

    def __init__(self, is_apart: bool) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_apart = is_apart
        self.generator = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 8))
        self.judge = nn.Sequential(nn.Linear(8, 32), nn.LeakyReLU(), nn.Linear(32, 1))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.generator.parameters(), 1e-3), torch.optim.Adam(self.judge.parameters(), 2e-3)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        of_generator, of_judge = self.optimizers()  # type: ignore[misc]  # there are two
        real, _ = batch
        noise = torch.randn(len(real), 4, generator=torch.Generator().manual_seed(2 * index + self.global_rank))
        one, zero = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        self.judge.requires_grad_(not self.is_apart)
        self.manual_backward(binary_cross_entropy_with_logits(self.judge(self.generator(noise)), one))
        of_generator.step()
        of_generator.zero_grad()
        self.judge.requires_grad_(True)
        of_judge.zero_grad()
        loss = binary_cross_entropy_with_logits(self.judge(real), one)
        self.manual_backward(loss + binary_cross_entropy_with_logits(self.judge(self.generator(noise).detach()), zero))
        of_judge.step()
        of_judge.zero_grad()


def gans(rank: int, size: int) -> list[Any]:
    found = []
    for compressor, wire_dtype in GANS:
        for is_apart in (False, True):
            torch.manual_seed(0)
            model, options = Gan(is_apart), {"find_unused_parameters": True}
            strategy = ls.SparseDDPStrategy(compressor, wire_dtype=wire_dtype, **options)
            trainer(strategy, size, max_epochs=1).fit(model, data(BATCHES, size))
            found.append((weights(model), flat(unsent(strategy).values())))
    return found


def test_what_a_generators_backward_leaves_in_a_discriminator_never_was(ranks: Ranks) -> None:
    for found in ranks.run(gans, 2):
        for case, reaching, apart in zip(GANS, found[::2], found[1::2], strict=True):
            for what, x, y in zip(("weights", "unsent"), reaching, apart, strict=True):
                assert torch.equal(x, y), (case, what)

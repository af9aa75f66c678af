"""Local steps on real processes: the law, equality with averaged gradients, resuming, and all that Lightning does."""

from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.local_steps.replica import Replica
from tests.support.local_steps import exchange_of, local
from tests.support.models import Does, Small, data, small, trainer, weights
from tests.support.processes import Ranks
from tests.support.said import warned


def test_one_local_step_of_sgd_is_an_averaged_gradient(ranks: Ranks) -> None:
    """x̄ - lr * mean(gradient at x̄) is the mean of x̄ - lr * gradient; only the order of rounding differs."""
    for plain, ours in ranks.run(_train_plainly, 4, gloo=True):
        assert (plain - ours).abs().max() < 1e-5


def _train_plainly(rank: int, size: int) -> tuple[Tensor, Tensor]:
    results = []
    for local_steps in (0, ls.LocalSteps(1, overlap=False)):
        model = small()
        ddp = DistributedDataParallel(model.net)
        hook = ls.SparseHook(ddp, "sparse_dense", local_steps=local_steps)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(100):
            x = torch.randn(4, 8, generator=generator)
            optimizer.zero_grad()
            (ddp(x) - x[:, :3].sin()).square().mean().backward()
            optimizer.step()
        hook.show_average()
        results.append(weights(model))
        hook.close()
    return results[0], results[1]


class Gan(L.LightningModule):
    """Two optimizers, stepped by hand, and a parameter that some ranks do not use in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.critic = nn.Linear(8, 8), nn.Linear(8, 1)
        self.norm = nn.BatchNorm1d(8)
        self.sometimes = nn.Linear(8, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        x, _ = batch
        first, second = self.optimizers()  # type: ignore[misc]
        for optimizer, sign in ((first, 1.0), (second, -1.0)):
            made = self.norm(self.generator(x))
            if (index + self.global_rank) % 3 == 0:
                made = self.sometimes(made)
            optimizer.zero_grad()
            self.manual_backward(sign * self.critic(made).square().mean())
            optimizer.step()

    def configure_optimizers(self) -> Any:
        made = [*self.generator.parameters(), *self.norm.parameters(), *self.sometimes.parameters()]
        return [torch.optim.AdamW(made, lr=0.01), torch.optim.SGD(self.critic.parameters(), lr=0.01)]


def test_the_law_holds_over_real_processes(ranks: Ranks) -> None:
    for turns in zip(*ranks.run(_watched, 2), strict=True):
        before, after, moved, largest = (torch.stack(each) for each in zip(*turns, strict=True))
        assert torch.equal(moved[0], moved[1])
        residual, kept = before.double().sum(0), len(turns) * moved[0].double() + after.double().sum(0)
        assert (residual - kept).abs().max() <= 4e-6 * max(1.0, float(largest.max()))


def _watched(rank: int, size: int) -> list[Any]:
    """Of each group's turn what was unsent before, after, how x̄ moved by the steps' length, and the largest weight."""
    turns: list[Any] = []
    snapshot, apply = Replica.snapshot, Replica.apply_move
    shared: dict[Replica, tuple[Tensor, Tensor]] = {}

    def before(self: Replica, size: int) -> None:
        snapshot(self, size)
        shared[self] = self.group.unsent.clone(), self.average.clone()

    def after(self: Replica) -> None:
        apply(self)
        residual, average = shared.pop(self)
        moved = (self.average - average) * (self._settings.lead or 1.0)
        turns.append((residual, self.group.unsent.clone(), moved, average.abs().max()))

    Replica.snapshot, Replica.apply_move = before, after  # type: ignore[method-assign]
    for model, compressor, wire in ((Small, "sparse_dense", "float32"), (Gan, ls.MiCRO(density=0.1), "int4")):
        torch.manual_seed(0)
        strategy = local(compressor, 3, wire_dtype=wire, find_unused_parameters=model is Gan)
        trainer(strategy, size, max_epochs=1).fit(model(), data(6, size))
    return turns


def test_a_second_fit_goes_on_and_a_checkpoint_of_another_kind_is_refused_softly(ranks: Ranks, tmp_path: Path) -> None:
    for own, again, said, rank in ranks.run(_fit_twice, 2, tmp_path):
        assert torch.equal(own, again)
        assert rank or any("written without local_steps and is read with" in each for each in said)


def _fit_twice(rank: int, size: int, path: Path) -> Any:
    seen, model = Does("on_before_zero_grad", lambda run: weights(run.lightning_module)), small(optimizer="adam")
    run = trainer(local(wire_dtype="float32"), size, max_epochs=1)
    run.fit(model, data(5, size))
    own = exchange_of(run).own
    own = torch.cat([own[name].flatten() for name, _ in model.named_parameters()])
    run.fit_loop.max_epochs = 2
    run.callbacks.append(seen)  # type: ignore[attr-defined]
    run.fit(model, data(5, size))

    plain = trainer("sparse_topk", size, max_steps=3)
    plain.fit(small(optimizer="adam"), data(5, size))
    plain.save_checkpoint(path / "gradients.ckpt")
    again = trainer(local("sparse_topk", wire_dtype="float32"), size, max_steps=5)
    said = warned(again.fit, small(optimizer="adam"), data(5, size), ckpt_path=path / "gradients.ckpt")
    return own, seen.found[0], said, rank

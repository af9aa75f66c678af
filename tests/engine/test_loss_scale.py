"""Training with a scaled loss: residuals in true units, and a step that nobody takes where one rank overflowed."""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

import lightning_sparse as ls
from lightning_sparse.gradients.averager import GradientAverager
from tests.support.models import Small, data, flat, trainer, unsent, weights
from tests.support.processes import Ranks

SPIKE = 5  # the step in which one gradient of one rank is infinite
STEPS = 12
BATCH = 4


class ScaledOnly(MixedPrecision):
    """Scales the loss and casts nothing: a power of two then changes no bit of what is trained."""

    def autocast_context_manager(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class Spiky(Small):
    """One layer's gradient is not finite, in one step of one rank."""

    def __init__(self, rank: int, value: float = math.inf) -> None:
        super().__init__()
        self.rank = rank
        self.value = value

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        weight = self.net[2].weight
        if index == SPIKE and self.global_rank == self.rank:
            weight = weight * 1  # so that its gradient can be spoilt on the way
            weight.register_hook(lambda gradient: gradient * self.value)
        hidden = nn.functional.linear(torch.tanh(self.net[0](x)), weight, self.net[2].bias)
        return nn.functional.cross_entropy(self.net[4](torch.tanh(hidden)), y)


def without_batch(loader: DataLoader[Any], number: int, size: int) -> DataLoader[Any]:
    """All but what the ranks see in one step."""
    gone = range(number * BATCH * size, (number + 1) * BATCH * size)
    return DataLoader(Subset(loader.dataset, [i for i in range(len(loader.dataset)) if i not in gone]), BATCH)  # type: ignore[arg-type]


def in_order(loader: DataLoader[Any], rank: int, size: int) -> dict[str, Any]:
    """Samples dealt to the ranks in turn, unshuffled."""
    sampler = torch.utils.data.DistributedSampler(loader.dataset, size, rank, shuffle=False)  # type: ignore[arg-type]
    return {"train_dataloaders": DataLoader(loader.dataset, BATCH, sampler=sampler)}


def known_later(self: GradientAverager, loss_scale: Any, overflowed: Any) -> None:
    """Have the host know only when the next step begins whether a rank overflowed, as on a device."""
    if loss_scale is None or overflowed is None:
        self._note_end(loss_scale, False)
    else:
        self._unsettled = loss_scale, overflowed


def scaled_and_not(rank: int, size: int, cases: list[tuple[str, float, bool]]) -> list[Any]:
    results, at_once = [], GradientAverager._end_if_known
    for name, value, is_late in cases:
        GradientAverager._end_if_known = known_later if is_late else at_once  # type: ignore[method-assign]
        torch.manual_seed(0)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
        plugin = ScaledOnly("16-mixed", "cpu", scaler)
        strategy = ls.SparseDDPStrategy(name, fusion="none", warmup_steps=0)
        run = trainer(strategy, size, max_steps=STEPS, plugins=[plugin], use_distributed_sampler=False)
        model = Spiky(1, value)
        run.fit(model, **in_order(data(STEPS, size), rank, size))

        torch.manual_seed(0)
        plain = ls.SparseDDPStrategy(name, fusion="none")
        reference = trainer(plain, size, max_steps=STEPS - 1, use_distributed_sampler=False)
        expected = Spiky(-1)
        reference.fit(expected, **in_order(without_batch(data(STEPS, size), SPIKE, size), rank, size))
        residuals = [torch.cat([g.unsent for g in averager.groups]) for averager in (strategy.averager, plain.averager)]
        results.append((weights(model), weights(expected), *residuals, scaler.get_scale()))
    return results


def test_a_step_in_which_one_rank_overflows_never_was(ranks: Ranks) -> None:
    """Bit for bit: a power of two takes no digit away, and the rest of the run does not know of the step."""
    cases = [
        ("sparse_dense", math.inf, False),
        ("low_rank", math.inf, False),
        ("ok_topk", math.inf, False),
        ("micro", math.nan, False),
        ("micro", math.inf, True),
    ]
    for results in ranks.run(scaled_and_not, 2, cases):
        for (name, *_), (scaled, plain, residual, plain_residual, scale) in zip(cases, results, strict=True):
            assert torch.equal(scaled, plain), name
            assert torch.equal(residual, plain_residual), name
            assert residual.isfinite().all(), name
            # doubled after steps 3 and 6 - 1, halved by the overflow, and so on: it did change, both ways
            assert scale == 2.0**10 * 2 / 2 * 2 * 2, name


def mixed(rank: int, size: int, **options: Any) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    strategy, model = ls.SparseDDPStrategy("micro"), Small()
    trainer(strategy, size, max_steps=10, **options).fit(model, data(10, size))
    return weights(model).cpu(), flat(unsent(strategy).values())


def mixed_with_scaler(rank: int, size: int) -> tuple[Tensor, Tensor]:
    """On the CPU Lightning makes 16-mixed bf16-mixed, unless a scaler is given."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    return mixed(rank, size, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])


def test_mixed_precision_with_a_loss_scale_trains_and_replicas_stay_identical(ranks: Ranks) -> None:
    (first, residual), (second, others) = ranks.run(mixed_with_scaler, 2)
    assert torch.equal(first, second)
    assert all(x.isfinite().all() for x in (first, residual, others))

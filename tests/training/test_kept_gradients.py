"""Code that keeps a ``.grad`` by reference until after the next backward trains as under plain DDP."""

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from tests.support.models import Small, data, trainer, weights
from tests.support.processes import Ranks


class Surgery(Small):
    """Manual optimisation with two losses; what of the second gradient opposes the first is removed (PCGrad)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        x, y = batch
        optimizer: Any = self.optimizers()
        kept: list[list[Tensor]] = []
        for loss in (lambda out: nn.functional.cross_entropy(out, y), lambda out: out.square().mean()):
            optimizer.zero_grad(set_to_none=True)
            self.manual_backward(loss(self.net(x)))
            kept.append([p.grad for p in self.parameters() if p.grad is not None])
        for p, first, second in zip(self.parameters(), *kept, strict=True):
            against = (first * second).sum().clamp(max=0) / first.square().sum()
            p.grad = first + second - against * first
        optimizer.step()


class LastGradient(torch.optim.SGD):
    """Remembers the gradient before, as DiffGrad does; PyTorch's own optimizers copy what they keep."""

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        for p in self.param_groups[0]["params"]:
            with torch.no_grad():
                p -= 0.1 * (p.grad - 0.5 * self.state[p].get("last", torch.zeros(())))
            self.state[p]["last"] = p.grad
        return loss


class Remembers(Small):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return LastGradient(self.parameters(), lr=0.1)


def fits(rank: int, size: int) -> list[tuple[Tensor, Tensor]]:
    def trained(kind: type[L.LightningModule], strategy: Any) -> Tensor:
        torch.manual_seed(0)
        model = kind()
        trainer(strategy, size, max_steps=6).fit(model, data(6, size))
        return weights(model)

    return [
        (trained(kind, "ddp"), trained(kind, ls.SparseDDPStrategy("sparse_dense"))) for kind in (Surgery, Remembers)
    ]


def test_a_gradient_that_is_kept_over_the_next_backward_stays_as_it_was(ranks: Ranks) -> None:
    for results in ranks.run(fits, 2):
        for plain, ours in results:
            assert torch.equal(plain, ours)

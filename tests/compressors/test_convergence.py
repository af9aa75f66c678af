"""Training with less than all of the gradient ends where dense training ends, on simulated ranks and real digits."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lightning_sparse as ls
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.sparse import dense

RANKS, BATCH, LR = 4, 16, 0.05


def train_digits(compressor: ls.Compressor, steps: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> float:
    """Test accuracy after SGD with momentum on P ranks, whose gradients ``compressor`` averages."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    from digits import Digits, DigitsClassifier

    torch.manual_seed(seed)
    model, data = DigitsClassifier(width=8), Digits()
    data.setup("fit")
    parameters = dict(model.named_parameters())
    layouts = [lay_out(parameters, compressor, "layer") for _ in range(RANKS)]
    networks = [SimNetwork(RANKS) for _ in layouts[0]]
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    images, labels = data.train.tensors
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = LR * 0.5 * (1 + math.cos(math.pi * step / steps))
        for layout in layouts:
            batch = torch.randint(len(labels), (BATCH,))
            gradients = torch.autograd.grad(
                cross_entropy(model(images[batch]), labels[batch]), list(parameters.values())
            )
            of = dict(zip(parameters.values(), gradients, strict=True))
            for group, _ in layout:
                group.add([of[parameter] for parameter in group.parameters])
        for i, network in enumerate(networks):
            group, used = layouts[0][i]
            total = dense(take_steps(used, [layout[i][0] for layout in layouts], network), group.n)
            for parameter, slot in zip(group.parameters, group.slots(total / RANKS), strict=True):
                parameter.grad = slot.view(parameter.shape).clone()
        optimizer.step()
    return _accuracy(model, data)


@torch.no_grad()
def _accuracy(model: nn.Module, data: object) -> float:
    images, labels = data.test.tensors  # type: ignore[attr-defined]
    return float((model(images).argmax(1) == labels).float().mean())


def test_less_than_all_of_the_gradient_learns_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, skip = (train_digits(each, 160, 1, monkeypatch) for each in (ls.Dense(), ls.SkipReduce(skip=0.5)))
    assert dense > 0.95
    assert skip > dense - 0.01
    assert train_digits(ls.Warmup(24, ls.MiCRO(density=0.05)), 120, 0, monkeypatch) > 0.85  # of a twentieth; else 0.6

"""Training with less than all of the gradient ends where dense training ends, on simulated ranks and real digits."""

import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import lightning_sparse as ls
from lightning_sparse.compressors.lockstep import take_steps
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


def test_skip_reduce_is_as_accurate_as_dense_on_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    accuracy = {
        compressor: train_digits(compressor, 160, 1, monkeypatch)
        for compressor in (ls.Dense(), ls.SkipReduce(skip=0.5))
    }
    dense, skip = accuracy.values()
    assert dense > 0.95, accuracy
    assert skip > dense - 0.01, accuracy


@pytest.mark.parametrize("compressor", [ls.MiCRO(density=0.05), ls.SketchFusion(density=0.05)], ids=repr)
def test_a_twentieth_of_the_gradient_learns_digits(compressor: ls.Compressor, monkeypatch: pytest.MonkeyPatch) -> None:
    """A coarse net: where hardly anything arrives after the first 24 steps, less than 0.6 are right."""
    assert train_digits(ls.Warmup(24, compressor), 120, 0, monkeypatch) > 0.85

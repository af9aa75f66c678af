"""The means of a step that is saved before its optimizer has stepped."""

import torch
from torch import nn

from lightning_sparse.gradients.averager import Means


def test_means_are_kept_and_handed_back_with_and_without_a_loss_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([1024.0, 2048.0, float("inf")])
    means, again = Means(scaler), Means(scaler)
    assert means.due({"p": p}) == {}
    means.are_due = True
    scaled = means.due({"p": p})["p"]
    assert scaled.tolist() == [1.0, 2.0, float("inf")]
    scaler.unscale_(torch.optim.SGD([p]))
    assert torch.equal(means.due({"p": p})["p"], scaled)
    bucket = [p, other := nn.Parameter(torch.ones(2))]
    buffer = torch.full((5,), 7.0)
    assert not again.saved
    again.resume({"p": scaled, "gone": scaled}, {"p": p, "other": other})
    again.hand_back(buffer, bucket, True)
    assert buffer.tolist() == [1024.0, 2048.0, float("inf"), 0.0, 0.0]
    assert again.are_due
    assert not again.saved

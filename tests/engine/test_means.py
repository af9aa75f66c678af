"""The means of a step that is saved before its optimizer has stepped."""

import torch
from torch import nn

from lightning_sparse.engine.bucket import gradients_of
from lightning_sparse.gradients.averager import ResumedMeans


def test_means_are_kept_and_handed_back_with_and_without_a_loss_scale() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.tensor([1024.0, 2048.0, float("inf")])
    means, again = ResumedMeans(scaler), ResumedMeans(scaler)
    assert means.due({"p": p.grad}) == {}
    means.are_due = True
    scaled = means.due({"p": p.grad})["p"]
    assert scaled.tolist() == [1.0, 2.0, float("inf")]
    scaler.unscale_(torch.optim.SGD([p]))
    assert torch.equal(means.due({"p": p.grad})["p"], scaled)
    bucket = [p, other := nn.Parameter(torch.ones(2))]
    buffer = torch.full((5,), 7.0)
    assert not again.means
    again.resume({"p": scaled, "gone": scaled}, {"p": p, "other": other})
    again.hand_back(gradients_of(buffer, bucket))
    again.end()
    assert buffer.tolist() == [1024.0, 2048.0, float("inf"), 0.0, 0.0]
    assert again.are_due
    assert not again.means

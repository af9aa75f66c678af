"""Tries a candidate on recorded gradients: what it would deliver of them, and after how many steps."""

import torch
from torch import Tensor

from lightning_sparse.auto.policy import Candidate
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.compressors.group import Group
from lightning_sparse.engine.observers import CompressionError
from lightning_sparse.network.simulated import SimNetwork

ELEMENTS = 2**13  # Elements of a rank on which candidates are tried.
STEPS = 12  # Steps that are tried, with the recorded gradients in turn; the first third is not counted.
TURNS = 4  # With local steps each fragment travels so often: before it did, nothing of it is known.


def try_on(candidate: Candidate, gradients: Tensor, weights: Tensor) -> CompressionError:
    """Run ``candidate`` on simulated ranks, and return its compression error.  R = ranks, T = steps, m = elements.

    Local steps send updates, which are taken to be like gradients; after each step a fragment, or all of one local
    step, is exchanged beside the next one.

    Args:
        candidate: to try.
        gradients: [R, T, m] float32, of so many ranks as are simulated.
        weights: [m], the parameters' values.
    """
    size, recorded, m = gradients.shape
    fragments = max(candidate.local_steps, 1)
    steps = max(STEPS, TURNS * candidate.local_steps)
    network, found = SimNetwork(size, checks=False), CompressionError(skip=steps // 3)
    cut = [[Group(0, ("trial",), (part,)) for _ in range(size)] for part in weights.tensor_split(fragments)]
    unsent, on_the_way = torch.zeros(size, m, dtype=torch.float32, device=gradients.device), []
    for step in range(steps):
        unsent += gradients[:, step % recorded]
        before, turn = unsent.clone(), step % fragments
        part = unsent.tensor_split(fragments, dim=1)[turn]
        groups = cut[turn]
        for group, own in zip(groups, part, strict=True):
            group.unsent.copy_(own)
        take_steps(candidate.averaging, groups, network)
        on_the_way.append((part, part - torch.stack([group.unsent for group in groups])))
        if len(on_the_way) > (candidate.local_steps > 0):
            arriving, sent = on_the_way.pop(0)
            arriving -= sent
        found.step(before, unsent)
    return found

"""``ddp.join()``: ranks with fewer batches shadow the others' messages until these have none left either."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from tests.support.models import batch, small, unsent, weights
from tests.support.processes import Ranks


def uneven(rank: int, size: int, names: list[str], options: dict[str, Any]) -> list[Any]:
    return [train(rank, name, options) for name in names]


def train(rank: int, name: str, options: dict[str, Any]) -> tuple[Tensor, list[Tensor], dict[str, Any]]:
    """Weights, each step's means, and of each parameter what this rank gave, got and kept: flat, float64."""
    ddp = DistributedDataParallel(small().net, **options)
    hook = ls.SparseHook(ddp, name, fusion="none")
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    given, got = ({n: torch.zeros_like(p, dtype=torch.float64) for n, p in ddp.module.named_parameters()} for _ in "ab")
    for n, p in ddp.module.named_parameters():
        p.register_hook(lambda gradient, total=given[n]: (total.add_(gradient), None)[1])
    means = []
    with ddp.join():
        for step in range(2 + 3 * rank):
            x, y = batch(step, rank)
            optimizer.zero_grad()
            nn.functional.cross_entropy(ddp(x), y).backward()
            for n, p in ddp.module.named_parameters():
                got[n] += p.grad
            means.append(torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None]))
            optimizer.step()
    kept = unsent(hook)
    hook.close()
    return weights(ddp), means, {n: (given[n].flatten(), got[n].flatten(), kept[n]) for n in given}


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}], ids=["plain", "unused"])
def test_nothing_is_lost_and_means_are_over_all_ranks(ranks: Ranks, options: dict[str, Any]) -> None:
    size = 3
    names = ["sparse_dense", "micro", "low_rank"] if not options else ["micro"]
    for every in zip(*ranks.run(uneven, size, names, options, gloo=True), strict=True):
        last = every[-1]  # which took every step
        for trained, means, _ in every:
            assert torch.equal(trained, last[0])
            assert all(torch.equal(mean, of_last) for mean, of_last in zip(means, last[1], strict=False))
        for name, (_, got, _) in last[2].items():
            given = sum(residual[name][0] for _, _, residual in every)
            kept = sum(residual[name][2] for _, _, residual in every)
            assert torch.allclose(size * got + kept, given, atol=1e-5), name


def refused(rank: int, size: int) -> list[str]:
    """Rank 0 has no batch at all."""
    messages = []
    for fusion, options in (("layer", {}), ("bucket", {"divide_by_initial_world_size": False})):
        ddp = DistributedDataParallel(small().net)
        hook = ls.SparseHook(ddp, "micro", fusion=fusion)
        try:
            with ddp.join(**options):
                for step in range(rank):
                    ddp(batch(step, rank)[0]).sum().backward()
        except ValueError as error:
            messages.append(str(error))
        hook.close()
    return messages


def test_what_cannot_work_is_refused_on_every_rank(ranks: Ranks) -> None:
    for messages in ranks.run(refused, 2, gloo=True):
        assert "fusion='layer' cannot be combined with join()" in messages[0]
        assert "join(divide_by_initial_world_size=False) is not supported" in messages[1]

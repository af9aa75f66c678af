"""Many steps: memory stays flat, replicas stay the same, and nothing is lost.  ``SOAK_STEPS=20000`` for a long one."""

import os
import resource
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.monitor.replicas import check_replicas, checksum
from lightning_sparse.network.torch_comm import world
from tests.conftest import Ranks
from tests.training.models import unsent

STEPS = int(os.environ.get("SOAK_STEPS", "160"))
LIMIT_S = 60 + len(ls.COMPRESSORS) * STEPS / 20
MOST_GROWTH_BYTES = 4 * 2**20
pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]


class Given(nn.Module):
    """A model whose gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.ones(shape)) for shape in ((64, 33), (33,), (2000,), (1,))])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.layers, gradients, strict=True)]).sum()


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([x.detach().double().flatten() for x in tensors])


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak_each(rank: int, size: int, names: list[str], steps: int) -> list[tuple[float, int, int, int]]:
    dist.init_process_group("gloo")
    return [soak(rank, size, name, steps) for name in names]


def soak(rank: int, size: int, name: str, steps: int) -> tuple[float, int, int, int]:
    """Largest element lost, relative to the largest there was; bytes of memory early and at the end; replica's sum."""
    model = Given()
    ddp = nn.parallel.DistributedDataParallel(model)
    hook = ls.SparseHook(ddp, name, fusion="none")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    handed_in = torch.zeros(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    handed_out = torch.zeros_like(handed_in)
    early = 0
    for step in range(steps):
        gradients = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        optimizer.zero_grad()
        ddp(gradients).backward()
        handed_in += flat(gradients)
        handed_out += flat([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        if step == steps // 4:
            early = resident_bytes()
    late = resident_bytes()
    check_replicas(dict(model.named_parameters()), world())
    owed = unsent(hook)
    sent = handed_in - flat([owed[name] for name, _ in model.named_parameters()])
    dist.all_reduce(sent)
    lost = float((sent - size * handed_out).abs().max() / handed_out.abs().max())
    replica = sum(int(checksum(p)) for p in model.parameters())
    hook.close()
    return lost, early, late, replica


def test_many_steps(ranks: Ranks) -> None:
    """One compressor after the other, in the same two processes."""
    names = list(ls.COMPRESSORS)
    each = zip(*ranks.run(soak_each, 2, names, STEPS, timeout_s=LIMIT_S), strict=True)
    for name, results in zip(names, each, strict=True):
        for lost, early, late, replica in results:
            print(
                f"{name}: {STEPS} steps, {early / 2**20:.1f} then {late / 2**20:.1f} MiB, lost {lost:.1e}, {replica:x}"
            )
            assert lost < 1e-5
            assert late - early < MOST_GROWTH_BYTES
            assert replica == results[0][3]

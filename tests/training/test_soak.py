"""Many steps: memory stays flat, replicas stay the same, and nothing is lost.

``SOAK_STEPS=20000`` for a long one, ``SOAK_RANKS=3`` on three ranks.
"""

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.monitor.callbacks import check_replicas
from lightning_sparse.network.torch_comm import world
from tests.support.models import flat, unsent
from tests.support.processes import Ranks

STEPS = int(os.environ.get("SOAK_STEPS", "64"))
RANKS = int(os.environ.get("SOAK_RANKS", "2"))
GRADIENTS: dict[str, dict[str, Any]] = {name: {"compressor": name} for name in ls.COMPRESSORS}
LOCAL: dict[str, dict[str, Any]] = {
    "local int4": {"compressor": "sparse_dense", "wire_dtype": "int4", "local_steps": 2},
    "local sign": {"compressor": "sparse_dense", "wire_dtype": "sign", "local_steps": 3},
    "local micro": {"compressor": ls.MiCRO(density=0.05), "wire_dtype": "int4", "local_steps": 16},
}
LIMIT_S = 60 + len(GRADIENTS | LOCAL) * RANKS * STEPS / 40
MOST_LOST = 1e-5 * max(1.0, STEPS / 1000) ** 0.5  # errors of rounding add up like a random walk
MOST_GROWTH_BYTES = 4 * 2**20
pytestmark = [pytest.mark.processes, pytest.mark.programs, pytest.mark.timeout(LIMIT_S + 20)]


class Given(nn.Module):
    """A model whose gradient is what it is given, and whose weights are nothing but what optimizers did."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ParameterList([nn.Parameter(torch.zeros(shape)) for shape in ((64, 33), (33,), (2000,), (1,))])

    def forward(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.layers, gradients, strict=True)]).sum()


@dataclass
class Account:
    """What goes in and out over all steps, in float64."""

    model: Given
    hook: ls.SparseHook

    def __post_init__(self) -> None:
        self.handed_in = torch.zeros(sum(p.numel() for p in self.model.parameters()), dtype=torch.float64)
        self.handed_out = torch.zeros_like(self.handed_in)

    def step(self, gradients: list[Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Count a step's gradients, and their averages; or with local steps what the optimizer does."""
        parameters = list(self.model.parameters())
        before = flat(parameters)
        local = isinstance(self.hook.averager, LocalAverager)
        if not local:
            self.handed_out += flat([p.grad for p in parameters if p.grad is not None])
        optimizer.step()
        self.handed_in += flat(parameters) - before if local else flat(gradients)

    def lost(self, size: int) -> float:
        """The largest element lost, relative to the largest there was; the model then holds what ranks share."""
        averager, names = self.hook.averager, [name for name, _ in self.model.named_parameters()]
        ahead = 1.0
        self.hook.show_average()
        if isinstance(averager, LocalAverager):
            self.handed_out = flat([averager.averages[name] for name in names])
            residual = flat([averager.own[name] for name in names]) - self.handed_out
            ahead = averager.settings.lead or 1.0  # an optimizer's steps are so many times as long as x̄'s
        else:
            residual = flat([unsent(self.hook)[name] for name in names])
        sent = self.handed_in - residual
        dist.all_reduce(sent)
        return float((sent - size * ahead * self.handed_out).abs().max() / self.handed_out.abs().max())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def soak_each(rank: int, size: int, cases: list[dict[str, Any]], steps: int) -> list[tuple[float, int, int, int]]:
    return [soak(rank, size, options, steps) for options in cases]


def soak(rank: int, size: int, options: dict[str, Any], steps: int) -> tuple[float, int, int, int]:
    """Largest element lost, relative to the largest there was; bytes of memory early and at the end; replica's sum."""
    model = Given()
    ddp = nn.parallel.DistributedDataParallel(model)
    hook = ls.SparseHook(ddp, fusion="none", **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(rank)
    account, early = Account(model, hook), 0
    for step in range(steps):
        gradients = [torch.randn(p.shape, generator=generator) for p in model.parameters()]
        optimizer.zero_grad()
        ddp(gradients).backward()
        account.step(gradients, optimizer)
        if step == steps // 4:
            early = resident_bytes()
    late = resident_bytes()
    lost = account.lost(size)
    check_replicas(dict(model.named_parameters()), world())
    replica = sum(int(checksum(p)) for p in model.parameters())
    hook.close()
    return lost, early, late, replica


def test_many_steps(ranks: Ranks) -> None:
    """One compressor after the other, then local steps, in the same processes."""
    cases = GRADIENTS | LOCAL
    each = zip(*ranks.run(soak_each, RANKS, [*cases.values()], STEPS, timeout_s=LIMIT_S, gloo=True), strict=True)
    for name, results in zip(cases, each, strict=True):
        for lost, early, late, replica in results:
            print(
                f"{name}: {STEPS} steps, {early / 2**20:.1f} then {late / 2**20:.1f} MiB, lost {lost:.1e}, {replica:x}"
            )
            assert lost < MOST_LOST
            assert late - early < MOST_GROWTH_BYTES
            assert replica == results[0][3]

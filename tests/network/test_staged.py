"""Tensors on a device over Gloo: they are sent through the host's memory, with the same bits as those that lie there.

There is no device here: tensors of the host are taken for a device's, unless they are such a copy.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.network.torch_comm import TorchComm
from tests.support.processes import Ranks

KINDS = [(ls.Dense(), None), (ls.SkipReduce(), "bfloat16"), (ls.MiCRO(), "int4"), (ls.ImportancePruning(), None)]


class Staging:
    """Has ``TorchComm`` take every tensor for one on a device, and counts copies."""

    def __init__(self) -> None:
        self.copies = 0

    def __enter__(self) -> "Staging":
        self._before = {name: getattr(TorchComm, name) for name in ("_stages", "_on_host", "stages")}
        on_host = self._before["_on_host"]

        def copied(comm: TorchComm, x: Tensor) -> Tensor:
            self.copies += 1
            host = on_host(comm, x)
            host.is_copy = True
            return host

        TorchComm._stages = lambda _, x: not hasattr(x, "is_copy")
        TorchComm._on_host = copied
        TorchComm.stages = lambda *_: True
        return self

    def __exit__(self, *_: object) -> None:
        for name, function in self._before.items():
            setattr(TorchComm, name, function)


def trained(rank: int, compressor: ls.Compressor, wire: str | None, **options: Any) -> list[Tensor]:
    """All weights after a few steps, and what is unsent of two layers."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 7)))
    hook = ls.SparseHook(ddp, compressor, wire_dtype=wire, fusion="none", **options)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for step in range(4):
        x = torch.randn(5, 40, generator=torch.Generator().manual_seed(10 * step + rank))
        optimizer.zero_grad()
        ddp(x).square().mean().backward()
        optimizer.step()
    saved = hook.state_dict()["unsent"]
    hook.close()
    return [p.detach().clone() for p in ddp.parameters()] + list(saved.values())


def everything(rank: int, size: int) -> list[str]:
    """What differs with staging, of every compressor, format, and of local steps and nodes."""
    wrong = []
    runs: list[tuple[str, Callable[[], list[Tensor]]]] = [
        (f"{compressor} in {wire}", lambda c=compressor, w=wire: trained(rank, c, w)) for compressor, wire in KINDS
    ]
    runs.append(("local steps", lambda: trained(rank, ls.Dense(), "int4", local_steps=2)))
    for name, run in runs:
        plain = run()
        with Staging() as staging:
            staged = run()
        if not staging.copies:
            wrong.append(f"{name} was not staged")
        if not all(map(torch.equal, plain, staged)):
            wrong.append(f"{name} differs")
    return wrong


def messages(rank: int, size: int) -> list[str]:
    """What each message brings, with and without staging."""
    comm = TorchComm(dist.group.WORLD)
    x = torch.arange(6.0 * size).view(size, 6) + 100 * rank

    def all_of_them() -> list[Tensor]:
        kept = torch.full_like(x, -1)
        return [
            comm.all_reduce(x.clone(), direct=True).wait(),
            comm.all_reduce(x.clone(), direct=False).wait(),
            comm.all_gather(x).wait(),
            comm.broadcast(x.clone(), size - 1).wait(),
            comm.shift(x, by=size - 1).wait(),
            comm.shift(x, by=size).wait(),
            comm.all_to_all(x, torch.zeros_like(x)).wait(),
            comm.all_to_all(x, kept, by=[1]).wait(),
            comm.gather(x[0]),
            comm.mean(x[0]) if rank == 0 else comm.mean(x[0]) * 0,
        ]

    plain = all_of_them()
    with Staging():
        staged = all_of_them()
    return [str(place) for place, (a, b) in enumerate(zip(plain, staged, strict=True)) if not torch.equal(a, b)]


@pytest.mark.processes
def test_every_message_brings_the_same(ranks: Ranks) -> None:
    assert ranks.run(messages, 3, gloo=True) == [[]] * 3


@pytest.mark.processes
def test_trainings_end_in_the_same_bits(ranks: Ranks) -> None:
    assert ranks.run(everything, 2, gloo=True) == [[], []]

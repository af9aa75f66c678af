"""What each machine, and each rank of it, sends to other machines in a step, as the kernel counts it."""

import os
import socket
import struct
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.bench.cluster import INTERFACE, MASTER_PORT, Cluster
from lightning_sparse.bench.compare.ranks import read_sent
from lightning_sparse.bench.compare.strategies import bf16_hook
from tests.support.elastic import join_namespace
from tests.support.models import weights
from tests.support.processes import Ranks

Way = Mapping[str, Any] | None  # what a hook takes; None is plain DDP, {} its bf16 hook
WARM_UP, STEPS = 3, 10  # ranks compare some things every 10 steps
_BYTES_SENT = 200  # of the kernel's struct tcp_info, where the bytes that left are: u64, since 4.19


class Sent(NamedTuple):
    """What left in a step, the mean; ranks are in their order."""

    machines: list[float]  # bytes of each, by its interface
    ranks: list[float]  # bytes of each to other machines, by its sockets
    counted: list[float]  # bytes of each, by its hook
    same: bool  # whether all have the same average of weights


def sent(ranks: Ranks, cluster: Cluster, machines: int, local: int, ways: Mapping[str, Way]) -> dict[str, Sent]:
    """Train on the first ``machines`` of a cluster, ``local`` ranks on each; returns what was sent in each way."""
    hosts = [cluster.namespace(host) for host in range(machines)]
    every = ranks.run(_rank, machines * local, local, hosts, cluster.address(0), dict(ways))
    found = {}
    for label in ways:
        of_machine, own, counted, same = zip(*(each[label] for each in every), strict=True)
        found[label] = Sent(list(of_machine[::local]), list(own), list(counted), all(same))
    return found


def _rank(
    rank: int, size: int, local: int, hosts: list[str], first: str, ways: dict[str, Way]
) -> dict[str, tuple[float, float, float, bool]]:
    join_namespace(hosts[rank // local])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    dist.init_process_group("gloo", init_method=f"tcp://{first}:{MASTER_PORT}", rank=rank, world_size=size)
    return {label: _train(rank, way) for label, way in ways.items()}


def _bytes_to_other_machines() -> int:
    """What this process's TCP connections to other addresses have sent."""
    total = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # it is closed, or of a socket that is not connected
            if os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as known:
                    total += _bytes_to_another_machine(known)
    return total


def _bytes_to_another_machine(link: socket.socket) -> int:
    if link.family != socket.AF_INET or link.getpeername()[0] == link.getsockname()[0]:
        return 0
    found: int = struct.unpack_from("=Q", link.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256), _BYTES_SENT)[0]
    return found


def _model(buffers: bool) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(1024) if buffers else nn.Tanh()
    return nn.Sequential(nn.Linear(128, 1024), middle, nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 512))


def _train(rank: int, way: Way) -> tuple[float, float, float, bool]:
    """Bytes of a step that left, of this machine and of this rank, and that were counted; whether all average alike."""
    options = dict(way or {})
    ddp = DistributedDataParallel(_model(options.pop("buffers", False)))
    hook = ls.SparseHook(ddp, **options) if options else None
    if way == {}:
        ddp.register_comm_hook(None, bf16_hook)
    optimizer, generator = torch.optim.AdamW(ddp.parameters(), lr=1e-4), torch.Generator().manual_seed(rank)
    counts, counted = [], 0
    for step in range(WARM_UP + STEPS):
        if step == WARM_UP:
            counts.append(_counts())
        optimizer.zero_grad()
        ddp(torch.randn(8, 128, generator=generator)).square().mean().backward()
        optimizer.step()
        last = hook.averager.last if hook else None
        counted += last.sent_bytes if last and step >= WARM_UP else 0
    counts.append(_counts())
    machine, own = ((after - before) / STEPS for before, after in zip(*counts, strict=True))
    if hook:
        hook.show_average()
    mine = weights(ddp.module).detach().clone()
    first = mine.clone()
    dist.broadcast(first, 0)
    if hook:
        hook.close()
    return machine, own, counted / STEPS, mine.equal(first)


def _counts() -> tuple[int, int]:
    """Bytes that have left this machine, and this process, while no rank sends."""
    dist.barrier()
    found = read_sent(INTERFACE)[0], _bytes_to_other_machines()
    dist.barrier()
    return found

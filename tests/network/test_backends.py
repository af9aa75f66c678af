"""Which backend carries a tensor is asked of the process group, whatever the user has called it."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.network import process_groups
from lightning_sparse.network.process_groups import LANES, ProcessGroups
from lightning_sparse.network.torch_comm import carries_by_nccl

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def group_of(**backends: str) -> Any:
    """A process group with a backend for each type of device, as PyTorch names them once they are made."""

    def get(device: torch.device) -> Any:
        if device.type not in backends:
            raise RuntimeError(f"No backend type associated with device type {device.type}")
        return SimpleNamespace(name=lambda: backends[device.type])

    return SimpleNamespace(_get_backend=get)


@pytest.mark.parametrize("name", ["nccl", "nccl-lazy"])
def test_nccl_is_known_beside_gloo(name: str) -> None:
    group = group_of(cpu="gloo", cuda=name)
    assert carries_by_nccl(group, CUDA)
    assert not carries_by_nccl(group, CPU)
    assert not carries_by_nccl(group_of(cpu="gloo", cuda="gloo"), CUDA)


@pytest.mark.parametrize("name", ["mpi"])
def test_any_other_backend_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"tensors on cuda must be gloo or nccl; got {name}"):
        carries_by_nccl(group_of(cuda=name), CUDA)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    """Starts a process group of this process alone, by a name or none."""

    def start(name: str | None) -> dist.ProcessGroup:
        dist.init_process_group(name, init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
        assert dist.group.WORLD is not None
        return dist.group.WORLD

    yield start
    dist.destroy_process_group()


@pytest.mark.parametrize("name", ["gloo", "cpu:gloo,cuda:gloo", None])
def test_every_spelling_of_gloo_trains(started: Any, name: str | None) -> None:
    assert not carries_by_nccl(started(name), CPU)
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    hook = ls.SparseHook(ddp, "sparse_dense")
    ddp(torch.ones(1, 3)).sum().backward()
    hook.close()


@pytest.mark.parametrize("keeps_order", [True, False])
def test_on_nccl_there_is_one_communicator_and_local_steps_have_their_own(
    started: Any, monkeypatch: pytest.MonkeyPatch, keeps_order: bool
) -> None:
    """A user's messages in a forward, as of ``log(sync_dist=True)``, do not wait for what is under way beside it.

    Where a device may run messages of two communicators in any order, there is one.
    """
    everyone = started("gloo")
    ddp = DistributedDataParallel(nn.Linear(3, 2))
    assert len(ProcessGroups(ddp).comms()) == LANES
    monkeypatch.setattr(process_groups, "carries_by_nccl", lambda *_: True)
    monkeypatch.setattr(process_groups, "devices_keep_order", lambda: keeps_order)
    of_gradients = ProcessGroups(ddp).comms()
    of_local_steps = ProcessGroups(ddp).comms(beside_ddp=True)
    assert {each.group for each in of_gradients} == {everyone}
    assert len({each.group for each in of_local_steps}) == 1
    assert (of_local_steps[0].group is not everyone) == keeps_order
    assert all(each.costs.by_backend for each in (*of_gradients, *of_local_steps))

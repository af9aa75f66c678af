"""Which library carries a message is asked of the process group, however it was spelt."""

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers "fake"
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.engine.build import averaged_parameters
from lightning_sparse.network.carrier import nccl_here
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.network.torch_comm import TorchComm
from lightning_sparse.wire import FLOAT32
from tests.support.models import batch, small
from tests.support.processes import Ranks
from tests.support.said import refusal

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OVER_NCCL = ["nccl2", "nccl-lazy", "cpu:gloo,cuda:nccl2", "cpu:gloo,cuda:nccl-lazy", "cuda:nccl2", "fake"]
NOTED_AS_NCCL = ["cuda:nccl", "cpu:gloo,cuda:nccl"]  # "nccl", or no name at all; PyTorch for the CPU cannot make them


def _make(store: Any, rank: int, size: int, timeout: Any) -> Any:
    """A backend that sends nothing, and calls itself "fake"."""
    return FakeProcessGroup._create_internal(rank, size)


@contextmanager
def group_of(backend: str | None, folder: Path) -> Iterator[Any]:
    """A process group of this rank alone."""
    for name in ("nccl2", "nccl-lazy", "own"):  # as a package does that brings one
        if name not in dist.Backend.backend_list:
            dist.Backend.register_backend(name, _make, devices=["cuda"])
    store = dist.FileStore(str(folder / uuid.uuid4().hex), 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def groups_on(device: torch.device, group: Any) -> ProcessGroups:
    """The process groups of a model that lies on ``device``."""
    ddp: Any = SimpleNamespace(process_group=group, device=device)
    return ProcessGroups(ddp)


@pytest.mark.parametrize("backend", OVER_NCCL)
def test_every_spelling_of_nccl_has_one_issuer_and_ddps_communicator(backend: str, tmp_path: Path) -> None:
    """Taken for Gloo it would have two threads, and two communicators."""
    with group_of(backend, tmp_path) as group:
        groups = groups_on(CUDA, group)
        assert groups.nccl
        assert len(groups.comms(FLOAT32)) == 1
        assert not groups._made


@pytest.mark.parametrize("noted", NOTED_AS_NCCL)
def test_a_group_made_without_a_name_is_known_by_what_pytorch_noted(
    noted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with group_of("gloo", tmp_path) as group:
        monkeypatch.setitem(dist.distributed_c10d._world.pg_backend_config, group, noted)
        monkeypatch.setitem(
            dist.distributed_c10d._world.pg_map, group, ("undefined", dist.distributed_c10d._world.pg_map[group][1])
        )
        assert groups_on(CUDA, group).nccl


@pytest.mark.parametrize("backend", ["gloo", None, "cpu:gloo", "cpu:gloo,cuda:nccl2", "fake"])
def test_on_the_cpu_gloo_carries_messages_whatever_carries_those_of_cuda(backend: str | None, tmp_path: Path) -> None:
    with group_of(backend, tmp_path) as group:
        groups = groups_on(CPU, group)
        assert not groups.nccl
        assert len(groups.comms(FLOAT32)) == 2


@pytest.mark.parametrize(
    ("backend", "device", "said"),
    [
        ("gloo", CUDA, "on CUDA the process group must be NCCL's; got 'gloo'"),
        (None, CUDA, "got 'cpu:gloo', which carries no such tensors"),
        ("cpu:gloo,cuda:own", CUDA, "got 'own', which calls itself 'fake'"),
        ("nccl2", CPU, "on CPU the process group must be Gloo's; got 'cuda:nccl2', which carries no such tensors"),
        ("gloo", torch.device("xpu", 0), "must lie on the CPU or on CUDA; got a tensor on xpu:0"),
    ],
)
def test_what_cannot_carry_them_is_refused_by_name(
    backend: str | None, device: torch.device, said: str, tmp_path: Path
) -> None:
    with group_of(backend, tmp_path) as group:
        message = refusal(groups_on, device, group)
        assert said in message
        assert "Make it with" in message or "Move the model" in message


def calls_of(send: Callable[[TorchComm, Tensor], Any], device: str, folder: Path, patch: Any) -> list[str]:
    """The functions of torch.distributed that a message calls on one of three ranks, for a tensor on ``device``."""
    called: list[str] = []

    def note(name: str) -> Callable[..., Any]:
        return lambda *_, **__: called.append(name) or ([] if name == "batch_isend_irecv" else None)

    with group_of("cpu:gloo,cuda:nccl2", folder) as group, FakeTensorMode():
        comm = TorchComm(group)
        comm.size, comm._global = 3, [0, 0, 0]
        for name in ("batch_isend_irecv", "isend", "irecv", "all_gather"):
            patch.setattr(dist, name, note(name))
        patch.setattr(dist, "P2POp", lambda *_: None)
        send(comm, torch.zeros(3, 4, device=device))
    return called


@pytest.mark.parametrize(
    ("send", "on_nccl"),
    [
        (lambda comm, x: comm.shift(x), ["batch_isend_irecv"]),
        (lambda comm, x: comm.all_gather(x), ["all_gather"]),
    ],
)
def test_a_message_goes_the_way_of_what_carries_it(
    send: Callable[[TorchComm, Tensor], Any], on_nccl: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On NCCL sends and receives are one call: apart, every rank would wait in its receive for ever."""
    assert calls_of(send, "cuda", tmp_path, monkeypatch) == on_nccl
    assert set(calls_of(send, "cpu", tmp_path, monkeypatch)) == {"irecv", "isend"}


class Devices(nn.Module):
    """Parameters that seem to lie on two devices."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3, device="meta"))


def test_a_model_on_two_devices_is_refused() -> None:
    ddp: Any = SimpleNamespace(module=Devices(), parameters_to_ignore=set())
    assert "must lie on one device; got cpu, meta." in refusal(averaged_parameters, ddp)


def train_in(rank: int, size: int, backend: str | None) -> Tensor:
    """Three steps in a process group that was made so."""
    dist.init_process_group(backend)
    ddp = DistributedDataParallel(small().net)
    hook = ls.SparseHook(ddp, "micro")
    for step in range(3):
        x, y = batch(step, rank)
        nn.functional.cross_entropy(ddp(x), y).backward()
    hook.close()
    return torch.cat([p.grad.flatten() for p in ddp.parameters() if p.grad is not None])


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_a_group_without_a_name_trains_to_the_same_bits(ranks: Ranks, backend: str | None) -> None:
    plain = ranks.run(train_in, 2, "gloo")
    assert all(map(torch.equal, ranks.run(train_in, 2, backend), plain))


def test_which_nccl_there_is_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    assert nccl_here() == ""
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "cuda", "nccl2")
    assert nccl_here() == "2.27.3, by the backend nccl2"

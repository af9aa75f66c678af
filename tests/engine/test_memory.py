"""What a rank's averager keeps between two steps, in bytes of tensors: L ranks of a member have one part in L each.

And what a save takes meanwhile, of any device: at most twice the largest parameter, however many ranks there are.
"""

import gc
import types
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import lightning_sparse as ls
from lightning_sparse.checkpoint import residuals as checkpoint
from lightning_sparse.checkpoint.rank_local import RankLocalState
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.hook import SparseHook
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.cut import Cut
from lightning_sparse.network.process_groups import Between
from lightning_sparse.network.simulated import SimComm
from lightning_sparse.options import Options
from tests.support.fake_cuda import FakeCuda, place_of, unavailable_reason
from tests.support.fake_nccl import FakeNccl
from tests.support.in_process import Meeting, Network, ThreadComm, ThreadDDP, ThreadGroups, ThreadRanks
from tests.support.on_fake_cuda import parameters

STEPS, LOCAL = 6, 4
GROUP_BYTES = 2**17  # of gradient
WAYS: dict[str, dict[str, Any]] = {
    "sparse_dense": {"compressor": "sparse_dense", "wire_dtype": "int4"},
    "local steps": {"compressor": "sparse_dense", "wire_dtype": "int4", "local_steps": 2},
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(512, 64, bias=False) if i % 2 else nn.Linear(64, 512) for i in range(10)))


def kept(root: object, without: Collection[int] = ()) -> dict[int, int]:
    """Bytes of each storage of the tensors that ``root`` leads to, by its address, ``without`` some.

    What a rank shares with others, as threads of one process, is left out, and so are modules.
    """
    ends = type, types.ModuleType, types.FrameType, nn.Module, Network, Meeting
    found: dict[int, int] = {}
    seen: dict[int, object] = {}  # which keeps them alive, so that no other has the same id
    ahead = [root]
    while ahead:
        each = ahead.pop()
        if id(each) in seen or isinstance(each, ends):
            continue
        seen[id(each)] = each
        if isinstance(each, Tensor):
            storage = each.untyped_storage()
            if storage.data_ptr() not in without:
                found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(each, types.FunctionType):
            ahead.extend(each.__closure__ or ())
        else:
            ahead.extend(gc.get_referents(each))
    return found


def of_trained(module: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Parameters, gradients, and what the optimizer keeps."""
    for p in module.parameters():
        yield p
        if p.grad is not None:
            yield p.grad
        yield from optimizer.state[p].values()


def bytes_kept(members: int, local: int, way: dict[str, Any]) -> list[dict[str, int]]:
    """Of each rank: in all, and of these in memory for messages inside a member, across, and so on."""
    ranks = ThreadRanks(members * local)
    options = {"fusion": "bucket", "bucket_bytes": GROUP_BYTES, **way}

    def train(rank: int) -> dict[str, int]:
        group, own = ranks.network.group(rank), model()
        ddp: Any = ThreadDDP(own, group)
        groups: Any = ThreadGroups(group, local)
        hook = SparseHook.__new__(SparseHook)
        hook._put_on(ddp, Options.of(**options), None, groups, may_be_local=True, evaluates=lambda _: False)
        optimizer = torch.optim.AdamW(own.parameters(), 1e-3)
        hook.note(optimizer)
        meet = ThreadComm(group).all_gather
        meet(torch.zeros(1)).wait()  # PyTorch's hooks of all optimizers must not change while another thread steps
        for _ in range(STEPS):
            optimizer.zero_grad()
            ddp(torch.randn(4, 64)).square().mean().backward()
            optimizer.step()
        averager = hook.averager
        averager.settle()
        trained = {x.untyped_storage().data_ptr() for x in of_trained(own, optimizer)}
        comms: list[Comm] = [lane.comm for lane in averager.lanes]
        inside: list[Any] = [comm.inside for comm in comms]
        what: dict[str, Any] = {"in all": averager, "across": [comm.buffers for comm in comms]}
        what["unsent"] = [group.unsent for group in averager.groups]
        if isinstance(averager, LocalAverager):
            inside.append(averager._inside)
            what["average"] = [replica.average for replica in averager.weights.replicas]
            what["second moments"] = averager.moments, averager.mean_moments  # a few of each tensor, whatever it has
        what["inside"] = [comm.buffers for comm in inside if comm is not None]
        in_bytes = {label: sum(kept(each, trained).values()) for label, each in what.items()}
        meet(torch.zeros(1)).wait()
        hook.close()
        ddp.close()
        return in_bytes

    try:
        return ranks.everywhere(train)
    finally:
        ranks.close()


def lend(self: SimComm, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Take memory for messages as ranks with a network do, and lend some that no other thread still reads."""
    return torch.empty_like(self.buffers.lend(name, elements, dtype, device))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", WAYS)
def test_a_rank_of_a_member_keeps_its_part(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_sparse.hook.TorchComm", ThreadComm)
    monkeypatch.setattr(SimComm, "buffer", lend)
    monkeypatch.setattr("lightning_sparse.local_steps.settings.LEAD", 1.0)
    alone = bytes_kept(2, 1, WAYS[way])[0]
    for of_rank in bytes_kept(2, LOCAL, WAYS[way]):
        for label in {"unsent", "average", "across"} & set(alone):
            assert of_rank[label] == pytest.approx(alone[label] / LOCAL, rel=0.02), label
        assert of_rank["inside"] <= 6 * 1.05 * GROUP_BYTES  # of each lane and the main thread: sent, and received
        assert cut(of_rank) == pytest.approx(cut(alone) / LOCAL, rel=0.02)


def cut(found: dict[str, int]) -> int:
    """What is to be cut among the ranks of a member."""
    return found["in all"] - found["inside"] - found.get("second moments", 0)


# - a save

PARAMETERS = {"small": (300, 70), "large": (4096, 2**13), "last": (7,)}


class Memory(FakeCuda):
    """A fake device that knows how many bytes its tensors take, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def allocate(self, x: Tensor) -> None:
        if place_of(x) == "cuda":
            storage = x.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
            self.peak = max(self.peak, self.now_bytes)

    @property
    def now_bytes(self) -> int:
        self._alive = {key: each for key, each in self._alive.items() if not each[0].expired()}
        return sum(nbytes for _, nbytes in self._alive.values())


@pytest.mark.skipif(bool(unavailable_reason()), reason=unavailable_reason() or "")
@pytest.mark.parametrize("residuals", ["per_rank", "mean"])
@pytest.mark.parametrize("local", [1, 8])
def test_a_save_takes_at_most_twice_the_largest_parameter_on_a_device(
    local: int, residuals: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_sparse.engine.inside.everywhere", lambda text, comm, device: [text] * comm.size)
    members = 64 // local  # as many as ranks of a member, where these are several
    with Memory().entered() as cuda, (nccl := FakeNccl(0, members)).in_place():
        assert isinstance(cuda, Memory)
        of = parameters(PARAMETERS)
        groups = lay_out(of, ls.TopK(), "bucket", 50_000, Cut(0, local))
        averager = GradientAverager(groups, [nccl.comm()], threaded=False)
        between = Between(nccl.comm(), nccl.comm() if local > 1 else None, nccl.comm())
        cuda.peak = before = cuda.now_bytes
        saved = checkpoint.gather(
            averager, residuals, between, "top_k", {}, RankLocalState([], None, nn.Module(), False), False
        )
        rows = (members,) if residuals == "per_rank" else ()
        assert {name: x.shape for name, x in saved.unsent.items()} == {n: (*rows, *s) for n, s in PARAMETERS.items()}
        assert {x.device.type for x in saved.unsent.values()} == {"cpu"}
        assert 0 < cuda.peak - before <= 2 * max(4 * p.numel() for p in of.values())

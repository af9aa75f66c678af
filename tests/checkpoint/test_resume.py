"""Resuming and fitting again: nothing unsent is multiplied or guessed, and a rank reads only what it goes on with."""

import copy
import inspect
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.checkpoint.state import KEY, State
from tests.conftest import compress_alone
from tests.support.models import unsent
from tests.support.said import refusal, warned

# What newer versions of Lightning ask a strategy to load with.
WEIGHTS_ONLY = (
    {"weights_only": True} if "weights_only" in inspect.signature(DDPStrategy.load_checkpoint).parameters else {}
)
MOMENTUM = ls.MomentumCorrection(0.9, ls.TopK(density=0.1))


pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.fixture(autouse=True)
def _not_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    compress_alone(monkeypatch)


class Two(nn.Module):
    """Two layers, and a third if asked for."""

    def __init__(self, head: int = 3, more: bool = False) -> None:
        super().__init__()
        self.body = nn.Linear(8, 11)
        self.head = nn.Linear(11, head)
        self.more = nn.Parameter(torch.ones(7)) if more else None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.body(x)).square().sum()
        return y if self.more is None else y + self.more.square().sum()


class Training:
    """A model on one rank that takes steps; ``delivered`` adds up the means."""

    def __init__(self, compressor: ls.Compressor = MOMENTUM, fusion: str = "bucket", module: nn.Module | None = None):
        torch.manual_seed(0)
        self.ddp = DistributedDataParallel(module or Two())
        self.hook = ls.SparseHook(self.ddp, compressor, fusion=fusion, wire_dtype="float32")
        self.delivered: dict[str, Tensor] = {}

    def steps(self, count: int, loss_scale: float = 1.0) -> "Training":
        for _ in range(count):
            self.ddp.zero_grad()
            (loss_scale * self.ddp(torch.randn(4, 8))).backward()
            for name, p in self.ddp.module.named_parameters():
                if p.grad is not None:
                    self.delivered[name] = self.delivered.get(name, torch.zeros(p.numel())) + p.grad.flatten()
        return self

    def velocities(self) -> dict[str, Tensor]:
        return {
            name: slot.clone()
            for group in self.hook.averager.groups
            for name, slot in zip(group.names, group.slots(group.memory["velocity"]), strict=True)
        }

    def close(self) -> None:
        self.hook.close()


def found_in(state: dict[str, Any], rank: int, size: int) -> str:
    """What ``rank`` of ``size`` finds wrong."""
    return refusal(State.checked, state, rank, size)


def of_ranks(state: dict[str, Any], size: int) -> dict[str, Any]:
    """As if ``size`` ranks had written it, each with the same but for a factor."""
    factors = torch.arange(1.0, size + 1)
    state = copy.deepcopy(state) | {"size": size}
    state["unsent"] = {n: factors.view(-1, *[1] * (x.ndim - 1)) * x for n, x in state["unsent"].items()}
    for group in state["groups"]:
        group["memory"] = {k: x.expand(size, *x.shape[1:]).clone() for k, x in group["memory"].items()}
    del state["checksum"]
    return state | {"checksum": State(**state).checksums()}


# - what is unsent arrives once


@pytest.mark.parametrize("how", ["mean", "ranks"])
def test_what_was_unsent_arrives_once_though_velocities_are_not_known(how: str) -> None:
    before = Training().steps(5)
    state = before.hook.state_dict("mean" if how == "mean" else "per_rank")
    state = of_ranks(state, 3) if how == "ranks" else state
    factor = 2.0 if how == "ranks" else 1.0  # the mean of 1, 2 and 3
    after = Training()
    warned(after.hook.load_state_dict, state)
    after.steps(30, loss_scale=0.0)
    for name, residual in unsent(before.hook).items():
        assert residual.any()
        assert torch.allclose(after.delivered[name], factor * residual, rtol=1e-5, atol=1e-6), name
        assert not unsent(after.hook)[name].any()
    before.close()
    after.close()


@pytest.mark.parametrize(
    ("change", "by"),
    [("another number of groups", "fit"), ("a new parameter", "file"), ("a new head", "fit"), ("frozen", "file")],
)
def test_a_parameter_that_stays_keeps_its_velocity(change: str, by: str) -> None:
    """The velocities of all others in its group were dropped, and came back as what was unsent."""
    before = Training().steps(5)
    kept, residual, moving = before.hook.state_dict(), unsent(before.hook), before.velocities()
    module = Two(head=5 if change == "a new head" else 3, more=change == "a new parameter")
    module.head.requires_grad_(change != "frozen")
    after = Training(module=module, fusion="none" if change == "another number of groups" else "bucket")
    if by == "file":
        said = "".join(warned(after.hook.load_state_dict, kept))
    else:
        said = "".join(warned(after.hook.take_over, before.hook))
    now, velocities = unsent(after.hook), after.velocities()
    for name in now:
        stays = name in residual and residual[name].shape == now[name].shape
        assert torch.equal(now[name], residual[name] if stays else torch.zeros_like(now[name])), name
        assert torch.equal(velocities[name], moving[name] if stays else torch.zeros_like(now[name])), name
    named = {
        "another number of groups": "",
        "a new parameter": "new parameters start from zero (more)",
        "a new head": "parameters of another shape start from zero (head.bias, head.weight)",
        "frozen": "parameters that are gone or frozen is dropped (head.bias, head.weight)",
    }[change]
    assert named in said
    assert bool(said) == bool(named)
    assert after.hook.averager.groups[-1].step == 5
    after.steps(2)
    before.close()
    after.close()


# - a rank reads its own part


def test_a_rank_looks_at_its_own_row_only(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(ls.MomentumCorrection(0.9, ls.TopK(density=0.1))).steps(3)
    state = of_ranks(training.hook.state_dict(), 4)
    row_bytes = sum(x[0].numel() * 4 for x in state["unsent"].values()) * 2  # velocities are as many
    summed: list[int] = []
    crc32 = zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data, crc=0: (summed.append(len(data)), crc32(data, crc))[1])
    for rank in range(4):
        summed.clear()
        assert found_in(state, rank, 4) == ""
        assert sum(size for size in summed if size > 100) <= row_bytes + 2000
    summed.clear()
    assert found_in(state, 0, 2) == ""  # the mean of all rows
    assert sum(summed) >= 4 * row_bytes
    training.close()


@pytest.mark.parametrize("where", ["unsent", "velocity", "shared"])
def test_damage_in_a_row_is_found_by_its_rank(where: str) -> None:
    training = Training().steps(3)
    state = of_ranks(training.hook.state_dict(), 3)
    if where == "unsent":
        state["unsent"]["head.weight"][1, 2, 3] += 1e-3
    elif where == "velocity":
        state["groups"][0]["memory"]["velocity"][1, 7] += 1e-3
    else:
        state["steps"] += 1
    found = [found_in(state, rank, 3) for rank in range(3)]
    if where == "shared":
        assert all(each and "the checksum of what all ranks share is " in each for each in found)
    else:
        assert found[0] == found[2] == ""
        assert "the checksum of rank 1's part is " in str(found[1])
        assert "the checksum of rank 1's part is " in str(found_in(state, 0, 2))
    with pytest.raises(ValueError, match=r"are damaged: .*checksum of .* \(rank"):
        training.hook.load_state_dict(state)
    training.close()


def resident_bytes(path: Path) -> int:
    """Of a file that is mapped, the bytes that were read through the mapping."""
    lines = Path("/proc/self/smaps").read_text().splitlines()
    starts = [i for i, line in enumerate(lines) if line.endswith(str(path))]
    return sum(1024 * int(next(line for line in lines[i:] if line.startswith("Rss:")).split()[1]) for i in starts)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux, which says what was read")
@pytest.mark.skipif(not WEIGHTS_ONLY, reason="Lightning 2.5 loads files by itself")
def test_of_a_local_file_a_rank_reads_its_own_rows(tmp_path: Path) -> None:
    """And what is not ours does not lie in the file, which somebody may overwrite."""
    rows, path = torch.randn(8, 2**19), tmp_path / "x.ckpt"  # 2 MiB a row
    state: dict[str, Any] = {
        "residuals": "per_rank", "size": 8, "steps": 1, "unsent": {"w": rows}, "groups": [], "compressor": "x",
        "plan": {},
    }  # fmt: skip
    state["checksum"] = State(**state).checksums()
    theirs = torch.randn(2**19)
    torch.save({"state_dict": {"w": theirs, "tied": theirs}, KEY: state}, path)
    loaded = ls.SparseDDPStrategy().load_checkpoint(path, **WEIGHTS_ONLY)
    copied = resident_bytes(path)
    assert found_in(loaded[KEY], 4, 8) == ""
    assert rows[0].nbytes <= resident_bytes(path) - copied <= rows.nbytes / 2  # in pages, of 2 MiB perhaps
    assert torch.equal(loaded[KEY]["unsent"]["w"], rows)
    assert loaded["state_dict"]["w"].data_ptr() == loaded["state_dict"]["tied"].data_ptr()
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert torch.equal(loaded["state_dict"]["w"], theirs)

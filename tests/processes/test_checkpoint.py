"""What is unsent survives a checkpoint."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.checkpoint import KEY
from tests.conftest import Ranks
from tests.processes.models import LIMIT_S, data, small, trainer, weights

pytestmark = [pytest.mark.processes, pytest.mark.timeout(LIMIT_S + 20)]


def unsent(strategy: ls.SparseDDPStrategy) -> dict[str, Tensor]:
    assert strategy.exchange is not None
    return {
        name: slot.clone()
        for group in strategy.exchange.groups
        for name, slot in zip(group.names, group.slots(group.unsent), strict=True)
    }


def train(
    rank: int, size: int, folder: str, name: str, steps: int, resume: str | None, residuals: str
) -> tuple[Tensor, dict[str, Tensor]]:
    strategy = ls.SparseDDPStrategy(name, residuals=residuals)
    model = small(optimizer="adam")
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=10, save_top_k=-1)
    run = trainer(strategy, size, max_steps=steps, callbacks=[saver], enable_checkpointing=True)
    run.fit(model, data(10, size), ckpt_path=resume)
    return weights(model), unsent(strategy)


@pytest.mark.parametrize("name", list(ls.COMPRESSORS))
def test_a_resumed_run_equals_one_that_never_stopped(ranks: Ranks, name: str, tmp_path: Path) -> None:
    size = 2
    straight = ranks.run(train, size, str(tmp_path / "a"), name, 20, None, "per_rank", timeout_s=LIMIT_S)
    ranks.run(train, size, str(tmp_path / "b"), name, 10, None, "per_rank", timeout_s=LIMIT_S)
    half = str(tmp_path / "b" / "step=10.ckpt")
    resumed = ranks.run(train, size, str(tmp_path / "c"), name, 20, half, "per_rank", timeout_s=LIMIT_S)
    for (w, u), (w2, u2) in zip(straight, resumed, strict=True):
        assert torch.equal(w, w2)
        assert u.keys() == u2.keys()
        assert all(torch.equal(u[k], u2[k]) for k in u)
    state = torch.load(half, weights_only=True)[KEY]
    assert state["size"] == size
    assert state["steps"] == 10
    assert state["unsent"]["net.0.weight"].shape == (size, 33, 8)


def restore_only(rank: int, size: int, path: str) -> dict[str, Tensor]:
    strategy = ls.SparseDDPStrategy("skip_reduce")
    trainer(strategy, size, max_steps=10).fit(small(optimizer="adam"), data(10, size), ckpt_path=path)
    return unsent(strategy)


@pytest.mark.parametrize("residuals", ["per_rank", "mean"])
@pytest.mark.parametrize(("before", "after"), [(3, 1), (2, 3)])
def test_another_number_of_ranks_starts_from_the_mean(
    ranks: Ranks, residuals: str, before: int, after: int, tmp_path: Path
) -> None:
    """What the mean gradient still owes is a P-th of the sum of what the ranks keep."""
    saved = ranks.run(train, before, str(tmp_path), "skip_reduce", 10, None, residuals, timeout_s=LIMIT_S)
    back = ranks.run(restore_only, after, str(tmp_path / "step=10.ckpt"), timeout_s=LIMIT_S)
    for name in saved[0][1]:
        owed = sum(u[name].double() for _, u in saved) / before
        assert torch.allclose(sum(u[name].double() for u in back) / after, owed, rtol=1e-6, atol=1e-9)


def cross_load(rank: int, size: int, folder: str) -> Any:
    """Ours into plain DDP, plain DDP's into ours, and ours with other parameters."""
    out = Path(folder)

    def fit(strategy: Any, steps: int, resume: Path | None = None) -> Any:
        run = trainer(strategy, size, max_steps=steps)
        run.fit(small(), data(10, size), ckpt_path=resume)
        return run

    fit("skip_reduce", 3).save_checkpoint(out / "ours.ckpt")
    fit("ddp", 5, out / "ours.ckpt").save_checkpoint(out / "plain.ckpt")
    with pytest.warns(UserWarning, match="holds no residuals") if rank == 0 else nullcontext():
        fit("skip_reduce", 7, out / "plain.ckpt").save_checkpoint(out / "weights.ckpt", weights_only=True)
    fit(ls.SparseDDPStrategy(residuals="none"), 3).save_checkpoint(out / "none.ckpt")
    return [KEY in torch.load(out / f"{n}.ckpt", weights_only=True) for n in ("ours", "plain", "weights", "none")]


def test_checkpoints_go_to_and_from_plain_ddp(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(cross_load, 2, str(tmp_path), timeout_s=LIMIT_S)[0] == [True, False, False, False]

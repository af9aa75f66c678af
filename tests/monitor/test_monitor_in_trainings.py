"""The monitor inside an ordinary Trainer, on real processes."""

import csv
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, RichProgressBar, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor

import lightning_sparse as ls
from tests.support.models import Does, Small, data, small, trainer
from tests.support.processes import Ranks

#: Bytes with which the monitor asks in each logged step what was delivered: two numbers of each sampled element.
ASKED = 8 * sum(min(p.numel(), 64) for p in small().parameters())


class Logged(Small):
    """Logs its loss, and is validated."""

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = super().training_step(batch, index)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], index: int) -> None:
        self.log("validation_loss", super().training_step(batch, index))


class Scheduled(Logged):
    """Lowers its learning rate where what is unsent grows, which differs from rank to rank."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "sparse/unsent_norm"}}


def log(rank: int, size: int, folder: str) -> dict[str, Any]:
    """Two fits of one Trainer with two loggers and a picture, then a validation; what is left of them."""
    monitor = ls.CompressionMonitor(table=False, summary=False, plot=True)
    stopping = EarlyStopping("sparse/unsent_norm", patience=9, check_on_train_epoch_end=True)
    loggers = [CSVLogger(folder, "first"), CSVLogger(folder, "second")]
    run = trainer(
        "sparse_topk",
        size,
        max_epochs=2,
        log_every_n_steps=4,
        logger=loggers,
        callbacks=[monitor, stopping],
        val_check_interval=3,
    )
    model = Scheduled()
    run.validate(model, data(2, size), verbose=False)
    before = len(monitor._notes.points)
    run.fit(model, data(6, size), data(2, size))
    first = [point.step for point in monitor._notes.points]
    run.fit_loop.max_epochs = 3
    run.fit(model, data(6, size), data(2, size))
    metrics = {key: float(value) for key, value in run.callback_metrics.items()}
    own = monitor._notes.sums
    assert run.strategy.averager is not None  # type: ignore[attr-defined]
    return {
        "points": (before, first, [point.step for point in monitor._notes.points]),
        "losses": [point.loss for point in monitor._notes.points],
        "metrics": metrics,
        "own": monitor._last,
        "acted": (stopping.best_score.item(), stopping.wait_count, run.optimizers[0].param_groups[0]["lr"]),
        "sums": (own.steps, own.sent_bytes, own.dense_bytes),
        "sent": [lane.comm.sent_bytes for lane in run.strategy.averager.lanes],  # type: ignore[attr-defined]
        "times": len(monitor._notes.times),
    }


def test_a_run_with_two_loggers_two_fits_and_validation(ranks: Ranks, tmp_path: Path) -> None:
    results = ranks.run(log, 2, str(tmp_path))
    for key in ("residual_norm", "residual_over_gradient", "ms_wait"):  # of rank 0, though a rank's own are others
        assert len({result["own"][f"sparse/{key}"] for result in results}) == 2
    for key, value in results[0]["own"].items():
        assert results[0]["metrics"][key] == results[1]["metrics"][key] == pytest.approx(value)
    assert results[0]["acted"] == results[1]["acted"]
    for result in results:
        assert result["points"] == (0, [3, 5, 7, 11], [15, 17])
        steps, sent, dense = result["sums"]
        assert (steps, sent + 2 * ASKED) == (6, sum(result["sent"]))  # every byte that left in the second fit
        n = sum(p.numel() for p in small().parameters())
        assert dense == 6 * 4 * n
        assert result["metrics"]["sparse/density"] > 0.01  # what two ranks picked
        assert result["metrics"]["sparse/unsent_norm"] > 0
        assert result["metrics"]["sparse/oldest_steps"] == 6  # top-k never sent something of the second fit
        assert result["times"] == 1
    for name in ("first", "second"):
        rows = {}
        for row in csv.DictReader((tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines()):
            rows.update({(int(row["step"]), key): value for key, value in row.items() if value})
        assert {step for step, key in rows if key == "sparse/sent_bytes"} == {3, 5, 7, 11, 15, 17}
        assert {step for step, key in rows if key == "loss"} >= {3, 7, 11, 15}  # in the same rows as Lightning's own
        assert float(rows[15, "loss"]) == pytest.approx(results[0]["losses"][0], rel=1e-5)
    assert (tmp_path / "first" / "version_0" / "compression.png").stat().st_size > 10_000
    assert not (tmp_path / "second" / "version_0" / "compression.png").exists()


def bars(rank: int, size: int) -> list[dict[str, Any]]:
    """What either progress bar shows, and what a monitor finds in plain DDP."""
    found = []
    for bar in (RichProgressBar(), TQDMProgressBar()):
        looks = Does("on_train_end", lambda run: run.progress_bar_callback.get_metrics(run, run.lightning_module))
        callbacks = [ls.CompressionMonitor(table=False, summary=False), bar, looks]
        run = trainer(
            "skip_reduce", size, max_steps=4, log_every_n_steps=2, callbacks=callbacks, enable_progress_bar=True
        )
        run.fit(Logged(), data(4, size))
        found.append(looks.found[0])
    run = trainer("ddp", size, max_steps=2, callbacks=[ls.CompressionMonitor()])
    with pytest.warns(UserWarning, match="nothing to report") if rank == 0 else torch.no_grad():
        run.fit(small(), data(2, size))
    return [*found, dict(run.callback_metrics)]


def test_progress_bars_and_another_strategy(ranks: Ranks) -> None:
    for *each, of_ddp in ranks.run(bars, 2):
        for shown in each:
            assert shown["sent"] == "50 %"
            assert "loss" in shown
        assert of_ddp == {}


def add_up(rank: int, size: int) -> list[float]:
    ratio, error = ls.CompressionRatio(), ls.ThresholdError()
    for step in range(3 - rank):  # not as many on every rank
        ratio.update(dense_bytes=100, sent_bytes=10 * (rank + 1))
        error.update(picked=torch.tensor(100 + 10 * step), target=100)
    synced = [ratio.compute().item(), error.compute().item()]
    own = [ratio.sent_bytes.item(), error.count.item()]  # as they were before
    return [*synced, *own]


def test_metrics_are_of_all_ranks(ranks: Ranks) -> None:
    results = ranks.run(add_up, 2, gloo=True)
    for rank, (ratio, error, sent, count) in enumerate(results):
        assert ratio == pytest.approx(500 / 70)
        assert error == pytest.approx((0 + 0.1 + 0.2 + 0 + 0.1) / 5)
        assert (sent, count) == [(30, 3), (40, 2)][rank]


def draw(folder: Path) -> tuple[int, bool]:
    """Train in processes that Lightning forks, and draw here; how many points there are, and whether files are left."""
    monitor = ls.CompressionMonitor(plot=True)
    options: dict[str, Any] = {"max_steps": 9, "log_every_n_steps": 2, "default_root_dir": folder}
    run = trainer("micro_notebook", 2, callbacks=[monitor], **options)
    run.fit(small(), data(9, 2))
    count, letter = len(monitor.plot(folder / "own.svg").axes[2].lines[0].get_xdata()), monitor._letter
    assert letter.exists()
    del run, monitor
    gc.collect()
    return count, letter.exists()


def test_a_picture_can_be_drawn_where_the_children_trained(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.apart(draw, tmp_path / "output", tmp_path) == (5, False)
    assert "9 steps on rank 0" in (tmp_path / "output").read_text()
    assert "<svg" in (tmp_path / "own.svg").read_text()
    assert (tmp_path / "compression.png").exists()

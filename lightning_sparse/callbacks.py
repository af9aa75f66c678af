"""Tells what compression does: log keys for any logger, and a table at the end of each epoch."""

from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_only, rank_zero_warn
from rich import box
from rich.console import Console
from rich.table import Column, Table

from lightning_sparse.exchange import Exchange, Report
from lightning_sparse.layer_fusion import LayerFusion
from lightning_sparse.metrics import compression_ratio, threshold_error
from lightning_sparse.plan import Plan
from lightning_sparse.plan_views import plan_table

STEPS_BEFORE_PLAN = 3  # that follow a plan before it is shown beside them
HEADINGS = ("sent", "dense", "ratio", "density", "threshold\nerror", "unsent\nnorm", "compress", "wait")


@dataclass
class _Epoch:
    """Sums over the steps of an epoch on this rank."""

    number: int
    steps: int = 0
    sent_bytes: int = 0
    dense_bytes: int = 0
    ms_compress: float = 0.0
    ms_wait: float = 0.0

    def add(self, report: Report) -> None:
        self.steps += 1
        self.sent_bytes += report.sent_bytes
        self.dense_bytes += report.dense_bytes
        self.ms_compress += report.ms_compress
        self.ms_wait += report.ms_wait


class CompressionMonitor(Callback):
    """Logs what compression did, and prints a table at the end of each epoch; LayerFusion's plan once it is followed.

    Every ``log_every_n_steps`` steps and at an epoch's end, to every logger and to ``trainer.callback_metrics``, of
    the last step on rank 0:

    - ``sparse/sent_bytes``: payload this rank put on the wire, padding, indices and counts included
    - ``sparse/compression_ratio``: bytes a float32 ring all-reduce sends / sent bytes
    - ``sparse/density``: distinct elements updated / n
    - ``sparse/threshold_error``: |picked - k| / k
    - ``sparse/mask_bytes``: of the bytes sent, those that only said which elements travel (importance)
    - ``sparse/overflow``: elements this rank meant to send but kept, for want of room in a message
    - ``sparse/unsent_norm``: Euclidean norm of what this rank keeps for later steps
    - ``sparse/ms_compress``: milliseconds in the compressor's own code
    - ``sparse/ms_wait``: milliseconds training waited after its last gradient was handed over

    Args:
        table: print the table at the end of each epoch, and LayerFusion's plan beside what was measured.
        per_group: log ``sparse/density/i``, ``sparse/threshold_error/i`` and ``sparse/overflow/i`` too, for each group
            i in the order in which groups are sent.
    """

    def __init__(self, table: bool = True, per_group: bool = False) -> None:
        self.table = table
        self.per_group = per_group
        self._epochs: list[_Epoch] = []
        self._seen_steps = 0
        self._plan: Plan | None = None
        self._plan_steps = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start counting."""
        del pl_module
        self._epochs = []
        self._seen_steps = 0
        if _exchange(trainer) is None:
            rank_zero_warn(
                f"CompressionMonitor has nothing to report: {type(trainer.strategy).__name__} is not a strategy of "
                "lightning_sparse. Give the Trainer strategy='skip_reduce', say."
            )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start a row of the table."""
        del pl_module
        self._epochs.append(_Epoch(trainer.current_epoch))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        """Count the step, and log it if it is one to log."""
        del pl_module, args, kwargs
        exchange = _exchange(trainer)
        if exchange is None or exchange.last is None or exchange.steps == self._seen_steps:
            return  # no step was taken: gradients are being accumulated
        self._seen_steps = exchange.steps
        self._epochs[-1].add(exchange.last)
        if _is_logging_step(trainer):
            self._log(trainer, exchange)
        if self.table:
            self._print_plan(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log the epoch's last step and print the table."""
        del pl_module
        exchange = _exchange(trainer)
        if exchange is None or exchange.last is None:
            return
        if not _is_logging_step(trainer):
            self._log(trainer, exchange)
        if self.table:
            self._print(trainer)

    def _log(self, trainer: Trainer, exchange: Exchange) -> None:
        metrics = measure(exchange)
        if self.per_group:
            metrics |= measure_groups(exchange)
        trainer.callback_metrics.update({key: torch.tensor(value) for key, value in metrics.items()})
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=trainer.global_step)

    def _print_plan(self, trainer: Trainer) -> None:
        """Once for each plan, when a few steps have followed it."""
        fusion: LayerFusion | None = getattr(trainer.strategy, "layer_fusion", None)
        if fusion is None:
            return
        plan = fusion.plan
        if plan is not self._plan:
            self._plan, self._plan_steps = plan, 0
        self._plan_steps += 1
        if plan is not None and self._plan_steps == STEPS_BEFORE_PLAN:
            Console().print(plan_table(plan, fusion.measured()))

    @rank_zero_only
    def _print(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        epoch = self._epochs[-1]
        steps = max(epoch.steps, 1)
        table = Table(
            *(Column(heading, justify="right") for heading in HEADINGS),
            title=f"compression, epoch {epoch.number}: means of {epoch.steps} steps on rank 0",
            box=box.SIMPLE_HEAD,
        )
        table.add_row(
            human_bytes(epoch.sent_bytes / steps),
            human_bytes(epoch.dense_bytes / steps),
            f"{float(compression_ratio(epoch.dense_bytes, epoch.sent_bytes)):.2f}",
            f"{float(metrics['sparse/density']):.2%}",
            f"{float(metrics['sparse/threshold_error']):.2%}",
            f"{float(metrics['sparse/unsent_norm']):.3g}",
            f"{epoch.ms_compress / steps:.1f} ms",
            f"{epoch.ms_wait / steps:.1f} ms",
        )
        Console().print(table)


def measure(exchange: Exchange) -> dict[str, float]:
    """The log keys of the last step; reads tensors, so it waits for the device."""
    report = exchange.last
    assert report is not None
    return {
        "sparse/sent_bytes": float(report.sent_bytes),
        "sparse/compression_ratio": float(compression_ratio(report.dense_bytes, report.sent_bytes)),
        "sparse/density": float(report.picked) / max(report.elements, 1),
        "sparse/threshold_error": float(threshold_error(report.picked, report.target)),
        "sparse/mask_bytes": float(report.mask_bytes),
        "sparse/overflow": float(report.overflow),
        "sparse/unsent_norm": exchange.unsent_norm(),
        "sparse/ms_compress": report.ms_compress,
        "sparse/ms_wait": report.ms_wait,
    }


def measure_groups(exchange: Exchange) -> dict[str, float]:
    """The log keys of each group in the last step; reads tensors, so it waits for the device."""
    metrics = {}
    for group in exchange.groups:
        metrics[f"sparse/density/{group.index}"] = float(group.picked) / max(group.n, 1)
        metrics[f"sparse/threshold_error/{group.index}"] = float(threshold_error(group.picked, group.target))
        metrics[f"sparse/overflow/{group.index}"] = float(group.overflow)
    return metrics


def human_bytes(count: float) -> str:
    """``count`` bytes in the unit one reads best, powers of 1,000: "1.50 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def _is_logging_step(trainer: Trainer) -> bool:
    every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
    return every > 0 and trainer.global_step % every == 0


def _exchange(trainer: Trainer) -> Exchange | None:
    return getattr(trainer.strategy, "exchange", None)

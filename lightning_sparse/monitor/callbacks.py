"""Callbacks: one that reports what compression does, in logs, tables and a picture, and one that compares replicas."""

import math
import os
import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from rich import get_console
from torch import Tensor

from lightning_sparse.checks import is_whole
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.fusion.layer_fusion import LayerFusion
from lightning_sparse.fusion.model import Plan
from lightning_sparse.monitor.pictures import draw, require_matplotlib
from lightning_sparse.monitor.record import (
    Notes,
    Point,
    Selected,
    Sums,
    advice,
    measure,
    measure_parts,
    with_earlier_names,
)
from lightning_sparse.monitor.tables import epoch_table, percent, plan_table, starvation, summary
from lightning_sparse.network.agreement import ranks_having
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.cut import shard_of
from lightning_sparse.network.torch_comm import world

if TYPE_CHECKING:
    from matplotlib.figure import Figure  # an extra, and slow to import

STEPS_OF_TABLE = 5  # of which a table of an epoch shows means, at least; shorter epochs have one together
STEPS_BEFORE_PLAN = 3  # steps that follow a plan before it is shown beside one of them
PICTURE = "compression.png"


class CompressionMonitor(Callback):
    """Logs what compression did, and sums it up: a table each epoch, one at the end of the training, a picture.

    Every ``log_every_n_steps`` steps and at an epoch's end, to every logger and to ``trainer.callback_metrics``, of
    the last step on rank 0.  Every rank gets these values, so that a scheduler or EarlyStopping does the same on each:

    - ``sparse/sent_bytes``: payload this rank put on the wire, padding, indices and counts included; not what ranks of
      the same member send each other
    - ``sparse/member_bytes``: likewise, of all ranks of its member, where there are several
    - ``sparse/compression_ratio``: bytes a float32 ring all-reduce sends / sent bytes
    - ``sparse/density``: distinct elements updated / n
    - ``sparse/threshold_error``: |updated - k| / k, where k elements were meant to be updated
    - ``sparse/mask_bytes``: of the bytes sent, those that only said which elements travel (importance)
    - ``sparse/overflow``: elements this rank meant to send but kept, for want of room in a message
    - ``sparse/residual_norm``: Euclidean norm of the residual, what this rank has not sent (as the two before, and
      density, threshold_error and staleness: of all ranks of its member)
    - ``sparse/ms_compress``: milliseconds in the compressor's own code (on CUDA the host's)
    - ``sparse/ms_wait``: milliseconds training waited after its last gradient was handed over
    - ``sparse/oldest_steps``: steps that the oldest unsent gradient has waited in this fit; 0 where nothing is unsent
    - ``sparse/residual_over_gradient``: norm of the residual of a parameter over the norm of this rank's gradient, a
      mean over about 100 steps, in the parameter where that is largest; inf where that gradient is zero

    - ``sparse/delivered``: the part of what was unsent on all ranks that the step delivered, as a squared norm
    - ``sparse/staleness``: how many steps late a gradient of this rank arrives on average, by Little's law

    ``residual_norm``, ``residual_over_gradient`` and ``staleness`` are logged by their earlier names too,
    ``unsent_norm``, ``unsent_over_gradient`` and ``age``, for a release.  The progress bar says how much of dense DDP's
    bytes was sent: ``sent 1.3 %``.  Tensors are read, and the device is waited for, in logged steps only.
    ``oldest_steps``, ``residual_over_gradient``, ``delivered`` and ``staleness`` come from a sample of up to 64
    elements of each parameter; where some wait too long, the table and the summary say so, and what helps.

    Args:
        table: print a table at the end of each epoch; epochs of fewer than 5 steps have one together.
        per_group: log ``sparse/density/i``, ``sparse/threshold_error/i`` and ``sparse/overflow/i`` too, for each group
            i in the order in which groups are sent, and the two before with ``/name`` for each parameter; with
            ``table`` print LayerFusion's plan beside what was measured.
        summary: print at the end of the training what to do, what was saved, and whether the network was slow.
        plot: save what :meth:`plot` draws as compression.png beside the logs at the end of the training.

    Raises:
        ModuleNotFoundError: ``plot`` needs matplotlib, which is not installed.
    """

    def __init__(self, table: bool = True, per_group: bool = False, summary: bool = True, plot: bool = False) -> None:
        if plot:
            require_matplotlib()  # now, not when the training has ended
        self.table = table
        self.per_group = per_group
        self.summary = summary
        self._save_picture = plot
        # With _notebook, _fork and _spawn a training runs in child processes: rank 0 leaves its notes in this file.
        self._pid = os.getpid()
        self._letter = Path(tempfile.gettempdir(), f"lightning_sparse-{uuid.uuid4().hex}.json")
        weakref.finalize(self, self._letter.unlink, missing_ok=True)
        self._rank = 0
        self._start()

    def _start(self) -> None:
        self._notes = Notes()
        self._epoch, self._first_epoch = Sums(), 0  # since a table was printed
        self._last: dict[str, float] = {}  # values logged last
        self._exchanged = 0  # the averager's count of steps after the last backward
        self._logged = 0  # the same when a step was last logged
        self._plan: Plan | None = None
        self._plan_shown = False
        self._began_s = time.perf_counter()

        # - the batch
        self._steps = 0  # taken in it
        self._step = 0  # its number, in Lightning's counting
        self._step_s = 0.0  # since the last step
        self._loss: object = None  # not read before it is logged
        self._batch_ended_s: float | None = None  # end of the batch before; None if something else came between

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start()
        averager = _averager(trainer)
        if averager is None:
            rank_zero_warn(
                f"lightning_sparse: CompressionMonitor has nothing to report: {type(trainer.strategy).__name__} is not "
                "a strategy of lightning_sparse. Give the Trainer strategy='sparse_auto', say."
            )
            return
        self._rank = trainer.global_rank
        self._exchanged = self._logged = averager.steps
        self._notes.cuda = averager.device.type == "cuda"
        is_sharded = hasattr(trainer.strategy, "sharded")
        self._notes.dense = "dense HSDP" if is_sharded else "dense DDP"
        self._notes.members = "replicas" if is_sharded else "machines" if averager.cut.count > 1 else "ranks"
        self._notes.advice = advice(trainer.strategy.options)  # type: ignore[attr-defined]
        averager.watch_unsent()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._epoch.steps >= STEPS_OF_TABLE or not self._epoch.steps:  # else a table is of several epochs
            self._epoch, self._first_epoch = Sums(), trainer.current_epoch
        self._batch_ended_s = None

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave validation out of the time of steps."""
        self._batch_ended_s = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if self._batch_ended_s is None:
            self._batch_ended_s = time.perf_counter()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the step, if this backward was one: there may be several in a batch, or none."""
        averager = _averager(trainer)
        if averager is None or averager.last is None or averager.steps == self._exchanged:
            return
        self._exchanged = averager.steps
        self._steps += 1
        self._epoch.add(averager.last)
        self._notes.sums.add(averager.last)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, *args: Any, **kwargs: Any
    ) -> None:
        """Note the time, and log the step if it is one to log."""
        averager = _averager(trainer)
        if averager is None:
            return
        now_s = time.perf_counter()
        batch_s = now_s - (self._batch_ended_s or now_s)
        self._batch_ended_s = now_s
        self._step_s += batch_s
        self._notes.sums.ms_step += 1e3 * batch_s
        if not self._steps:
            return  # gradients are being accumulated
        self._follow_plan(_fusion(trainer))
        self._steps, self._step_s = 0, 0.0
        self._loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._step = trainer.fit_loop.epoch_loop._batches_that_stepped  # as Lightning counts what it logs itself
        every: int = trainer.log_every_n_steps  # type: ignore[attr-defined]  # set by a connector
        if every > 0 and (self._step + 1) % every == 0:
            self._log(trainer, pl_module, averager)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        averager = _averager(trainer)
        if averager is None or not self._epoch.steps:
            return
        if self._exchanged != self._logged:
            self._log(trainer, pl_module, averager)
        if self.table and trainer.is_global_zero and self._epoch.steps >= STEPS_OF_TABLE:
            epochs = range(self._first_epoch, trainer.current_epoch + 1)
            get_console().print(epoch_table(epochs, self._notes, self._epoch, self._last))
            if starving := starvation(self._notes):
                get_console().print(starving)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        notes = self._notes
        save = self._save_picture and not trainer.fast_dev_run  # type: ignore[attr-defined]  # set by a connector
        folder = (trainer.log_dir or trainer.default_root_dir) if save else ""  # asks every rank
        if not notes.points or not trainer.is_global_zero:
            return
        chooser = getattr(getattr(trainer.strategy, "hook", None), "chooser", None)
        notes.is_undecided = chooser is not None and chooser.chosen is None
        if self.summary:
            get_console().print(summary(notes))
        try:
            if os.getpid() != self._pid:
                self._letter.write_text(notes.to_json())
            if save:
                _save(notes, folder)
        except OSError as error:  # no reason for a training to fail
            rank_zero_warn(f"lightning_sparse: CompressionMonitor could not save what it noted: {error}")

    def plot(self, path: str | Path | None = None) -> "Figure":
        """Draw the last training: its loss, what it sent beside dense DDP, what it kept, its groups, and a step.

        A panel that would say nothing of this strategy is left out.

        Where the training ran in child processes (``_notebook``, ``_fork``, ``_spawn``) it is rank 0's on this machine.

        Args:
            path: save it there, on rank 0; the ending says the kind: ``.svg``, ``.png``, ...

        Returns:
            The figure, which shows itself as the last expression of a notebook's cell.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
            ValueError: nothing was logged.
        """
        notes = self._notes
        if not notes.points:
            with suppress(FileNotFoundError):
                notes = Notes.from_json(self._letter.read_text())
        if not notes.points:
            raise ValueError(
                "CompressionMonitor has nothing to plot: no step was logged. Train first, with a strategy of "
                "lightning_sparse and this monitor among the Trainer's callbacks."
            )
        figure = draw(notes)
        if path is not None and self._rank == 0:
            figure.savefig(path, bbox_inches="tight")
        return figure

    def _follow_plan(self, fusion: LayerFusion | None) -> None:
        """Note how long steps took that followed a plan; not the one before which it was made."""
        plan, notes = fusion.plan if fusion else None, self._notes
        if plan is not self._plan:
            self._plan, self._plan_shown = plan, False
            notes.expected_step_s, notes.expected_span_s = (plan.step_s, plan.span_s) if plan else (None, None)
            notes.planned_s = []
        elif plan is not None:
            notes.note_planned(self._step_s / self._steps)

    def _log(self, trainer: Trainer, module: LightningModule, averager: Averager) -> None:
        assert averager.sample is not None
        self._logged = averager.steps
        self._notes.waiting = waiting = averager.sample.waiting()
        self._last = measure(averager, waiting)
        self._note(averager, trainer.accumulate_grad_batches)
        own = self._last | (measure_parts(averager, waiting) if self.per_group else {})
        metrics = trainer.strategy.broadcast(
            with_earlier_names(own)
        )  # rank 0's; every rank is here, for all take as many steps
        # Both switches: Lightning sends nothing more, nor warns that ranks may differ.  No logger: the values would be
        # logged once more in steps that send no gradient.
        module.log_dict(metrics, logger=False, batch_size=1, sync_dist=True, rank_zero_only=True)
        if trainer.progress_bar_callback is not None:
            shown = percent(1, metrics["sparse/compression_ratio"])
            trainer.progress_bar_metrics["sent"] = shown  # type: ignore[assignment]  # bars show text as it is
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}  # of local steps, one may send
        for logger in trainer.loggers:  # nothing; loggers warn of an infinite ratio
            logger.log_metrics(finite, step=self._step)
        fusion = _fusion(trainer)
        if self.table and self.per_group and fusion and fusion.plan and not self._plan_shown:
            self._plan_shown = len(self._notes.planned_s) >= STEPS_BEFORE_PLAN
            if self._plan_shown:
                get_console().print(plan_table(fusion.plan, fusion.measured()))

    def _note(self, averager: Averager, batches: int) -> None:
        """Keep what pictures show; the loss is of one of ``batches`` a step was accumulated from, divided by them."""
        notes, loss = self._notes, self._loss
        notes.note(
            Point(
                step=self._step,
                seconds=time.perf_counter() - self._began_s,
                sent_bytes=notes.sums.sent_bytes,
                loss=float(loss) * batches if isinstance(loss, torch.Tensor) and loss.numel() == 1 else math.nan,
                threshold_error=self._last["sparse/threshold_error"],
                unsent_norm=self._last["sparse/residual_norm"],
                ms_wait=self._last["sparse/ms_wait"],
            )
        )
        notes.note_groups([Selected.of(group) for group in averager.groups])
        times = averager.timeline.group_times(averager.groups)
        if len(times) == len(notes.groups) and all(math.isfinite(t.ready_s) and t.start_s >= 0 for t in times):
            notes.times = times  # known, and since the last backward began


def _averager(trainer: Trainer) -> Averager | None:
    return getattr(trainer.strategy, "averager", None)


def _fusion(trainer: Trainer) -> LayerFusion | None:
    return getattr(trainer.strategy, "layer_fusion", None)


def _save(notes: Notes, folder: str) -> None:
    files, path = get_filesystem(folder), os.path.join(folder, PICTURE)
    files.makedirs(folder, exist_ok=True)
    with files.open(path, "wb") as file:
        draw(notes).savefig(file, format="png", bbox_inches="tight")
    rank_zero_info(f"lightning_sparse: a picture of the training is in {path}")


class ReplicaCheck(Callback):
    """Ends the training if the ranks' parameters are not the same, bit for bit, and names the first that differs.

    With local steps it compares the average that the ranks share; hosts of an elastic training are not compared.

    A check reads every parameter once and sends 8 bytes for each.

    Args:
        every_n_steps: optimizer steps from one check to the next.

    Raises:
        ValueError: ``every_n_steps`` is not an integer, or is below 1.
    """

    def __init__(self, every_n_steps: int = 100) -> None:
        if not is_whole(every_n_steps, least=1):
            raise ValueError(
                f"every_n_steps must be an integer of at least 1, in optimizer steps; got {every_n_steps!r}."
            )
        self.every_n_steps = every_n_steps
        self._checked = 0  # the step after which the replicas were last compared

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count from this training's first step, which is above 0 where it is resumed."""
        self._checked = trainer.global_step
        options = getattr(trainer.strategy, "options", None)
        if options is not None and options.hosts is not None:
            rank_zero_warn(
                "lightning_sparse: ReplicaCheck compares the ranks of one training, so it compares no hosts. Leave it "
                "out."
            )

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        if trainer.global_step - self._checked >= self.every_n_steps:
            self._check(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._check(trainer, pl_module)

    def _check(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._checked = trainer.global_step
        if trainer.world_size > 1:
            averager = getattr(trainer.strategy, "averager", None)
            local = averager.local if averager is not None else None
            shared = local.compared() if local is not None else {}
            sharded = getattr(trainer.strategy, "sharded", None)  # a model of which ranks have shards
            named = sharded.sharded.items() if sharded else pl_module.named_parameters()
            own = {name: shard_of(shared.get(p, p)) for name, p in named if sharded or not hasattr(p, "to_local")}
            check_replicas(own, world(), sharded.shard_size if sharded else 1)


def check_replicas(parameters: Mapping[str, Tensor], comm: Comm, shards: int = 1) -> None:
    """Raise unless all ranks hold the same, or of so many ``shards`` those that have one; to be called on every rank.

    Between two steps.

    Raises:
        RuntimeError: on every rank, with the first parameter that differs and the ranks it differs on.
    """
    if not parameters:
        return
    sums = comm.all_gather(torch.stack([checksum(p) for p in parameters.values()])).wait()  # [P, parameters]
    differs = (sums.unflatten(0, (-1, shards)) != sums[:shards]).any(0).any(0)
    if not bool(differs.any()):
        return
    first = int(differs.nonzero()[0])
    parties = " and ".join(ranks_having(sums[:, first].tolist()).values())
    raise RuntimeError(
        f"The replicas have drifted apart: {list(parameters)[first]}, the first of {int(differs.sum())} parameters, is "
        f"not the same on {parties}. Averaged gradients are the same on every rank, so something else changes it on "
        "some: an optimizer step not all of them take, a random number, or code that asks for its rank."
    )

"""Callbacks of a training on a rank: measure it, set its learning rates, and judge it by its loss on held-out data."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_sparse.bench.compare.ranks import read_sent
from lightning_sparse.bench.compare.records import MeasuredStep
from lightning_sparse.bench.compare.strategies import Peer
from lightning_sparse.engine.bucket import Report
from lightning_sparse.trainer.strategy import SparseDDPStrategy


class Probe(Callback):
    """Takes the time and the kernel's counters at every step.

    A step lasts from the end of the one before to its own end.  On CUDA the times within a step are the host's.
    The traffic of ``interface`` is counted, unless it is None; ``learns`` says whether the loss means anything.
    """

    def __init__(self, interface: str | None, learns: bool) -> None:
        self.steps: list[MeasuredStep] = []
        self._interface, self._learns = interface, learns
        self._ready_s: list[float] = []  # when each gradient of this step was ready
        self._backward_s = 0.0  # when backward ended
        self._end_s = 0.0  # when the last step ended
        self._waited_s = 0.0  # for an exchange beside which the next step would have computed
        self._wire: tuple[int, int] | None = None  # bytes and packets the kernel had counted then

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del trainer
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: self._ready_s.append(time.perf_counter()))
        self._wire = self._read()
        self._end_s = time.perf_counter()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time; on the CPU every message of the step has arrived."""
        del trainer, pl_module
        self._backward_s = time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        del pl_module, args
        known = isinstance(outputs, Mapping) and "loss" in outputs  # not with manual optimisation
        loss = float(outputs["loss"]) if known else math.nan  # waits for the device
        if isinstance(trainer.strategy, SparseDDPStrategy):
            local, averager = trainer.strategy.options.local, trainer.strategy.averager
            if averager and local and not local.overlap:
                averager.settle()  # now and not before the next forward: it belongs to this step
        end_s = time.perf_counter()
        wire = self._read()
        report, counted_bytes, local_steps = _reported(trainer.strategy)
        self.steps.append(
            MeasuredStep(
                s=max(end_s - self._end_s, self._waited_s),
                loss=loss if self._learns else None,
                counted_bytes=counted_bytes,
                wire_bytes=wire[0] - self._wire[0] if wire and self._wire else None,
                wire_packets=wire[1] - self._wire[1] if wire and self._wire else None,
                ms_compress=report.ms_compress if report else None,
                ms_network=report.ms_network if report else None,
                ms_span=1e3 * (self._backward_s - self._ready_s[0]),
                ms_wait=report.ms_wait if report and local_steps else 1e3 * (self._backward_s - self._ready_s[-1]),
                ms_apply=1e3 * (end_s - self._backward_s),
            )
        )
        self._ready_s.clear()
        self._waited_s, self._end_s, self._wire = 0.0, end_s, wire

    def skip(self, waited_s: float = 0.0) -> None:
        """Leave out of the next step what has passed since the end of the last.

        ``waited_s``: of it for an exchange beside which the next step would have computed, and takes as long at least.
        """
        self._waited_s, self._end_s, self._wire = waited_s, time.perf_counter(), self._read()

    def _read(self) -> tuple[int, int] | None:
        return read_sent(self._interface) if self._interface else None


def _reported(strategy: Strategy) -> tuple[Report | None, int, bool]:
    """A strategy's report of the last step, if it makes one, the bytes it counted, and whether it was a local step."""
    if isinstance(strategy, SparseDDPStrategy):
        assert strategy.averager is not None
        report = strategy.averager.last  # of local steps beside which the next one computes: of the step before
        return report, report.sent_bytes if report else 0, strategy.averager.local is not None
    assert isinstance(strategy, Peer)
    return None, strategy.sent_bytes(), False


SOONEST = 0.1  # of the time trained so far: until the next evaluation
LEAST = 5  # Steps until then, so that what measures steps finds some that follow none.


class LearningRate(Callback):
    """Sets the learning rates of every optimizer: at most ``rate``, or the optimizers' own where it is None.

    ``schedule`` says for a step and the number of steps, -1 where it is not known, what part of it; None: all of it.
    """

    def __init__(self, rate: float | None, schedule: Callable[[int, int], float] | None = None) -> None:
        self._rate, self._schedule = rate, schedule

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        del pl_module
        groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
        for group in groups:
            group["lr"] = self._rate or group["lr"]
        self._largest = [(group, group["lr"]) for group in groups]

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        del args
        if self._schedule is not None:
            for group, largest in self._largest:
                group["lr"] = largest * self._schedule(trainer.global_step, trainer.max_steps)


class Judge(Callback):
    """Notes the held-out loss of a training, again and again, and ends it.  To be called after its :class:`Probe`.

    Evaluations follow steps 1, 6, 11, ... and then come whenever a tenth of the time trained so far has passed again.
    Each rank evaluates a part of the data with the model it has: all ranks the same one, the average with local steps,
    or with no communication its own.  A strategy that does not send in every step is judged after steps in which it
    did, when its ranks share a model.  The ranks agree on every decision, since they make it from the same numbers.

    The clock of the probe stands still meanwhile, but for an exchange of local steps that is under way: the next step
    takes as long as that at least, beside which it would have computed.

    A training ends after ``least`` steps at the earliest: at the ``lowest`` loss, where the loss is not finite, and
    after so many ``seconds``, if not with the trainer's last step.  After each evaluation but the last it takes the
    next of ``others``, who train meanwhile.
    """

    def __init__(
        self,
        probe: Probe,
        data: Tensor,
        lowest: float,
        seconds: float | None,
        least: int,
        others: Iterator[object] | None = None,
    ) -> None:
        self._probe, self._data, self._lowest, self._least = probe, data, lowest, least
        self._seconds, self._others = seconds, others
        self._next = 1  # step
        self._last = (0, 0.0)  # step of the last evaluation, and the seconds trained then
        self._sends = False  # has sent anything yet

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        del args
        steps = self._probe.steps
        last_one = len(steps) == trainer.max_steps
        sent = steps[-1].counted_bytes > 0
        self._sends = self._sends or sent
        if not last_one and (len(steps) < self._next or (self._sends and not sent)):
            return
        waited_s = self._end_exchange(trainer)
        loss, seconds = self._evaluate(trainer, pl_module)
        steps[-1] = replace(steps[-1], held_out=loss)
        over = self._seconds is not None and seconds >= self._seconds
        if (over or not self._lowest < loss < math.inf) and len(steps) >= self._least:
            trainer.should_stop = True
        before, seconds_before = self._last
        left_s = SOONEST * seconds if self._seconds is None else min(SOONEST * seconds, self._seconds - seconds)
        steps_per_s = (len(steps) - before) / max(seconds - seconds_before, 1e-9)
        self._next, self._last = len(steps) + max(LEAST, round(left_s * steps_per_s)), (len(steps), seconds)
        if self._others and not trainer.should_stop:
            next(self._others)
        self._probe.skip(waited_s)

    def _end_exchange(self, trainer: Trainer) -> float:
        """Wait for the exchange of local steps that is under way, if there is one; returns the seconds."""
        start_s, strategy = time.perf_counter(), trainer.strategy
        if isinstance(strategy, SparseDDPStrategy) and strategy.averager is not None:
            strategy.averager.settle()
        return time.perf_counter() - start_s

    @torch.no_grad()
    def _evaluate(self, trainer: Trainer, module: LightningModule) -> tuple[float, float]:
        """Return the loss on all data, and the seconds trained so far, the mean over the ranks."""
        strategy = trainer.strategy
        if isinstance(strategy, SparseDDPStrategy) and strategy.hook is not None:
            strategy.hook.show_average()
        own = self._data[trainer.global_rank :: trainer.world_size].to(strategy.root_device)
        module.eval()
        with trainer.precision_plugin.val_step_context():
            loss = module.training_step([own])
        module.train()
        assert isinstance(loss, Tensor)
        seconds = sum(step.s for step in self._probe.steps)
        known = torch.tensor([float(loss) * len(own), len(own), seconds], dtype=torch.float64)
        losses, windows, seconds = strategy.all_gather(known.to(strategy.root_device)).view(-1, 3).mean(0).tolist()
        return losses / windows, seconds

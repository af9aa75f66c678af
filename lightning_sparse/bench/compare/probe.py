"""Measures a training on one rank: times, losses, and the kernel's counters."""

import math
import time
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_sparse.bench.compare.peers import Peer
from lightning_sparse.bench.compare.place import read_sent
from lightning_sparse.bench.compare.records import MeasuredStep
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
            local, exchange = trainer.strategy.options.local, trainer.strategy.exchange
            if exchange and local and not local.overlap:
                exchange.settle()  # now and not before the next forward: it belongs to this step
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
        assert strategy.exchange is not None
        report = strategy.exchange.last  # of local steps beside which the next one computes: of the step before
        return report, report.sent_bytes if report else 0, strategy.exchange.local is not None
    assert isinstance(strategy, Peer)
    return None, strategy.sent_bytes(), False

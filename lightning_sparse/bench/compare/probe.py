"""Measures a training on one rank: times, losses, and the kernel's counters."""

import fcntl
import math
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_sparse.bench.compare.peers import Peer
from lightning_sparse.engine.local_exchange import LocalExchange
from lightning_sparse.engine.step import Report
from lightning_sparse.strategy import SparseDDPStrategy

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface


@dataclass(frozen=True)
class MeasuredStep:
    """One training step of one rank, or the mean over the ranks."""

    s: float  # seconds since the end of the step before
    loss: float | None  # of the batch; None where it means nothing
    counted_bytes: float  # payload handed to the network, as the strategy counts it
    wire_bytes: (
        float | None
    )  # what the kernel counted as sent by the host's interface; None for ranks that did not read it
    wire_packets: float | None  # packets it counted with them; None likewise
    ms_compress: float | None  # in the compressor's own code; None for strategies that do not report it
    ms_network: float | None  # that the issuing threads waited for messages; None likewise
    ms_span: float  # from the first gradient ready to the end of backward
    ms_wait: float  # from the last gradient ready to the end of backward
    ms_apply: float  # from the end of backward to the end of the step
    held_out: float | None = None  # loss after it on data that nobody trains on; None where it was not asked for


@dataclass(frozen=True)
class MeasuredRun:
    """One training run, as one rank saw it, or the mean over the ranks."""

    device: str  # what a rank ran on
    threads: int  # torch's, of a rank
    elements: int  # of the gradient
    peak_memory_bytes: int  # of a rank; over several ranks, the largest
    steps: list[MeasuredStep]  # all, the untimed ones at the start included
    predicted_s: float | None = None  # of a step, by LayerFusion; None where it has no plan
    advices: list[dict[str, Any]] = field(default_factory=list)  # rank 0's, on every strategy: for `advise`

    @staticmethod
    def mean(runs: Sequence["MeasuredRun"]) -> "MeasuredRun":
        """Average the same run over several ranks."""
        names = [each.name for each in fields(MeasuredStep)]
        steps = [
            MeasuredStep(**{name: of_known(fmean, (getattr(step, name) for step in same)) for name in names})  # type: ignore[arg-type]
            for same in zip(*(run.steps for run in runs), strict=True)
        ]
        peak = max(run.peak_memory_bytes for run in runs)
        predicted_s = of_known(fmean, (run.predicted_s for run in runs))
        return replace(runs[0], peak_memory_bytes=peak, steps=steps, predicted_s=predicted_s)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "MeasuredRun":
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**values, "steps": [MeasuredStep(**step) for step in values["steps"]]})


def of_known(statistic: Callable[[list[float]], float], values: Iterable[float | None]) -> float | None:
    """The mean, say, of those values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return statistic(known) if known else None


class Probe(Callback):
    """Takes the time and the kernel's counters at every step.

    A step lasts from the end of the one before to its own end.  On CUDA the times within a step are the host's.
    """

    def __init__(self, interface: str | None, learns: bool) -> None:
        self.steps: list[MeasuredStep] = []
        self._interface = interface  # whose traffic is counted; None: another rank of this host does it
        self._learns = learns  # whether the loss means anything
        self._ready_s: list[float] = []  # when each gradient of this step was ready
        self._backward_s = 0.0  # when backward ended
        self._end_s = 0.0  # when the last step ended
        self._wire: tuple[int, int] | None = None  # bytes and packets the kernel had counted then

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch for gradients."""
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
        """Add the step."""
        del pl_module, args
        known = isinstance(outputs, Mapping) and "loss" in outputs  # not with manual optimisation
        loss = float(outputs["loss"]) if known else math.nan  # waits for the device
        exchange = trainer.strategy.exchange if isinstance(trainer.strategy, SparseDDPStrategy) else None
        if isinstance(exchange, LocalExchange) and not exchange.settings.overlaps:
            exchange.settle()  # now and not before the next forward: it belongs to this step
        end_s = time.perf_counter()
        wire = self._read()
        report, counted_bytes = _reported(trainer.strategy)
        self.steps.append(
            MeasuredStep(
                s=end_s - self._end_s,
                loss=loss if self._learns else None,
                counted_bytes=counted_bytes,
                wire_bytes=wire[0] - self._wire[0] if wire and self._wire else None,
                wire_packets=wire[1] - self._wire[1] if wire and self._wire else None,
                ms_compress=report.ms_compress if report else None,
                ms_network=report.ms_network if report else None,
                ms_span=1e3 * (self._backward_s - self._ready_s[0]),
                ms_wait=1e3 * (self._backward_s - self._ready_s[-1]),
                ms_apply=1e3 * (end_s - self._backward_s),
            )
        )
        self._ready_s.clear()
        self._end_s, self._wire = end_s, wire

    def skip(self) -> None:
        """Leave out of the next step what has passed since the end of the last."""
        self._end_s, self._wire = time.perf_counter(), self._read()

    def _read(self) -> tuple[int, int] | None:
        return read_sent(self._interface) if self._interface else None


def _reported(strategy: Strategy) -> tuple[Report | None, int]:
    """A strategy's report of the last step, if it makes one, and the bytes it counted."""
    if isinstance(strategy, SparseDDPStrategy):
        assert strategy.exchange is not None
        report = strategy.exchange.last  # of local steps beside which the next one computes: of the step before
        return report, report.sent_bytes if report else 0
    assert isinstance(strategy, Peer)
    return None, strategy.sent_bytes()


def read_sent(interface: str) -> tuple[int, int]:
    """Read how many bytes and packets the kernel has counted as sent by one of this host's interfaces.

    Raises:
        ValueError: there is no such interface.
    """
    lines = [line.partition(":") for line in Path("/proc/net/dev").read_text().splitlines()[2:]]
    counts = {name.strip(): numbers.split() for name, _, numbers in lines}
    if interface not in counts:
        raise ValueError(f"an interface must be one of this host's, {', '.join(counts)}; got {interface!r}")
    return int(counts[interface][8]), int(counts[interface][9])


def interface_towards(address: str) -> str:
    """Name of this host's interface on the way to ``address``, which may be its own.

    Raises:
        ValueError: none was found.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing; the kernel chooses a source address
        own = probe.getsockname()[0]
        for _, name in socket.if_nameindex():
            request = name.encode()[:15].ljust(256, b"\0")
            with suppress(OSError):  # it has no IPv4 address
                if socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]) == own:
                    return name
    raise ValueError(f"no interface with the address {own} was found on the way to {address}: give --interface.")

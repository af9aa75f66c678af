"""What is measured on a rank: times, losses, and the kernel's counters."""

import fcntl
import math
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy

from lightning_sparse.bench.cluster import Counters
from lightning_sparse.bench.peers import Peer
from lightning_sparse.report import Report
from lightning_sparse.strategy import SparseDDPStrategy

_SIOCGIFADDR = 0x8915  # of <linux/sockios.h>: the address of an interface


@dataclass(frozen=True)
class Step:
    """One training step of one rank, or the mean over the ranks.

    Attributes:
        s: seconds since the end of the step before.
        loss: of the batch; None where it means nothing.
        counted_bytes: payload handed to the network, as the strategy counts it.
        wire_bytes: what the kernel counted as sent by the host's interface; None for ranks that did not read it.
        wire_packets: packets it counted with them; None likewise.
        ms_compress: milliseconds in the compressor's own code; None for strategies that do not tell.
        ms_network: milliseconds the issuing threads waited for messages; None likewise.
        ms_span: milliseconds from the first gradient ready to the end of backward.
        ms_wait: milliseconds from the last gradient ready to the end of backward.
        ms_apply: milliseconds from the end of backward to the end of the step.
    """

    s: float
    loss: float | None
    counted_bytes: float
    wire_bytes: float | None
    wire_packets: float | None
    ms_compress: float | None
    ms_network: float | None
    ms_span: float
    ms_wait: float
    ms_apply: float


@dataclass(frozen=True)
class Run:
    """One training run, as one rank saw it, or the mean over the ranks.

    Attributes:
        device: what a rank ran on.
        threads: torch's, of a rank.
        elements: of the gradient.
        peak_memory_bytes: of a rank; over several ranks, the largest.
        steps: all steps, the untimed ones at the start included.
        predicted_s: of a step, by LayerFusion; None where it has no plan.
        advices: of rank 0, what to expect of each strategy; for ``lightning-sparse advise``.
    """

    device: str
    threads: int
    elements: int
    peak_memory_bytes: int
    steps: list[Step]
    predicted_s: float | None = None
    advices: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def mean(cls, runs: Sequence["Run"]) -> "Run":
        """The same run over several ranks."""
        steps = [
            Step(**{f.name: mean(getattr(step, f.name) for step in same) for f in fields(Step)})  # type: ignore[arg-type]
            for same in zip(*(run.steps for run in runs), strict=True)
        ]
        first = runs[0]
        peak = max(run.peak_memory_bytes for run in runs)
        predicted_s = mean(run.predicted_s for run in runs)
        return cls(first.device, first.threads, first.elements, peak, steps, predicted_s, first.advices)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "Run":
        """The inverse of ``dataclasses.asdict``."""
        return cls(**{**values, "steps": [Step(**step) for step in values["steps"]]})


def mean(values: Iterable[float | None]) -> float | None:
    """The mean of those that are known; None if none is."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


class Probe(Callback):
    """Takes the time and the kernel's counters at every step.

    A step lasts from the end of the one before to its own end.  On CUDA the times within a step are the host's.

    Args:
        interface: whose traffic is counted; None for ranks that leave it to another rank of their host.
        learns: whether the loss means anything.
    """

    def __init__(self, interface: str | None, learns: bool) -> None:
        self.steps: list[Step] = []
        self._interface = interface
        self._learns = learns
        self._ready_s: list[float] = []  # when each gradient of this step was ready
        self._backward_s = 0.0  # when backward ended
        self._end_s = 0.0  # when the last step ended
        self._counted: Counters | None = None  # what the kernel had counted, then

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch for gradients."""
        del trainer
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda _: self._ready_s.append(time.perf_counter()))
        self._counted = self._count()
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
        end_s = time.perf_counter()
        counted = self._count()
        sent = counted - self._counted if counted and self._counted else None
        report, counted_bytes = _told_by(trainer.strategy)
        self.steps.append(
            Step(
                s=end_s - self._end_s,
                loss=loss if self._learns else None,
                counted_bytes=counted_bytes,
                wire_bytes=sent.tx_bytes if sent else None,
                wire_packets=sent.tx_packets if sent else None,
                ms_compress=report.ms_compress if report else None,
                ms_network=report.ms_network if report else None,
                ms_span=1e3 * (self._backward_s - self._ready_s[0]),
                ms_wait=1e3 * (self._backward_s - self._ready_s[-1]),
                ms_apply=1e3 * (end_s - self._backward_s),
            )
        )
        self._ready_s.clear()
        self._end_s, self._counted = end_s, counted

    def _count(self) -> Counters | None:
        return read_counters(self._interface) if self._interface else None


def _told_by(strategy: Strategy) -> tuple[Report | None, int]:
    """What a strategy says of the last step, and the bytes it counted."""
    if isinstance(strategy, SparseDDPStrategy):
        assert strategy.exchange is not None
        assert strategy.exchange.last is not None
        return strategy.exchange.last, strategy.exchange.last.sent_bytes
    assert isinstance(strategy, Peer)
    return None, strategy.sent_bytes()


def read_counters(interface: str) -> Counters:
    """What the kernel has counted on one of this host's interfaces.

    Raises:
        ValueError: there is no such interface.
    """
    names = []
    for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
        name, _, numbers = line.partition(":")
        names.append(name.strip())
        if names[-1] == interface:
            values = [int(number) for number in numbers.split()]
            return Counters(rx_bytes=values[0], tx_bytes=values[8], rx_packets=values[1], tx_packets=values[9])
    raise ValueError(f"interface {interface!r} is not one of this host's: {', '.join(names)}.")


def interface_towards(address: str) -> str:
    """Name of this host's interface on the way to ``address``, which may be its own.

    Raises:
        ValueError: none was found.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # sends nothing; the kernel chooses a source address
        own = probe.getsockname()[0]
    for _, name in socket.if_nameindex():
        if own in _addresses(name):
            return name
    raise ValueError(f"no interface with the address {own} was found on the way to {address}: give --interface.")


def _addresses(interface: str) -> Sequence[str]:
    """The IPv4 address of an interface, if it has one."""
    request = interface.encode()[:15].ljust(256, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            return [socket.inet_ntoa(fcntl.ioctl(any_socket.fileno(), _SIOCGIFADDR, request)[20:24])]
        except OSError:
            return []

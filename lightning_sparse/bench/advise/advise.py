"""Measures what advice needs: a few steps of a user's model, between real ranks or alone with a link as given."""

import logging
import multiprocessing
import os
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from lightning_sparse.auto.chooser import ELEMENTS, tried
from lightning_sparse.auto.forecast import Forecaster
from lightning_sparse.auto.policy import CANDIDATES
from lightning_sparse.bench.advise.advice import Advice, advise_on, table, words
from lightning_sparse.bench.cluster.spec import ClusterSpec, parse
from lightning_sparse.bench.compare.peers import ADVISE
from lightning_sparse.bench.compare.run import BenchError, find_ranks
from lightning_sparse.bench.compare.worker import QUIET, Schedule
from lightning_sparse.bench.compare.workloads import workload_named
from lightning_sparse.compressors import Dense
from lightning_sparse.engine.gradient_record import GradientRecord
from lightning_sparse.fusion.costs import Link
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.fusion.steps import STEPS_MEASURED
from lightning_sparse.network.costs import Costs
from lightning_sparse.strategy import SparseDDPStrategy

STEPS = 8  # of a model that trains alone, of which the first half is not timed
BUSY = 1.5  # programs for each core, this one among them


@dataclass(frozen=True)
class AdviseArguments:
    """Arguments of ``lightning-sparse advise``, as its ``--help`` explains them."""

    model: str
    emulate: str
    link: str
    interface: str | None


def advise(arguments: AdviseArguments) -> int:
    """Measure and print; returns the exit status."""
    workload_named(arguments.model)
    if arguments.link:
        found, where = predict(arguments.model, arguments.link), f"{arguments.link}, predicted from one process"
    else:
        found, where = _measure(arguments)
    if found:
        console = Console()
        cluster = arguments.link or arguments.emulate
        if cluster and (differences := parse(cluster).differences()):
            console.print(differences, highlight=False, markup=False, soft_wrap=True)
        console.print(table(found, f"{arguments.model} on {where}"))
        console.print(found[0].sums, highlight=False, markup=False, soft_wrap=True)
        for line in words(found, busy()):
            console.print(line, highlight=False, markup=False, soft_wrap=not line.startswith("Use "))
    return 0


def _measure(arguments: AdviseArguments) -> tuple[list[Advice], str]:
    """Return advice from steps between ranks, and where they ran; no advice on ranks other than 0."""
    try:
        place, measure = find_ranks([arguments.emulate] if arguments.emulate else [], arguments.interface)
    except BenchError as error:
        raise BenchError(f"{error} To predict from one process, give --link 4x1gbit, say.") from None
    schedule = Schedule(arguments.emulate, arguments.model, ADVISE, 1, STEPS_MEASURED + 1, 1, "cpu")
    if place is not None:
        schedule = replace(schedule, cluster=f"{place.size} ranks", accelerator="auto")
    rounds = list(measure(schedule))
    if place is not None and place.rank:
        return [], ""
    last = rounds[-1] if rounds else None
    if last is None or last.run is None:
        raise BenchError(f"the steps to measure failed: {last.error if last else 'nothing was measured'}")
    if not last.run.advices:
        raise BenchError("nothing to advise: the model is too small to plan, or no rank could measure times.")
    return [Advice(**each) for each in last.run.advices], f"{schedule.cluster}, measured between ranks"


def predict(model: str, link: str) -> list[Advice]:
    """Return advice from steps of one process here, and messages that take what they would on ``link``.

    It trains in a process of its own, since a training leaves a process group and environment variables behind.
    """
    cluster = parse(link)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        return apart.submit(_in_one_process, model, cluster).result()


def _in_one_process(model: str, cluster: ClusterSpec) -> list[Advice]:
    workload = workload_named(model)
    module = workload.module()
    profile = _Profile()
    logging.disable(logging.WARNING)
    trainer = Trainer(devices=1, strategy=SparseDDPStrategy(Dense()), max_steps=STEPS, callbacks=[profile], **QUIET)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's, about workers and sizes: not what was asked
        trainer.fit(module, **workload.fit_arguments())
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    assert profile.record is not None
    gradients = profile.record.gradients()
    # One rank's gradients stand for all ranks': each has those of another step.
    of_ranks = torch.stack([gradients.roll(rank, 0) for rank in range(min(cluster.hosts, len(gradients)))])
    return advices(parameters, profile.measured(parameters), cluster, of_ranks, profile.record.weights())


def advices(
    parameters: Mapping[str, Tensor], measured: Measured, cluster: ClusterSpec, gradients: Tensor, weights: Tensor
) -> list[Advice]:
    """Advise on each candidate, where steps take what was measured and messages what they would on the cluster.

    Args:
        parameters: by name, in the order of definition.
        measured: of a rank that sent nothing.
        cluster: whose links.
        gradients: [P, T, m] on which candidates are tried.
        weights: [m], of the same parameters.
    """
    link = Link(cluster.hop_s, cluster.s_per_byte)
    forecaster = Forecaster(parameters, measured, link, cluster.hosts, at_work=None)
    with Progress(transient=True) as progress:
        candidates = progress.track(CANDIDATES, description="Trying candidates on the model's gradients")
        found = [tried(forecaster.forecast(candidate), gradients, weights) for candidate in candidates]
    sums = Costs(cluster.hosts, link.carries(link.latency_s)).ways()
    return advise_on(found, sums)


def busy() -> str:
    """Say that other programs keep this machine busy, if they do."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < BUSY * cores:
        return ""
    return (
        f"This machine is busy: {load:.1f} programs have been running on its {cores} cores in the last minute, so "
        "steps may be shorter than measured here. Ask again when nothing else runs."
    )


class _Profile(Callback):
    """Notes when gradients arrive, and how long a step and its backward take."""

    def __init__(self) -> None:
        self.record: GradientRecord | None = None
        self._arrivals: list[list[float]] = []  # of each step's gradients
        self._ends: list[float] = []  # of steps

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record gradients from now on."""
        del pl_module
        assert isinstance(trainer.strategy, SparseDDPStrategy)
        exchange = trainer.strategy.exchange
        assert exchange is not None
        exchange.record_gradients(ELEMENTS // STEPS)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the record."""
        del pl_module
        assert isinstance(trainer.strategy, SparseDDPStrategy)
        assert trainer.strategy.exchange is not None
        self.record = trainer.strategy.exchange.take_record()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the step."""
        del args
        strategy = trainer.strategy
        assert isinstance(strategy, SparseDDPStrategy)
        assert strategy.exchange is not None
        arrival_s = strategy.exchange.timeline.arrival_s
        self._arrivals.append([arrival_s(p) for p in pl_module.parameters() if p.requires_grad])
        self._ends.append(time.perf_counter())

    def measured(self, names: Iterable[str]) -> Measured:
        """The medians of the second half."""
        arrivals = self._arrivals[STEPS // 2 :]
        steps = [end - start for start, end in pairwise(self._ends[STEPS // 2 - 1 :])]
        spans = [max(each) for each in arrivals]
        rest_s = median(step - span for step, span in zip(steps, spans, strict=True))
        medians = [median(each) for each in zip(*arrivals, strict=True)]
        return Measured(medians[::-1], median(spans), max(rest_s, 0.0), [list(names)])

"""Runs what advice needs: a few training steps of a user's model, between real ranks or alone with a link as given."""

import logging
import multiprocessing
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from torch import Tensor

from lightning_sparse.bench.advice import Advice, advice, table, words
from lightning_sparse.bench.cluster import ClusterSpec, parse
from lightning_sparse.bench.peers import ADVISE
from lightning_sparse.bench.run import BenchError, emulate
from lightning_sparse.bench.worker import Place, Plan, run
from lightning_sparse.bench.workloads import workload_named
from lightning_sparse.compressors import COMPRESSORS, Dense
from lightning_sparse.fusion import pieces_of
from lightning_sparse.layer_fusion import STEPS_MEASURED
from lightning_sparse.planner import Calibration, Measured, best_plan, kinds_of
from lightning_sparse.rehearsal import Link, model_cost
from lightning_sparse.strategy import SparseDDPStrategy

STEPS = 8  # of a model that trains alone, of which the first half is not timed
HOP_S = 0.0002  # a message's way to the next rank, where the link is given and not measured


@dataclass(frozen=True)
class Asked:
    """What was asked for.

    Attributes:
        workload: a name in ``WORKLOADS``, ``package.module:Model`` or a LightningCLI config file.
        emulate: a cluster to build on this machine, such as "4x1gbit", or "".
        link: a cluster to reckon with, in the same form, or "".
        interface: of a real cluster; None to find it.
    """

    workload: str
    emulate: str
    link: str
    interface: str | None


def advise(asked: Asked) -> int:
    """Measure, print, and return the exit status.

    Raises:
        ValueError: for a model or a link that means nothing.
        BenchError: the ranks could not be started, or failed.
    """
    workload_named(asked.workload)
    place = None
    if asked.link:
        found = reckon(asked.workload, asked.link)
        where = f"{asked.link}, reckoned from steps of one process"
    else:
        plan = Plan(asked.emulate, asked.workload, ADVISE, 1, STEPS_MEASURED + 1, 1, "cpu" if asked.emulate else "auto")
        if asked.emulate:
            rounds = emulate(plan)
            where = f"{asked.emulate}, measured between ranks"
        else:
            place = Place.find(asked.interface)
            if place is None:
                raise BenchError(
                    "no link: give --link 4x1gbit to reckon with one, --emulate 4x1gbit to build one, or start this "
                    "command on every host with torchrun or srun."
                )
            rounds = run(replace(plan, cluster=f"{place.hosts} hosts"), place)
            where = f"{place.size} ranks, measured between them"
        with closing(rounds):
            measured = list(rounds)
        if place is not None and place.rank:
            return 0
        if not measured or measured[-1].run is None:
            raise BenchError(
                f"the steps to measure failed: {measured[-1].error if measured else 'nothing was measured'}"
            )
        found = [Advice(**each) for each in measured[-1].run.advices]
        if not found:
            raise BenchError("nothing to advise: the model is too small to plan, or no rank could tell the time.")
    console = Console()
    console.print(table(found, f"{asked.workload} on {where}"))
    for line in words(found):
        console.print(line, highlight=False, markup=False, soft_wrap=not line.startswith("Use "))
    return 0


def reckon(workload: str, link: str) -> list[Advice]:
    """Advice from steps of one process here, and messages that take what they would on ``link``.

    In a process of its own, since a training leaves a process group and environment variables behind.
    """
    cluster = parse(link)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        return apart.submit(_in_one_process, workload, cluster).result()


def _in_one_process(workload: str, cluster: ClusterSpec) -> list[Advice]:
    known = workload_named(workload)
    module = known.module()
    profile = _Profile()
    logging.disable(logging.WARNING)
    trainer = Trainer(
        accelerator="auto",
        devices=1,
        strategy=SparseDDPStrategy(Dense()),
        max_steps=STEPS,
        callbacks=[profile],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's, about workers and sizes: not what was asked
        trainer.fit(module, **known.fit_arguments())
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    return advices(parameters, profile.measured(parameters), cluster)


def advices(parameters: Mapping[str, Tensor], measured: Measured, cluster: ClusterSpec) -> list[Advice]:
    """What to expect of each strategy where steps take what was measured, and messages what they would on a cluster."""
    rates = [rate for rate in (*cluster.host_rates_bits_per_s, cluster.trunk_rate_bits_per_s) if rate]
    s_per_byte = 8 / min(rates) if rates else 0.0
    found = []
    for kind in COMPRESSORS.values():
        compressor = kind()
        pieces = pieces_of(parameters, compressor)
        kinds = kinds_of(pieces, compressor, lambda c, n: model_cost(c, n, cluster.hosts, Link(HOP_S, s_per_byte)))
        assert kinds is not None  # a modelled cost is always known
        found.append(advice(compressor, best_plan(pieces, kinds, measured, Calibration(blocking=False))))
    return found


class _Profile(Callback):
    """Notes when gradients arrive, and how long a step and its backward take."""

    def __init__(self) -> None:
        self._arrivals: list[list[float]] = []
        self._spans: list[float] = []
        self._steps: list[float] = []
        self._last_s = 0.0

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:
        """Note the step."""
        del args
        strategy = trainer.strategy
        assert isinstance(strategy, SparseDDPStrategy)
        assert strategy.exchange is not None
        now = time.perf_counter()
        timeline = strategy.exchange.timeline
        self._arrivals.append([timeline.arrival_s(p) for p in pl_module.parameters() if p.requires_grad])
        self._spans.append(max(self._arrivals[-1]))
        self._steps.append(now - self._last_s)
        self._last_s = now

    def measured(self, names: Iterable[str]) -> Measured:
        """The medians of the second half."""
        late = slice(STEPS // 2, None)
        arrivals = [median(each) for each in zip(*self._arrivals[late], strict=True)]
        rest_s = median(step - span for step, span in zip(self._steps[late], self._spans[late], strict=True))
        return Measured(arrivals[::-1], median(self._spans[late]), max(rest_s, 0.0), [list(names)])

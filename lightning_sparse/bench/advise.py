"""``lightning-sparse advise``: a few steps of a user's model, between real ranks or alone with a link as given."""

import logging
import math
import multiprocessing
import os
import time
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from lightning_sparse.auto.chooser import BFLOAT16, EXACT, tried
from lightning_sparse.auto.forecast import forecast_of, loss_above, steps_alone
from lightning_sparse.auto.policy import CANDIDATES, Auto, Candidate
from lightning_sparse.auto.trial import ELEMENTS
from lightning_sparse.bench.cluster import ClusterError, ClusterSpec, parse
from lightning_sparse.bench.compare.records import Advice, advise_on
from lightning_sparse.bench.compare.run import find_ranks
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.strategies import ADVISE
from lightning_sparse.bench.compare.worker import QUIET
from lightning_sparse.bench.compare.workloads import workload_named
from lightning_sparse.bench.output import ms, new_progress, new_table
from lightning_sparse.compressors import Dense
from lightning_sparse.fusion.costs import RANKS, GroupCosts, Now
from lightning_sparse.fusion.layer_fusion import is_worth_planning
from lightning_sparse.fusion.planner import Measured
from lightning_sparse.fusion.steps import BetweenSteps, PassCounts, measure_steps
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.local_steps.optimizers import need_full_sums, why_not_alone
from lightning_sparse.monitor.tables import human_bytes
from lightning_sparse.network.costs import Inside, Link
from lightning_sparse.settings import counted
from lightning_sparse.trainer.strategy import SparseDDPStrategy
from lightning_sparse_cli import Advise

LARGE_BYTES = 8 * 10**9  # that plain DDP sends in a step, of some 10**9 parameters
SHARDED = (
    "If the model does not fit a device: ls.SparseHSDPStrategy shards it inside nodes; count a node as a rank here."
)
COUNTS = PassCounts(settling=3, beside=3, apart=2)  # steps of a model that trains alone
STEPS = sum(COUNTS)
TOO_SMALL = "nothing to advise: the model is too small to gain by sending less. Use plain DDP."
OF_LBFGS = "nothing to advise: LBFGS may end far above the loss of ddp where gradients are compressed. Use plain DDP."
STEPS_OF_DDP = 1000  # Whose loss others are expected to reach in so many seconds.
MOST_STEPS = 100  # in which sparse_auto must have chosen
AT_MOST = Auto.at_most or 0.0  # The part by which sparse_auto lets a loss be above ddp's by default.
NOISE = 0.05  # Part by which something must be sooner than plain DDP to be named.
HOOK = (  # of PyTorch
    "from lightning.pytorch.strategies import DDPStrategy",
    "from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook",
    "Trainer(strategy=DDPStrategy(ddp_comm_hook=bf16_compress_hook))",
)
BUSY = 1.5  # programs for each core, this one among them


def advise(options: Advise) -> int:
    """Measure and print; returns the exit status."""
    workload_named(options.model)
    if options.link:
        found, where = predict(options.model, options.link), f"{options.link}, predicted from one process"
    else:
        found, where = _measure(options)
    if found:
        console = Console()
        console.print(table(found, f"{options.model} on {where}"))
        for line in words(found, busy()):
            console.print(line, highlight=False, markup=False, soft_wrap=line.startswith("    "))
    return 0


def _measure(options: Advise) -> tuple[list[Advice], str]:
    """Return advice from steps between ranks, and where they ran; no advice on ranks other than 0."""
    otherwise = " To predict from one process, give --link 4x1gbit, say."
    place, measure = find_ranks([options.emulate] if options.emulate else [], options.interface, otherwise)
    schedule = Schedule(options.emulate, options.model, f"ddp,{ADVISE}", MOST_STEPS, 1, 1, "cpu")
    if place is not None:
        schedule = replace(schedule, cluster=_where(place.size, place.hosts), accelerator="auto")
    if place is not None and place.rank:
        list(measure(schedule))  # rank 0 reports
        return [], ""
    with new_progress(Console(stderr=True)) as progress:
        task = progress.add_task("training with plain DDP, then with what sparse_auto tries", total=2)
        progress.refresh()
        rounds = []
        for each in measure(schedule):
            rounds.append(each)
            progress.update(task, advance=1, refresh=True)
    if error := next((each.error for each in rounds if each.run is None), None if rounds else "nothing was measured"):
        raise ClusterError(f"the steps to measure failed: {error}")
    dense, last = rounds
    assert last.run is not None
    if not last.run.advices:
        raise ValueError(f"{TOO_SMALL} Or its optimizer is LBFGS, or no rank could measure times.")
    ddp, alone, *others = (Advice(**each) for each in last.run.advices)
    ddp = replace(ddp, step_s=median(step.s for step in dense.timed), measured=True)
    if ddp.ranks != dense.hosts:
        alone = replace(alone, name="one rank alone")
    cluster = schedule.cluster
    if options.emulate and (spec := parse(options.emulate)).ranks > spec.hosts:
        cluster = f"{cluster}, {_where(spec.ranks, spec.hosts)}"
    return [ddp, alone, *others], f"{cluster}, measured between ranks"


def _where(ranks: int, hosts: int) -> str:
    return f"{counted(ranks, 'rank')} of {counted(hosts, 'host')}"


# - a link as given


def predict(model: str, link: str) -> list[Advice]:
    """Return advice from steps of one process here, and messages that take what they would on ``link``.

    The ranks of a host are taken to act as one, and their sums among themselves to take no time.  It trains in a
    process of its own, since a training leaves a process group and environment variables behind.

    Raises:
        ValueError: for one host, for hosts of different numbers of ranks, and for a model that is too small.
    """
    cluster = parse(link)
    if cluster.hosts == 1:
        raise ValueError(f"--link must be of two hosts or more; got {link!r}. On one machine use plain DDP.")
    if len(set(cluster.local_sizes)) > 1:
        raise ValueError(f"--link must be of hosts with equally many ranks; got {link!r}. Give '2x4x1gbit', say.")
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as apart:
        return apart.submit(_in_one_process, model, cluster).result()


def _in_one_process(model: str, cluster: ClusterSpec) -> list[Advice]:
    workload, profile = workload_named(model), _Profile()
    module = workload.module()
    logging.disable(logging.WARNING)
    given: dict[str, Any] = {"devices": 1, "precision": workload.precision, "max_steps": STEPS, **QUIET}
    trainer = Trainer(strategy=SparseDDPStrategy(Dense()), callbacks=[profile], **given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Lightning's, about workers and sizes: not what was asked
        trainer.fit(module, **workload.fit_arguments())
    assert profile.record is not None
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if not is_worth_planning(parameters):
        raise ValueError(TOO_SMALL)
    if need_full_sums(trainer.optimizers):
        raise ValueError(OF_LBFGS)
    of_local_steps = not any(why_not_alone(optimizer) for optimizer in trainer.optimizers)
    candidates = [each for each in CANDIDATES if of_local_steps or not each.local_steps]
    gradients = profile.record.gradients()
    # One rank's gradients stand for all ranks': each has those of another step.
    of_ranks = torch.stack([gradients.roll(rank, 0) for rank in range(min(cluster.hosts, RANKS))])
    return advices(parameters, profile.measured, cluster, of_ranks, profile.record.weights(), candidates)


def advices(
    parameters: Mapping[str, Tensor],
    measured: Measured,
    cluster: ClusterSpec,
    gradients: Tensor,
    weights: Tensor,
    candidates: Sequence[Candidate] = CANDIDATES,
    now: Now = time.perf_counter,
) -> list[Advice]:
    """Advise on each candidate, where steps take what was measured and messages what they would on the cluster.

    Candidates are tried on ``gradients`` [R, T, m], with the ``weights`` [m] of the same elements.
    """
    local_size = cluster.local_sizes[0]  # ranks that send at once on the link of their host
    link = Link(cluster.hop_s, local_size * cluster.s_per_byte)
    costs = GroupCosts(parameters, link, cluster.hosts, now=now, inside=Inside(local_size))
    with Progress(transient=True) as progress:
        each = progress.track(candidates, description="Trying candidates on the model's gradients")
        found = [tried(forecast_of(candidate, measured, costs), gradients, weights) for candidate in each]
    return advise_on(found, (measured.computing_s, steps_alone(gradients, cluster.hosts)))


class _Profile(Callback):
    """Measures steps as LayerFusion does, and records gradients meanwhile."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin."""
        assert isinstance(trainer.strategy, SparseDDPStrategy)
        assert isinstance(trainer.strategy.averager, GradientAverager)
        self._averager = trainer.strategy.averager
        self._averager.record_gradients(ELEMENTS)
        parameters = {name: p for name, p in pl_module.named_parameters() if p.requires_grad}
        self._passes = self._measure(measure_steps(self._averager, parameters, COUNTS))

    def on_train_batch_start(self, *args: Any) -> None:
        """Note what is known of the last step."""
        next(self._passes)

    def on_train_end(self, *args: Any) -> None:
        """Keep what was measured and recorded."""
        next(self._passes)
        self.record = self._averager.take_record()

    def _measure(self, passes: BetweenSteps[Measured]) -> BetweenSteps[None]:
        self.measured = yield from passes
        yield


# - what is said


def table(advices: Sequence[Advice], title: str) -> Table:
    """Show what is soonest at a loss first, and what to use in bold."""
    result = new_table(title, "strategy", "step", "steps", "to loss", "sends")
    result.add_column("waits for", no_wrap=True)
    result.columns[0].no_wrap = True
    result.caption = (
        f"steps: expected to the loss that ddp has after {STEPS_OF_DDP:,}; to loss: a step times these; sends: a rank, "
        "in a step; ~: predicted, not measured"
    )
    left_out = _left_out_of(advices[2:])
    if left_out:
        result.caption += "; in parentheses: left out by sparse_auto for the loss after as many steps"
    for a in sorted(advices, key=lambda a: (a.seconds, a.step_s)):
        name = f"[bold]{a.name}[/bold]" if a.chosen else f"({a.name})" if a in left_out else a.name
        step, steps = f"{'' if a.measured else '~'}{ms(a.step_s)}", f"{STEPS_OF_DDP * a.more_steps:,.0f}"
        result.add_row(name, step, steps, f"{STEPS_OF_DDP * a.seconds:,.0f} s", human_bytes(a.sent_bytes), a.limit)
    return result


def words(advices: Sequence[Advice], busy: str = "") -> list[str]:
    """Write whether several machines pay, what to use on them, what it gains and costs, and what to paste."""
    ddp, alone, *candidates = advices
    best = next(a for a in candidates if a.chosen)
    paragraphs = [busy, SHARDED if ddp.sent_bytes > LARGE_BYTES else "", _of_one_machine(alone, ddp, best)]
    lines = [line for paragraph in paragraphs if paragraph for line in (paragraph, "")]
    ddp_s = STEPS_OF_DDP * ddp.step_s
    all_the_same = f"On {_number(ddp, alone)} all the same: " if _is_later_anyway(alone, ddp, best) else ""
    if best.name == str(EXACT) or ddp.step_s <= (1 + NOISE) * best.seconds:  # the former are sums as DDP's
        lines += [
            f"Do not compress: on {_number(ddp, alone)} nothing is expected to be at the loss that plain DDP has after "
            f"{STEPS_OF_DDP:,} steps, {ddp_s:,.0f} s, more than {NOISE:.0%} sooner. Its step takes {ms(ddp.step_s)} "
            f"and waits for its {ddp.limit}. Use plain DDP:",
            "",
            "    Trainer(strategy='ddp')",
        ]
        return lines + _left_out(ddp, candidates)
    least, most = (STEPS_OF_DDP * seconds for seconds in best.likely_s)
    lines += [
        f"{all_the_same}Use sparse_auto, which chooses so by itself: {best.name}. It is expected to be at the loss "
        f"that plain DDP has after {STEPS_OF_DDP:,} steps, {ddp_s:,.0f} s, in {STEPS_OF_DDP * best.seconds:,.0f} s "
        f"({least:,.0f} to {most:,.0f}): {1 - best.seconds / ddp.step_s:.0%} sooner.",
        "",
        "    import lightning_sparse as ls",
        "    Trainer(strategy='sparse_auto')",
        f"    {best.python}  # {'with its rounding errors kept' if best.name == str(BFLOAT16) else 'the same, fixed'}",
        "",
        "or in a config file:",
        "",
        *(f"    {line}" for line in best.yaml.split("\n")),
    ]
    if best.name == str(BFLOAT16):
        lines += ["", "On GPUs PyTorch's own hook does the same without this package:", "", *(f"    {x}" for x in HOOK)]
    return lines + _left_out(best, candidates)


def _number(ddp: Advice, alone: Advice) -> str:
    """Write "4 machines", or "4 ranks" where a machine has several."""
    return counted(ddp.ranks, alone.name.split()[1])


def _times(alone: Advice, ddp: Advice, best: Advice) -> float:
    """How many times as long several machines take to a loss, for each step that they need, as a step of one takes."""
    return min(best.seconds, ddp.step_s) / alone.step_s


def _is_later_anyway(alone: Advice, ddp: Advice, best: Advice) -> bool:
    """Whether several machines are later than one, however many steps that needs."""
    return ddp.ranks > 1 and _times(alone, ddp, best) >= ddp.ranks


def _of_one_machine(alone: Advice, ddp: Advice, best: Advice) -> str:
    """Say whether more machines pay, and from how many, or at what batch.

    A step of one is taken to grow with its batch, and what others add to it to stay, whatever their number.
    """
    machines, times = ddp.ranks, _times(alone, ddp, best)
    number, what = _number(ddp, alone), alone.name.split()[1]
    if machines == 1:
        return ""
    if _is_later_anyway(alone, ddp, best):
        batch = math.ceil(10 * (times - 1) / (machines - 1) + 1e-9) / 10
        return (
            f"Train on {alone.name}: to the same loss {number} take {times:.1f} times as long for each of its steps, "
            f"and are later even if it needs {machines} times as many. They may pay where the batch of each is "
            f"{batch:.1f} times as large, or from {math.floor(times) + 1} {what}s."
        )
    begins = f"{alone.name.capitalize()} takes {ms(alone.step_s)} a step; {number} are sooner where it needs more than"
    sooner = f" So {alone.name} is expected to be sooner." if alone.more_steps < times else ""
    return (
        f"{begins} {times:.1f} times as many steps. By the gradients in these steps it needs about "
        f"{alone.more_steps:.1f} times as many; it may be 1 to {machines}, and grows as the loss falls.{sooner}"
    )


def _left_out_of(candidates: Sequence[Advice]) -> list[Advice]:
    """Those that are expected to lose more than sparse_auto accepts by default."""
    return [a for a in candidates if loss_above(a.more_steps) > AT_MOST]


def _left_out(best: Advice, candidates: Sequence[Advice]) -> list[str]:
    """Name what would be soonest, if that is not ``best``, and why it was not taken."""
    least = min(candidates, key=lambda a: a.seconds)
    if not least.seconds < best.seconds or least not in _left_out_of(candidates):
        return []
    return [
        "",
        f"{least.name} is expected to be {1 - least.seconds / best.seconds:.0%} sooner still, but its loss after as "
        f"many steps {loss_above(least.more_steps):.0%} above plain DDP's; sparse_auto takes what is expected to be at "
        f"most {AT_MOST:.0%} above. To have it:",
        "",
        f"    {least.python}",
    ]


def busy() -> str:
    """Say that other programs keep this machine busy, if they do."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load < BUSY * cores:
        return ""
    return (
        f"This machine is busy: {load:.1f} programs have been running on its {cores} cores in the last minute, so "
        "what is said here may be wrong by far: sampled times are short. Ask again when nothing else runs."
    )

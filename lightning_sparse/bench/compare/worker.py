"""The program that runs on each rank: ``python -m lightning_sparse.bench.compare.worker SCHEDULE PLACE``.

A worker takes the strategies in turn, round after round.  Each turn is a process of its own with an ordinary Trainer
in it: every strategy starts with fresh memory and fresh connections, and one that fails takes nothing along.  The
workers keep in step through a key-value store of their own, outside the time that is measured.
"""

import json
import logging
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Generator, Iterator
from dataclasses import asdict, replace
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Connection
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, Trainer, seed_everything
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_sparse.bench.compare.callbacks import Judge, LearningRate, Probe
from lightning_sparse.bench.compare.ranks import PATIENCE, STOPPED, RankInfo, Turn, child, connect, results_of
from lightning_sparse.bench.compare.records import MeasuredRun, Round, advise_on
from lightning_sparse.bench.compare.schedule import COMPILING, Schedule
from lightning_sparse.bench.compare.strategies import ADVISE
from lightning_sparse.bench.compare.workloads import workload_named
from lightning_sparse.hook import SparseHook
from lightning_sparse.trainer.strategy import SparseDDPStrategy

_MEETING = timedelta(minutes=2)  # until all workers must have started
FEW_STEPS = 3  # timed steps that `advise` has of plain DDP, which may be long
COMPILING_STEPS = 24  # After which a strategy has used its kernels, in all its groups; more than 16, as DiLoCo needs.
MOST_COMPILING_STEPS = 100  # Of sparse_auto, if it has not chosen before.
#: Arguments of a Trainer that writes nothing.
QUIET: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


def take_turns(schedule: Schedule, place: RankInfo) -> Generator[Round, None, None]:
    """Take all turns.  Yields what was measured, on rank 0; the other ranks yield nothing."""
    server = child(_serve, place) if place.rank == 0 and not place.store_is_there else None
    try:
        store, keys = _meet(place), count()
        failed: set[str] = set()
        rounds: list[Round] = []  # on rank 0
        for together in schedule.groups():
            turns = []
            for number, strategy in together:
                key = str(next(keys))
                own = PrefixStore(key, store)
                if place.rank == 0:
                    own.set("spec", schedule.at_best_rate(strategy, rounds).spec)
                if strategy.label not in failed:
                    row = replace(strategy, spec=own.get("spec").decode())
                    turns.append(Turn(schedule, place, number, row, own, key))
            for turn, result in results_of(turns, _train):
                turn.store.set(f"rank {place.rank}", result)
                if place.rank == 0:
                    rounds.append(_gather(turn))
                    turn.store.set("outcome", "failed" if rounds[-1].error else "done")
                    yield rounds[-1]
                if turn.store.get("outcome") == b"failed":
                    failed.add(turn.strategy.label)
        store.set(f"bye {place.rank}", "")
        if server:
            store.wait([f"bye {rank}" for rank in range(place.size)])
    finally:
        if server:
            server.kill()


def _meet(place: RankInfo) -> Store:
    """Connect to the workers' store, and wait until all are there; a RuntimeError if some do not come."""
    try:
        store = connect(place, _MEETING)
        store.set(f"hello {place.rank}", "")
        store.wait([f"hello {rank}" for rank in range(place.size)], _MEETING)
    except RuntimeError as error:
        raise RuntimeError(
            f"the hosts must reach each other, and rank 0 at {place.address}:{place.port}; got {error}. Start the "
            "command on every host; open the ports between them; name the interface with --interface, or "
            "GLOO_SOCKET_IFNAME (docs/multi-node.md, Ports)."
        ) from None
    store.set_timeout(PATIENCE)
    return store


def _gather(turn: Turn) -> Round:
    """Join all ranks' results."""
    schedule, size, row = turn.schedule, turn.place.size, turn.strategy
    results = [json.loads(turn.store.get(f"rank {rank}")) for rank in range(size)]
    # When one rank fails the others lose their connections to it, and say so: not what one wants to read.
    consequences = STOPPED, "onnection", "gloo", "Timed out", "NCCL"
    errors = [r["error"] for r in results if "error" in r]
    errors.sort(key=lambda error: any(word in error for word in consequences))
    run = None if errors else MeasuredRun.mean([MeasuredRun.from_json(r) for r in results])
    error = errors[0] if errors else ""
    outcome, hosts = (run, error, row.learning_rate), turn.place.hosts
    return Round(schedule.cluster, row.label, turn.number, size, schedule.warmup, *outcome, hosts)


# - processes


def _serve(place: RankInfo) -> None:
    """Serve the workers' store until killed."""
    server = TCPStore(place.address, place.port, is_master=True, wait_for_workers=False)
    while server:
        signal.pause()


def _train(turn: Turn, results: Connection) -> None:
    """Take one turn of one strategy on this rank, in the environment that torchrun would make, on a port of its own."""
    place, waiting = as_nodes(turn), turn.waiting(results)
    port = next(waiting)
    local, interface = {"LOCAL_RANK": place.local_rank, "LOCAL_WORLD_SIZE": place.local_size}, place.interface
    local |= {"GROUP_RANK": place.rank // place.local_size, "GROUP_WORLD_SIZE": place.hosts}
    every = {"RANK": place.rank, "WORLD_SIZE": place.size}
    there = {"MASTER_ADDR": place.address, "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": False}
    way = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
    os.environ.update({name: str(value) for name, value in {**local, **every, **there, **way}.items()})
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        run = _fit(turn, waiting)
    except Exception as error:
        traceback.print_exc()
        results.send({"error": f"{type(error).__name__}: {error}"})
        os._exit(1)  # at once, so that the others' messages fail
    results.send(asdict(run))
    dist.barrier()
    dist.destroy_process_group()


def as_nodes(turn: Turn) -> RankInfo:
    """Return a rank's place as Lightning is to see it: with as many ranks on every host, each on a device of its own.

    Where hosts have different numbers of ranks, or ranks share a device, each rank is a host of its own.
    """
    place = turn.place
    if place.size == place.hosts * place.local_size and not turn.schedule.shares_a_device:
        return place
    return replace(place, local_rank=0, local_size=1, hosts=place.size)


def _devices(turn: Turn) -> int | list[int]:
    """Return what the Trainer of a rank takes for ``devices``: of one that is a host of its own, its device."""
    local_rank, size = turn.place.local_rank, as_nodes(turn).local_size
    on_cuda = torch.cuda.is_available() and turn.schedule.accelerator == "auto"
    return [local_rank] if on_cuda and size < turn.place.local_size else size


def _fit(turn: Turn, waiting: Iterator[int]) -> MeasuredRun:
    schedule, place, rate = turn.schedule, turn.place, turn.strategy.learning_rate
    compiled, is_compiling = _times_of_compiling(), turn.number == COMPILING
    seed_everything(schedule.seed(turn.number), verbose=False)  # the same model and batches for all of a round
    workload = workload_named(schedule.workload)
    module = workload.module()
    probe = Probe(place.interface if place.local_rank == 0 else None, workload.learns)  # one counts for its host
    callbacks: list[Callback] = [probe, LearningRate(rate, workload.schedule)]
    if schedule.until_loss and workload.held_out is not None and not is_compiling:
        least = schedule.warmup + 1
        lowest, seconds, others = min(schedule.until_loss), schedule.seconds, waiting if schedule.interleave else None
        callbacks.append(Judge(probe, workload.held_out(), lowest, seconds, least, others))
    if ADVISE in schedule.strategies.split(",") or is_compiling:
        callbacks.append(_Enough(probe, COMPILING_STEPS if is_compiling else schedule.warmup + FEW_STEPS))
    most = schedule.warmup + schedule.steps if schedule.seconds is None else -1
    trainer = Trainer(
        accelerator=schedule.accelerator,
        devices=_devices(turn),
        num_nodes=as_nodes(turn).hosts,
        precision=workload.precision,
        strategy=turn.strategy.build(**({"process_group_backend": "gloo"} if schedule.shares_a_device else {})),
        plugins=[TorchElasticEnvironment()],
        max_steps=MOST_COMPILING_STEPS if is_compiling else most,
        max_epochs=-1,
        callbacks=callbacks,
        **QUIET,
    )
    trainer.fit(module, **workload.fit_arguments())
    device = trainer.strategy.root_device  # the module itself is back on the CPU
    on_cuda = device.type == "cuda"
    hook, advices = _hook(trainer), []
    plan = hook.layer_fusion.plan if hook and hook.layer_fusion else None
    if hook and (chooser := hook.chooser) and chooser.chosen:
        advices = advise_on(chooser.forecasts, chooser.alone, chooser.chosen.candidate, chooser.measured)
    return MeasuredRun(
        device=torch.cuda.get_device_name(device) if on_cuda else "cpu",
        threads=torch.get_num_threads(),
        elements=sum(p.numel() for p in module.parameters() if p.requires_grad),
        peak_memory_bytes=torch.cuda.max_memory_allocated() if on_cuda else getrusage(RUSAGE_SELF).ru_maxrss * 1024,
        steps=probe.steps,
        predicted_s=plan.step_s if plan else None,
        advices=[asdict(each) for each in advices],
        compiled_s=None if compiled is None else sum(compiled),
    )


def _times_of_compiling() -> list[float] | None:
    """A list to which Triton adds the seconds of each kernel that it compiles from now on; None where it would not."""
    try:
        from triton import knobs  # type: ignore[import-not-found,import-untyped,unused-ignore]  # since Triton 3.4
    except ImportError:
        return None
    seconds: list[float] = []

    def note(*, times: Any, cache_hit: bool, **others: Any) -> None:
        if not cache_hit:
            seconds.append(times.total / 1e6)

    knobs.compilation.listener = note
    return seconds


def _hook(trainer: Trainer) -> SparseHook | None:
    return trainer.strategy.hook if isinstance(trainer.strategy, SparseDDPStrategy) else None


class _Enough(Callback):
    """Ends a training of sparse_auto once it has chosen, and of others after a few ``steps``."""

    def __init__(self, probe: Probe, steps: int) -> None:
        self._probe, self._steps = probe, steps

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        del args
        hook = _hook(trainer)
        if hook and hook.chooser:
            trainer.should_stop = hook.chooser.chosen is not None
        else:
            trainer.should_stop = len(self._probe.steps) >= self._steps


def main() -> None:
    """Do what a schedule says at a place, both given as JSON; rank 0 writes a line of JSON for each round."""
    schedule, place = (json.loads(word) for word in sys.argv[1:])
    for found in take_turns(Schedule(**schedule), RankInfo(**place)):
        print(json.dumps(asdict(found)), flush=True)


if __name__ == "__main__":
    main()

"""What runs on each rank: ``python -m lightning_sparse.bench.worker PLAN``, started as torchrun starts its workers.

A worker takes the strategies in turn, round after round.  Each turn is a process of its own, forked from the worker so
that it need not import anything, with an ordinary Trainer in it: every strategy starts with fresh memory and fresh
connections, and one that fails takes nothing along.  The workers keep in step through a key-value store of their own,
outside the time that is measured.
"""

import ctypes
import json
import logging
import multiprocessing
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Trainer, seed_everything
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported at run time only

from lightning_sparse.bench.advice import advice
from lightning_sparse.bench.peers import NO_COMMUNICATION, Contender, contenders
from lightning_sparse.bench.probe import Probe, Run, interface_towards, read_counters
from lightning_sparse.bench.report import Round
from lightning_sparse.bench.workloads import workload_named
from lightning_sparse.strategy import SparseDDPStrategy

_FORK = multiprocessing.get_context("fork")
_PATIENCE = timedelta(days=1)  # of the workers among themselves; training has a time limit of its own
# How often a worker asks whether another rank failed.  Gloo does not tell a rank that waits for a message of one that
# is gone.  The question and its answer are counted with the messages of a step: some 300 bytes.
_GLANCE_S = 5.0
_STOPPED = "stopped, since another rank failed"
_PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


@dataclass(frozen=True)
class Plan:
    """What to run; the same on every rank.

    Attributes:
        cluster: what the rows are called.
        workload: a name in ``WORKLOADS``.
        strategies: comma-separated, as :func:`~lightning_sparse.bench.peers.contenders` reads them.
        steps: timed steps of each strategy in each round.
        warmup: steps before them that are not timed.
        rounds: turns of each strategy.
        accelerator: of Lightning.
    """

    cluster: str
    workload: str
    strategies: str
    steps: int
    warmup: int
    rounds: int
    accelerator: str

    def contenders(self) -> list[Contender]:
        """The rows, and with them the time of a step without communication."""
        return contenders(f"{NO_COMMUNICATION},{self.strategies}")

    def turns(self) -> list[tuple[int, Contender]]:
        """Rounds and strategies in the order in which they run.

        Every other round runs backwards, so that none is favoured by its place.
        """
        rows = self.contenders()
        return [(number, row) for number in range(self.rounds) for row in (rows[::-1] if number % 2 else rows)]


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks.

    Attributes:
        rank: of all.
        local_rank: of those on this host.
        size: number of ranks.
        local_size: number of ranks on this host.
        address: of the host of rank 0.
        port: there, for the workers' store.
        store_is_there: whether torchrun's agent serves the store.
        interface: whose traffic is counted, and which Gloo and NCCL are told to use.
    """

    rank: int
    local_rank: int
    size: int
    local_size: int
    address: str
    port: int
    store_is_there: bool
    interface: str

    @property
    def hosts(self) -> int:
        """Number of hosts."""
        return self.size // self.local_size

    @classmethod
    def find(cls, interface: str | None) -> "Place | None":
        """This process's place as torchrun or SLURM tells it; None if neither started it.

        Args:
            interface: name of the network interface; None to find the one that leads to rank 0.
        """
        variables = os.environ
        started: TorchElasticEnvironment | SLURMEnvironment
        if TorchElasticEnvironment.detect():
            started = TorchElasticEnvironment()
            local_size = int(variables["LOCAL_WORLD_SIZE"])
        elif SLURMEnvironment.detect():
            started = SLURMEnvironment()
            local_size = started.world_size() // int(variables["SLURM_NNODES"])
        else:
            return None
        interface = interface or variables.get("GLOO_SOCKET_IFNAME") or interface_towards(started.main_address)
        read_counters(interface)  # complains now if there is none of this name
        return cls(
            rank=started.global_rank(),
            local_rank=started.local_rank(),
            size=started.world_size(),
            local_size=local_size,
            address=started.main_address,
            port=started.main_port,
            store_is_there=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            interface=interface,
        )


def run(plan: Plan, place: Place) -> Generator[Round, None, None]:
    """Take all turns.  Yields what was measured, on rank 0; the other ranks yield nothing."""
    serving = place.rank == 0 and not place.store_is_there
    server = _child(_serve, place) if serving else None
    try:
        store = PrefixStore(
            "lightning_sparse_bench", TCPStore(place.address, place.port, is_master=False, timeout=_PATIENCE)
        )
        yield from _take_turns(plan, place, store)
        store.set(f"bye {place.rank}", "")
        if server:
            store.wait([f"bye {rank}" for rank in range(place.size)])
    finally:
        if server:
            server.kill()


def _take_turns(plan: Plan, place: Place, store: Store) -> Iterator[Round]:
    failed: set[str] = set()
    for turn, (number, contender) in enumerate(plan.turns()):
        if contender.label in failed:
            continue
        mine = PrefixStore(str(turn), store)
        mine.set(f"rank {place.rank}", _take_turn(plan, place, number, contender, mine))
        if place.rank == 0:
            measured = _gather(plan, place, number, contender, mine)
            mine.set("outcome", "failed" if measured.error else "done")
            yield measured
        if mine.get("outcome") == b"failed":
            failed.add(contender.label)


def _take_turn(plan: Plan, place: Place, number: int, contender: Contender, store: Store) -> str:
    """Train in a process of its own.  Returns a Run as JSON, or {"error": ...}."""
    if place.rank == 0:
        with socket.create_server(("", 0)) as server:
            store.set("port", str(server.getsockname()[1]))
    receiving, sending = _FORK.Pipe(duplex=False)
    process = _child(_train, plan, place, number, contender, int(store.get("port")), sending)
    sending.close()  # ours: so that the end of the process is the end of the pipe
    try:
        while not receiving.poll(_GLANCE_S):
            if store.check(["failed"]):
                return json.dumps({"error": _STOPPED})
        result: str = receiving.recv()
        process.join(_GLANCE_S)
    except EOFError:
        process.join()
        result = json.dumps({"error": f"the process of rank {place.rank} ended with status {process.exitcode}"})
    finally:
        process.kill()
    if "error" in json.loads(result):
        store.set("failed", "")
    return result


def _gather(plan: Plan, place: Place, number: int, contender: Contender, store: Store) -> Round:
    """All ranks' results as one."""
    results = [json.loads(store.get(f"rank {rank}")) for rank in range(place.size)]
    # When one rank fails the others lose their connections to it, and say so: not what one wants to read.
    errors = sorted((r["error"] for r in results if "error" in r), key=_is_a_consequence)
    run = None if errors else Run.mean([Run.from_json(r) for r in results])
    return Round(plan.cluster, contender.label, number, place.size, plan.warmup, run, errors[0] if errors else "")


def _is_a_consequence(error: str) -> bool:
    return error == _STOPPED or any(word in error for word in ("onnection", "gloo", "Timed out", "NCCL"))


# - processes


def _child(work: Callable[..., None], *arguments: Any) -> multiprocessing.process.BaseProcess:
    process = _FORK.Process(target=_die_with_parent, args=(os.getpid(), work, *arguments), daemon=True)
    process.start()
    return process


def _die_with_parent(parent: int, work: Callable[..., None], *arguments: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's business
    if os.getppid() == parent:
        work(*arguments)


def _serve(place: Place) -> None:
    """Serve the workers' store until killed."""
    server = TCPStore(place.address, place.port, is_master=True, wait_for_workers=False)
    while server:
        signal.pause()


def _train(plan: Plan, place: Place, number: int, contender: Contender, port: int, results: Connection) -> None:
    """One turn of one strategy on this rank."""
    try:
        _become_worker(place, port)
        run = _fit(plan, place, number, contender)
    except Exception as error:
        traceback.print_exc()
        results.send(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        os._exit(1)  # at once, so that the others' messages fail
    results.send(json.dumps(asdict(run)))
    dist.barrier()
    dist.destroy_process_group()


def _become_worker(place: Place, port: int) -> None:
    """The environment torchrun would have made, but with a rendezvous of this turn's own."""
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.local_rank),
        GROUP_RANK=str(place.rank // place.local_size),
        WORLD_SIZE=str(place.size),
        LOCAL_WORLD_SIZE=str(place.local_size),
        MASTER_ADDR=place.address,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="False",
        GLOO_SOCKET_IFNAME=place.interface,
        NCCL_SOCKET_IFNAME=place.interface,
    )
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")


def _fit(plan: Plan, place: Place, number: int, contender: Contender) -> Run:
    seed_everything(number, verbose=False)  # the same model and the same batches for every strategy of a round
    workload = workload_named(plan.workload)
    module = workload.module()
    probe = Probe(place.interface if place.local_rank == 0 else None, workload.learns)
    trainer = Trainer(
        accelerator=plan.accelerator,
        devices=place.local_size,
        num_nodes=place.hosts,
        strategy=contender.build(),
        plugins=[TorchElasticEnvironment()],
        max_steps=plan.warmup + plan.steps,
        max_epochs=-1,
        callbacks=[probe],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, **workload.fit_arguments())
    device = trainer.strategy.root_device  # the module itself is back on the CPU
    on_cuda = device.type == "cuda"
    fusion = trainer.strategy.layer_fusion if isinstance(trainer.strategy, SparseDDPStrategy) else None
    return Run(
        device=torch.cuda.get_device_name(device) if on_cuda else "cpu",
        threads=torch.get_num_threads(),
        elements=sum(p.numel() for p in module.parameters() if p.requires_grad),
        peak_memory_bytes=torch.cuda.max_memory_allocated() if on_cuda else getrusage(RUSAGE_SELF).ru_maxrss * 1024,
        steps=probe.steps,
        predicted_s=fusion.plan.step_s if fusion and fusion.plan else None,
        advices=[asdict(advice(*each)) for each in fusion.plans] if fusion and len(fusion.plans) > 1 else [],
    )


def main() -> None:
    """Run the plan given as JSON; rank 0 writes a line of JSON for each turn."""
    plan = Plan(**json.loads(sys.argv[1]))
    place = Place.find(None)
    assert place is not None
    for measured in run(plan, place):
        print(json.dumps(asdict(measured)), flush=True)


if __name__ == "__main__":
    main()

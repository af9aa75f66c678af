"""``lightning-sparse doctor``: looks around, checks every strategy, and says what is wrong."""

import os
import platform
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_sparse.__about__ import __version__
from lightning_sparse.auto.policy import NAMES
from lightning_sparse.bench.cluster import parse, unavailable_reason
from lightning_sparse.bench.compare.ranks import RankInfo, interfaces
from lightning_sparse.bench.compare.records import Round
from lightning_sparse.bench.compare.run import Rounds, find_ranks, on_this_machine
from lightning_sparse.bench.compare.schedule import Schedule
from lightning_sparse.bench.compare.worker import take_turns
from lightning_sparse.bench.compare.workloads import Classifier
from lightning_sparse.bench.output import new_table, say
from lightning_sparse.engine.averager import Averager
from lightning_sparse.kernels.ops import HAS_TRITON
from lightning_sparse.monitor.callbacks import check_replicas
from lightning_sparse.monitor.tables import human_bytes
from lightning_sparse.network.torch_comm import world
from lightning_sparse.settings import counted
from lightning_sparse.wire import WIRE_DTYPES
from lightning_sparse_cli import Doctor

MODEL = "lightning_sparse.bench.doctor:CheckedModel"
LOCAL = "sparse_dense:local_steps=4"
STRATEGIES = ("ddp", *NAMES, LOCAL)
MEMBERS = tuple(f"{each}:local_group=2" for each in ("micro", "sparse_dense:wire_dtype=int4", LOCAL))
FEW = ("ddp", "micro", LOCAL)  # on the CPU, where there are CUDA devices to train on
FORMATS = tuple(f"sparse_dense:wire_dtype={name}" for name in WIRE_DTYPES)
#: On CUDA tensors, through pinned memory.
OVER_GLOO = tuple(f"{each}:process_group_backend=gloo" for each in (*NAMES, *FORMATS, LOCAL))
CPU_RANKS = 2  # that check on one machine
DEVICE_RANKS = 3  # on one device: from three on, sums may take two hops
MEMBER_RANKS = 4  # the fewest that are several members of two, which send over two communicators
STEPS = 10  # of each strategy
LIMIT_S = 180  # of each strategy; one that takes longer hangs

# The model that is checked.
TOLERANCE = 1e-5  # of the largest element: sums in float32 are rounded
INPUTS, WIDTH, CLASSES = 64, 384, 10
BATCH, BATCHES = 16, 100


def doctor(options: Doctor) -> int:
    """Examine and print; returns the exit status: 1 if anything is wrong."""
    place = None if options.emulate else RankInfo.find(options.interface)
    if place is None and not options.emulate and sys.platform != "linux":
        raise ValueError(f"doctor needs Linux; got {sys.platform}. `advise MODEL --link 4x1gbit` does not.")
    if place is not None and place.rank:
        list(take_turns(plan("auto"), place))  # rank 0 reports
        return 0
    console, host = Console(soft_wrap=False), Host.this()
    wrong = host.wrong(1 if place is None else place.hosts)
    console.print(surroundings(host, place, options.emulate, unavailable_reason()))
    for title, rounds in _examinations(options.emulate, place, host.devices):
        wrong += _show(console, title, rounds)
    if not wrong:
        console.print("[bold]Nothing is wrong.[/bold]")
    for problem in wrong:
        say(console, f"wrong: {problem}")
    return int(bool(wrong))


def _examinations(cluster: str, place: RankInfo | None, devices: int) -> Iterator[tuple[str, Rounds]]:
    """What is to be examined, none of it begun, and what each is called."""
    if cluster:
        _, emulate = find_ranks([cluster], None)
        yield f"{cluster}, emulated, Gloo on the CPU", emulate(plan("cpu", cluster=cluster))
    elif place is not None:
        title = f"{counted(place.size, 'rank')} on {counted(place.hosts, 'host')}"
        yield title, take_turns(plan("auto"), place)
    else:
        on_cpu = plan("cpu", FEW if devices else STRATEGIES)
        yield f"{CPU_RANKS} ranks of this machine, Gloo on the CPU", on_this_machine(on_cpu, CPU_RANKS)
        if devices:
            title = f"{counted(devices, 'rank')} of this machine, NCCL on CUDA"
            pairs = MEMBERS if devices >= MEMBER_RANKS and devices % 2 == 0 else ()
            yield title, on_this_machine(plan("cuda", STRATEGIES + pairs), devices)
            if devices == 1:
                over_nccl = on_this_machine(plan("cuda", STRATEGIES + MEMBERS), MEMBER_RANKS, on_one_device=True)
                yield f"{MEMBER_RANKS} ranks on one device, NCCL through sockets on CUDA", over_nccl
            over_gloo = on_this_machine(plan("cuda", OVER_GLOO), DEVICE_RANKS, on_one_device=True)
            yield f"{DEVICE_RANKS} ranks on one device, Gloo on CUDA", over_gloo


def plan(accelerator: str, strategies: tuple[str, ...] = STRATEGIES, cluster: str = "") -> Schedule:
    """Return the turns that check each strategy once."""
    names = ",".join(strategies)
    return Schedule(cluster, MODEL, names, STEPS, warmup=0, rounds=1, accelerator=accelerator, limit_s=LIMIT_S)


def _show(console: Console, title: str, rounds: Rounds) -> list[str]:
    """Print the strategies that were checked, on rank 0; returns what is wrong."""
    checked: list[Round] = []
    try:
        with closing(rounds), Progress(transient=True) as progress:
            task = progress.add_task("starting", total=None)
            for each in rounds:
                progress.update(task, description=f"checked {each.strategy}")
                checked.append(each)
    except RuntimeError as error:
        return [str(error)]
    if checked:
        console.print(strategies(checked, title))
    return [f"{each.strategy} failed: {each.error}" for each in checked if each.error]


# - what is found


@dataclass(frozen=True)
class Host:
    """A host, as one of its processes sees it."""

    system: str
    versions: dict[str, str]
    cores: int  # that this process may use
    load: float  # programs that ran on average in the last minute
    devices: int  # of CUDA
    nccl: str  # its version, if PyTorch has NCCL
    triton: bool
    interfaces: dict[str, str]  # name -> IPv4 address
    own_address: str  # that the host's name leads to; "" if it leads nowhere
    gloo: str  # GLOO_SOCKET_IFNAME
    nccl_interface: str  # NCCL_SOCKET_IFNAME

    @classmethod
    def this(cls) -> "Host":
        """Look around.  CUDA is not started, so the process may be forked afterwards."""
        versions = {"python": platform.python_version(), "torch": str(torch.__version__)}
        for package in ("lightning", "pytorch-lightning"):
            with suppress(PackageNotFoundError):
                versions[package] = version(package)
        own_address = ""
        with suppress(OSError):
            own_address = socket.gethostbyname(socket.gethostname())
        return cls(
            system=f"{platform.system()} {platform.release()}",
            versions=versions | {"lightning-sparse": __version__},
            cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
            load=os.getloadavg()[0],
            devices=torch.cuda.device_count(),
            nccl=".".join(map(str, torch.cuda.nccl.version())) if dist.is_nccl_available() else "",
            triton=HAS_TRITON,
            interfaces=interfaces(),
            own_address=own_address,
            gloo=os.environ.get("GLOO_SOCKET_IFNAME", ""),
            nccl_interface=os.environ.get("NCCL_SOCKET_IFNAME", ""),
        )

    def wrong(self, hosts: int) -> list[str]:
        """Say what is wrong with it as one of so many hosts; nothing if it is as it must be."""
        found, known = [], ", ".join(self.interfaces)
        if self.devices and not self.nccl:
            found.append(
                "PyTorch must have NCCL to train on its CUDA devices; this build has none. Install PyTorch's own build "
                "for CUDA (https://pytorch.org/get-started/locally)."
            )
        if self.gloo and not set(self.gloo.split(",")) <= self.interfaces.keys():
            found.append(f"GLOO_SOCKET_IFNAME must be one of {known}; got {self.gloo!r}. Correct or unset it.")
        nccl = self.nccl_interface
        begins = tuple(nccl.split(","))
        if nccl[:1] not in ("", "^", "=") and not any(name.startswith(begins) for name in self.interfaces):
            found.append(f"NCCL_SOCKET_IFNAME must be how one of {known} begins; got {nccl!r}. Correct or unset it.")
        if hosts > 1 and not self.gloo and self.own_address.startswith("127."):
            others = [name for name, address in self.interfaces.items() if not address.startswith("127.")]
            found.append(
                f"this host's own name leads to {self.own_address}, which Gloo would tell the other hosts. export "
                f"GLOO_SOCKET_IFNAME={others[0] if others else '...'} on it before training."
            )
        return found


# - what is shown


def surroundings(host: Host, place: RankInfo | None, emulate: str, cannot_emulate: str | None) -> Table:
    """Show this host, and what ranks use."""
    triton = "Triton's" if host.triton else "PyTorch's; Triton's are faster: pip install triton"
    ranks = "neither torchrun nor srun started this: one machine"
    if emulate:
        spec = parse(emulate)
        ranks = f"{spec.ranks} on {counted(spec.hosts, 'host')}: {emulate}"
    elif place is not None:
        ranks = f"{place.size} on {counted(place.hosts, 'host')}; rank 0 at {place.address}:{place.port}"
    rows = {
        "versions": ", ".join(f"{name} {number}" for name, number in host.versions.items()),
        "machine": f"{host.system}, {host.cores} cores, {host.load:.1f} programs running",
        "devices": f"{counted(host.devices, 'CUDA device')}: ranks train on CUDA, over NCCL {host.nccl}"
        if host.devices
        else "no CUDA device: ranks train on the CPU, over Gloo",
        "kernels": triton if host.devices else "NumPy's and PyTorch's, on the CPU",
        "interfaces": ", ".join(f"{name} {address}" for name, address in host.interfaces.items()),
        "used": _used(host, place, emulate),
        "ranks": ranks,
        "emulation": "works: --emulate 4x1gbit, say" if cannot_emulate is None else f"not here: {cannot_emulate}",
    }
    table = Table.grid(Column(no_wrap=True), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _used(host: Host, place: RankInfo | None, emulate: str) -> str:
    """Say which interface a training between hosts would use."""
    if emulate:
        return "eth0 of each emulated host"
    if place is not None:
        return f"{place.interface}, the way to rank 0"
    if host.gloo:
        return f"{host.gloo}, by GLOO_SOCKET_IFNAME"
    known = {address: name for name, address in host.interfaces.items()}
    used = "loopback" if host.own_address.startswith("127.") else known.get(host.own_address, "not known")
    return f"{used}, where this host's name leads ({host.own_address or 'nowhere'}), unless GLOO_SOCKET_IFNAME is set"


def strategies(rounds: Sequence[Round], title: str) -> Table:
    """Show each strategy: the time of a step's gradients, what it sent, and whether it did what it must."""
    headings = "gradients\naveraged in", "sent", "none lost", "replicas\nequal"
    table = new_table(f"{STEPS} steps: {title}", "strategy", *headings)
    for each in rounds:
        steps = each.run.steps if each.run else []
        half = steps[len(steps) // 2 :]
        cells = [f"{median(s.ms_span for s in half):.1f} ms", human_bytes(half[-1].counted_bytes)] if half else ["", ""]
        table.add_row(each.strategy, *cells, *(["failed"] * 2 if each.error else ["yes"] * 2))
    return table


# - what is checked


class CheckedModel(Classifier):
    """Layers of 176,266 parameters that learn made-up classes; a step that breaks a promise raises an error.

    After each backward, over all P ranks and for each parameter,
    ``P * mean + sum(unsent after) == sum(unsent before + gradient)``; after each step every rank has the same
    parameters, bit for bit.  With local steps, where no gradients are averaged, the second is true of the average.
    """

    def __init__(self) -> None:
        widths = (INPUTS, WIDTH, WIDTH, CLASSES)
        layers = [each for n, m in pairwise(widths) for each in (nn.Linear(n, m), nn.ReLU())]
        super().__init__(layers[:-1], learning_rate=0.05)
        self._gradients: dict[str, Tensor] = {}  # this rank's own, of the last backward
        self._before: dict[str, Tensor] = {}  # what was unsent before it
        self._checked = 0

    def train_dataloader(self) -> DataLoader[Any]:
        """Inputs whose largest element among the first ten says the class; each rank gets batches of its own."""
        generator = torch.Generator().manual_seed(0)
        size = BATCH * BATCHES * self.trainer.world_size
        inputs = torch.randn(size, INPUTS, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs[:, :CLASSES].argmax(1)), BATCH)

    def on_train_start(self) -> None:
        """Watch for each parameter's own gradient, before it is averaged."""
        for name, parameter in self.named_parameters():
            parameter.register_hook(partial(self._note, name))

    def on_before_backward(self, loss: Tensor) -> None:
        """Keep what is unsent."""
        del loss
        self._before = self._unsent()

    def on_after_backward(self) -> None:
        """Check what has been averaged."""
        if self._averager and self._averager.local is not None:
            return
        after, parameters = self._unsent(), dict(self.named_parameters())
        before = {name: self._before[name] + self._gradients[name].double() for name in parameters}
        total = torch.cat([(after[name] - before[name]).flatten() for name in parameters]).float()
        dist.all_reduce(total)  # one message: over the ranks, -P * mean
        parts = total.split([p.numel() for p in parameters.values()])
        for (name, parameter), part in zip(parameters.items(), parts, strict=True):
            assert parameter.grad is not None
            mean = self.trainer.world_size * parameter.grad.flatten()
            wrong = float((part + mean).abs().max() / (before[name].abs().max() + mean.abs().max()).clamp(min=1e-30))
            if not wrong <= TOLERANCE:
                raise RuntimeError(
                    f"gradient was lost or made up in step {self.trainer.global_step + 1}: P * mean + sum(unsent "
                    f"after) must be sum(unsent before + gradient); for {name} it is {wrong:.1e} of the largest "
                    "element away from it. Please report it, with all that this command prints."
                )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Check that the replicas are equal."""
        del outputs, batch, batch_idx
        local = self._averager.local if self._averager else None
        shared = local.compared() if local else {}
        check_replicas({name: shared.get(p, p) for name, p in self.named_parameters()}, world())
        self._checked += 1

    def on_train_end(self) -> None:
        """Check that every step was checked."""
        if self._checked != self.trainer.max_steps:
            raise RuntimeError(f"{self.trainer.max_steps} steps must be checked; {self._checked} were.")

    @property
    def _averager(self) -> Averager | None:
        return getattr(self.trainer.strategy, "averager", None)

    def _note(self, name: str, gradient: Tensor) -> None:
        self._gradients[name] = gradient.detach().clone()

    def _unsent(self) -> dict[str, Tensor]:
        """What this rank has not sent of each parameter, in float64 and of its shape; zeros where nothing is kept.

        Of a member's mean the unsent is kept once, in slices: it is taken for each of the L ranks that it is of.
        """
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # groups are averaged on a stream of their own
        unsent = {name: torch.zeros_like(p, dtype=torch.float64) for name, p in self.named_parameters()}
        for group in self._averager.groups if self._averager else ():
            for name, slot in zip(group.names, group.slots(group.unsent), strict=True):
                own = group.cut.own(unsent[name])
                own.copy_(slot.detach().view(own.shape)).mul_(group.cut.count)
        return unsent

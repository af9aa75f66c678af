"""Hosts of elastic trainings as real processes, a lighthouse, what each of them notes, and how they end."""

import ctypes
import math
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.bench.cluster import INTERFACE
from lightning_sparse.elastic.averager import ElasticAverager
from lightning_sparse.engine.checksum import checksum
from lightning_sparse.engine.lanes import Lane
from lightning_sparse.local_steps.averager import LocalAverager
from lightning_sparse.local_steps.replica import Replica
from lightning_sparse.network.elastic_comm import ElasticComm
from lightning_sparse.network.hosts import Hosts
from tests.support.models import Does, data, small, trainer, weights
from tests.support.processes import free_port

PROGRAM = Path(sys.executable).with_name("torchft_lighthouse")
LONG_S = 60  # that ends what waits for what does not come
HEARTBEATS_S = 0.3  # in which a lighthouse hears of a host three times
CALM = "calm"
MOST_ERROR = 4e-6  # of the law, relative to the largest weight
ADAM = partial(small, optimizer="adam")
MOST_GROUPS = 6  # in a turn of the model here
RATE, FALLS_BY, EVERY = 0.01, 0.998, (1, 2, 3)  # of a learning rate: at first, how it falls, and after how many steps


class Lighthouse:
    """torchft's own program, in a process that can be killed and started again."""

    def __init__(self, min_hosts: int = 1) -> None:
        self.port, self._min_hosts = free_port(), min_hosts
        self.address = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_until(self._answers)

    @property
    def command(self) -> list[str]:
        limits = ["--heartbeat_timeout_ms", "600", "--join_timeout_ms", "5000", "--quorum_tick_ms", "20"]
        return [str(PROGRAM), "--bind", f"[::]:{self.port}", "--min_replicas", str(self._min_hosts), *limits]

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def __enter__(self) -> "Lighthouse":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


def wait_until(condition: Callable[[], bool], limit_s: float = LONG_S, look_s: float = 0.01) -> None:
    """Wait for what others do; a test's own time limit ends what never comes."""
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "nothing came"
        time.sleep(look_s)


@dataclass
class Plan:
    """What hosts do in a test.

    Attributes:
        devices: of each host; a rank is a process, and the first ones are those of host 0.
        faults: of a rank, the name of a fault (a function of this module) and the step from which it may happen.
        joins: of a host that comes later, the step of host 0 that it waits for.
    """

    lighthouse: str
    folder: Path
    steps: int = 16
    compressor: Any = "sparse_dense"
    local: dict[str, Any] = field(default_factory=lambda: {"local_steps": 2, "wire_dtype": "int4"})
    faults: dict[int, tuple[str, int]] = field(default_factory=dict)
    joins: dict[int, int] = field(default_factory=dict)
    timeout_s: float = 20.0
    slow_below: int = 0  # hosts, below which steps take longer, so that some are left for those that come
    slow_s: float = 0.1  # so much longer
    checkpoints: dict[int, str] = field(default_factory=dict)
    saves: bool = False
    batches: int = 0  # of an epoch; 0: so many that none ends
    odd: int | None = None  # a host with other settings
    min_hosts: int = 1
    quorum_timeout_s: float = LONG_S
    own_pace: bool = False
    addresses: dict[int, str] = field(default_factory=dict)  # of hosts, at which others reach them
    falls: bool = False  # learning rates, as ``falling`` says
    sleeps: dict[int, float] = field(default_factory=dict)  # before each own step of a host, until there is a file CALM
    cut_s: int = 0  # for which a link is cut
    stops_until: int = 0  # a step of host 0, at which one goes on that has stopped
    devices: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # of the Trainer
    model: Callable[..., Any] = ADAM


class Now:
    """Where this process is."""

    folder: Path  # of the plan
    rank: int  # of all of them
    sibling: int  # the next one of the same host
    cut_s: int
    until: int
    step = 0  # of the exchange that is under way
    launched = 0  # messages of it
    killed = False


# - faults, each within one process at one step


def die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(step: int) -> None:
    """Die before an exchange."""
    meet = Hosts.meet
    _replace(Hosts, "meet", lambda self, committed: (committed > step and die(), meet(self, committed))[1])


def within(step: int) -> None:
    """Die when some messages of an exchange are sent."""
    watch = ElasticComm._watch

    def counted(self: ElasticComm, *args: Any) -> Any:
        watched = watch(self, *args)
        Now.launched += 1
        if Now.step >= step and Now.launched == 5:
            die()
        return watched

    _replace(ElasticComm, "_watch", counted)


def half_a_vote(step: int) -> None:
    """Die when one host has this one's vote and the others do not."""
    vote = ElasticAverager._vote

    def half(self: ElasticAverager, pending: Any, lane: Lane) -> None:
        if Now.step < step:
            return vote(self, pending, lane)
        self._voting.all(True)
        comm: Any = lane.comm
        one = (comm.rank + 1) % comm.size
        yes = [torch.zeros(2, dtype=torch.float64)]
        messages = comm.group.recv([torch.empty_like(yes[0])], one, 1), comm.group.send(yes, one, 1)
        for message in messages:
            message.wait()
        return die()

    _replace(ElasticAverager, "_vote", half)


def after(step: int) -> None:
    """Die when an exchange counts, before it is applied here."""
    commit = Hosts.commit
    _replace(Hosts, "commit", lambda self, *error: (commit(self, *error), Now.step >= step and die())[0])


def last_of_two(step: int) -> None:
    """Die before the first message of an exchange that the other rank of this host has received all of."""
    watch = ElasticComm._watch

    def waiting(self: ElasticComm, *args: Any) -> Any:
        if Now.step >= step:
            wait_until((Now.folder / f"{Now.sibling}.voting{Now.step}").exists)
            die()
        return watch(self, *args)

    _replace(ElasticComm, "_watch", waiting)


def before_others_vote(step: int) -> None:
    """Die with all of an exchange received, before the other rank of this host may have."""
    vote = ElasticAverager._vote
    _replace(ElasticAverager, "_vote", lambda *args: (Now.step >= step and die(), vote(*args))[1])


def slowly(step: int) -> None:
    """Send nothing for a second within an exchange."""
    _once_in_an_exchange(step, lambda: time.sleep(1))


def stand_still(step: int) -> None:
    """Stop within an exchange, and go on when the other rank of this host has ended."""
    sibling = Now.folder / f"{Now.sibling}.pid"
    _once_in_an_exchange(step, lambda: _stop_until(lambda: not _is_there(int(sibling.read_text()))))


def _is_there(process: int) -> bool:
    """Whether a process is there that has not ended."""
    with suppress(OSError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def fail(step: int) -> None:
    """Raise within a step."""
    between = ElasticAverager.between_steps

    def failing(self: ElasticAverager) -> None:
        if self.steps >= step:
            raise ArithmeticError("a rank has failed")
        between(self)

    _replace(ElasticAverager, "between_steps", failing)


def handing_on(step: int) -> None:
    """Die when one that joins has asked this host for what it needs."""
    saved = ElasticAverager._saved
    _replace(ElasticAverager, "_saved", lambda self: (Now.step >= step and die(), saved(self))[1])


def stop_for_a_while(step: int) -> None:
    """Stop within an exchange for longer than the others wait, and go on when host 0 is at some step."""
    began = (Now.folder / f"0.at{Now.until}").exists
    _once_in_an_exchange(step, lambda: _stop_until(began, at_least_s=4))


def stop_in_a_meeting(step: int) -> None:
    """Stop while this host waits for others to meet, for longer than it may wait, and go on."""
    ask = Hosts._ask

    def stopping(self: Hosts, committed: int, *limit: Any) -> None:
        if committed >= step and not Now.killed:
            Now.killed, own = True, os.getpid()
            if os.fork() == 0:
                time.sleep(0.3)
                os.kill(own, signal.SIGSTOP)
                time.sleep(self._settings.quorum_timeout + 2)
                os.kill(own, signal.SIGCONT)
                os._exit(0)
        ask(self, committed, *limit)

    _replace(Hosts, "_ask", stopping)


def answer_lost(step: int) -> None:
    """Lose one answer of the lighthouse, which the other hosts get, and ask again."""
    ask = Hosts._ask

    def again(self: Hosts, committed: int, *limit: Any) -> None:
        ask(self, committed, *limit)
        if committed >= step and not Now.killed:
            Now.killed = True
            (Now.folder / "lost").touch()
            ask(self, committed)

    _replace(Hosts, "_ask", again)


def cut_for_a_while(step: int) -> None:
    """Take this host's link away within an exchange, for some seconds."""

    def cut() -> None:
        subprocess.run(["ip", "link", "set", "dev", INTERFACE, "down"], check=True)
        if os.fork() == 0:
            time.sleep(Now.cut_s)
            subprocess.run(["ip", "link", "set", "dev", INTERFACE, "up"], check=True)
            os._exit(0)

    _once_in_an_exchange(step, cut)


def _once_in_an_exchange(step: int, act: Callable[[], None]) -> None:
    """``act`` before a message of an exchange, after this ``step`` at the earliest."""
    watch = ElasticComm._watch

    def acting(self: ElasticComm, *args: Any) -> Any:
        if Now.step >= step and not Now.killed:
            Now.killed = True
            act()
        return watch(self, *args)

    _replace(ElasticComm, "_watch", acting)


def _stop_until(is_over: Callable[[], bool], at_least_s: float = 0.0) -> None:
    """Stop this process (SIGSTOP), and have it go on when it ``is_over``, as another one finds."""
    own = os.getpid()
    if os.fork() == 0:
        try:
            time.sleep(at_least_s)
            wait_until(is_over)
        finally:
            os.kill(own, signal.SIGCONT)
            os._exit(0)
    os.kill(own, signal.SIGSTOP)


FATAL = (before, within, half_a_vote, after, handing_on, last_of_two, before_others_vote)
OTHERS = (slowly, stand_still, fail, stop_for_a_while, stop_in_a_meeting, answer_lost, cut_for_a_while)
FAULTS = {each.__name__: each for each in (*FATAL, *OTHERS)}


def _replace(owner: type, name: str, function: Any) -> None:
    setattr(owner, name, function)


# - a host, and what it notes


def train(rank: int, size: int, plan: Plan) -> dict[str, Any]:
    """Train as one rank of a host; returns what it has at the end."""
    host, own = divmod(rank, plan.devices)
    Now.rank, Now.sibling = rank, host * plan.devices + (own + 1) % plan.devices
    Now.folder, Now.cut_s, Now.until = plan.folder, plan.cut_s, plan.stops_until
    (plan.folder / f"{rank}.pid").write_text(str(os.getpid()))
    as_a_host(plan.lighthouse, own, plan.devices, plan.folder / f"host{host}.port")
    journal = (plan.folder / f"{rank}.journal").open("ab", buffering=0)

    def note(*entry: Any) -> None:
        journal.write(pickle.dumps(entry))

    _note_exchanges(note)
    if rank in plan.faults:
        name, step = plan.faults[rank]
        FAULTS[name](step)

    start = Hosts._start

    def start_together(self: Hosts) -> None:
        """Have the lighthouse know all first hosts before one asks it who is there."""
        if host in plan.joins:
            wait_until((plan.folder / f"0.at{plan.joins[host]}").exists)
        start(self)
        (plan.folder / f"{rank}.started").touch()
        first = [other for other in range(size) if other // plan.devices not in plan.joins and host not in plan.joins]
        wait_until(lambda: all((plan.folder / f"{other}.started").exists() for other in first))
        time.sleep(HEARTBEATS_S)

    _replace(Hosts, "_start", start_together)

    def at_batch(run: Any) -> None:
        averager = run.strategy.averager
        (plan.folder / f"{rank}.at{run.global_step}").touch()
        if averager.members < plan.slow_below:
            time.sleep(plan.slow_s)
        if not (plan.folder / CALM).exists():
            time.sleep(plan.sleeps.get(rank, 0.0))
        note("epoch", run.global_step, run.current_epoch)
        note("state", averager._membership.committed, _bits(averager), _rate(run), run.global_step)

    elastic = ls.Elastic(
        min_hosts=plan.min_hosts,
        timeout=plan.timeout_s,
        quorum_timeout=plan.quorum_timeout_s,
        replica_id=f"host{host}",
        address=plan.addresses.get(host),
        own_pace=plan.own_pace,
    )
    local = plan.local | ({"local_steps": 7} if host == plan.odd else {})
    strategy = ls.SparseDDPStrategy(plan.compressor, elastic=elastic, **local)
    begun = Does("on_train_batch_start", at_batch)
    callbacks: list[Any] = [begun]
    if plan.saves:
        callbacks.append(ModelCheckpoint(dirpath=plan.folder / f"host{host}", every_n_train_steps=3, save_last=True))
    run = trainer(strategy, plan.devices, check_every=0, max_steps=plan.steps, callbacks=callbacks, **plan.options)
    model = plan.model(seed=host)
    if plan.falls:
        model.configure_optimizers = partial(falling, model)  # type: ignore[method-assign]
    of = host if run._accelerator_connector.use_distributed_sampler else rank
    loader = data(plan.batches or 4 * plan.steps, plan.devices if of == host else 1, seed=of)
    run.fit(model, loader, ckpt_path=plan.checkpoints.get(host))
    averager: Any = strategy.averager
    return {
        "step": run.global_step,
        "bits": _bits(averager),
        "seed": getattr(run.train_dataloader.sampler, "seed", host),  # type: ignore[union-attr]
        "module": weights(model),
        "statistics": torch.cat([x.flatten().double() for x in [torch.zeros(0), *model.buffers()]]),
        "metrics": averager.metrics(),
        "hosts": averager.members,
        "rate": _rate(run),
        "schedules": [each.scheduler.last_epoch for each in run.lr_scheduler_configs],
        "optimizer": {int(state.get("step", 0)) for state in run.optimizers[0].state.values()},
        "batches": len(begun.found),
        "sent": sum(lane.comm.sent_bytes for lane in averager.lanes),
    }


def train_in(rank: int, size: int, namespaces: list[str], plan: Plan) -> dict[str, Any]:
    """``train`` on an emulated host, whose network namespace this process joins."""
    join_namespace(namespaces[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
    return train(rank, size, plan)


def falling(model: torch.nn.Module) -> Any:
    """An Adam whose learning rate falls by three schedules: in each step of the training, in each second and third."""
    adam = torch.optim.Adam(model.parameters(), lr=RATE)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(adam, FALLS_BY) for _ in EVERY]
    steps = [{"scheduler": each, "interval": "step", "frequency": n} for each, n in zip(schedules, EVERY, strict=True)]
    return [adam], steps


def rate_after(steps: int) -> float:
    """What ``falling`` comes to."""
    return RATE * FALLS_BY ** sum(fallen_after(steps))


def fallen_after(steps: int) -> list[int]:
    """How often each schedule has fallen."""
    return [steps // every for every in EVERY]


def _rate(run: Any) -> float:
    return float(run.optimizers[0].param_groups[0]["lr"])


def join_namespace(path: str) -> None:
    """Have this process see the network of an emulated host."""
    with Path(path).open() as namespace:
        assert ctypes.CDLL(None).setns(namespace.fileno(), 0) == 0


def as_a_host(lighthouse: str, rank: int = 0, size: int = 1, port: Path | None = None) -> None:
    """Take the place of a rank of torchrun away from this process: it is one of a training of its own.

    The first rank of a host writes the ``port`` at which they find each other into a file.
    """
    if rank == 0 or port is None:
        found = str(free_port())
        if port is not None:
            port.with_suffix(".new").write_text(found)
            port.with_suffix(".new").rename(port)
    else:
        wait_until(port.exists)
        found = port.read_text()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), LOCAL_WORLD_SIZE=str(size))
    os.environ.update(MASTER_PORT=found, TORCHFT_LIGHTHOUSE=lighthouse)


def _bits(averager: Any) -> int:
    return sum((i + 1) * int(checksum(x)) for i, x in enumerate(averager.averages.values()))


def _note_exchanges(note: Callable[..., None]) -> None:
    """Note of each group's turn what was unsent before and after, and how x̄ moved, times the steps' length."""
    send, snapshot, apply = LocalAverager._send, Replica.snapshot, Replica.apply_move
    vote = ElasticAverager._vote
    known: dict[Replica, tuple[int, int, Tensor, Tensor]] = {}

    def sending(self: LocalAverager) -> None:
        Now.step, Now.launched, Now.size = self.steps, 0, self.members  # type: ignore[attr-defined]
        send(self)

    def taking(self: Replica, size: int) -> None:
        snapshot(self, size)
        known[self] = Now.step, Now.size, self.group.unsent.clone(), self.average.clone()  # type: ignore[attr-defined]

    def applying(self: Replica) -> None:
        apply(self)
        step, size, unsent, average = known.pop(self)
        moved = (self.average - average) * (self._settings.lead or 1.0)
        note("turn", step, self.group.index, size, unsent, self.group.unsent.clone(), moved, self.average.clone())

    def voting(self: ElasticAverager, *args: Any) -> None:
        (Now.folder / f"{Now.rank}.voting{Now.step}").touch()
        vote(self, *args)

    _replace(ElasticAverager, "_vote", voting)
    _replace(LocalAverager, "_send", sending)
    _replace(Replica, "snapshot", taking)
    _replace(Replica, "apply_move", applying)


# - what all have noted


@dataclass
class Journals:
    """What hosts have noted, of those that were killed too."""

    folder: Path
    devices: int = 1  # of a host

    def __post_init__(self) -> None:
        self.entries: dict[int, list[Any]] = {}
        for path in self.folder.glob("*.journal"):
            self.entries[int(path.stem)] = list(_entries(path))

    def check_bits(self) -> None:
        """Whoever is as far has the same x̄."""
        found: dict[tuple[int, int], set[int]] = defaultdict(set)
        for rank, entries in self.entries.items():
            for _, committed, bits, *_ in (each for each in entries if each[0] == "state"):
                found[rank % self.devices, committed].add(bits)
        assert not {committed: bits for committed, bits in found.items() if len(bits) > 1}

    def check_steps(self, steps: int) -> None:
        """Some host has taken each of so many steps as its own, and in each all have the same learning rate."""
        states = [each for entries in self.entries.values() for each in entries if each[0] == "state"]
        assert {step for *_, step in states} == set(range(steps))
        for *_, rate, step in states:
            assert math.isclose(rate, rate_after(step), rel_tol=1e-9), (step, rate, rate_after(step))

    def check_epochs(self) -> None:
        """Whoever is at the same step is in the same epoch."""
        found: dict[int, set[int]] = defaultdict(set)
        for entries in self.entries.values():
            for _, step, epoch in (each for each in entries if each[0] == "epoch"):
                found[step].add(epoch)
        several = {step: epochs for step, epochs in found.items() if len(epochs) > 1}
        assert not several, several

    def check_law(self) -> dict[int, int]:
        """P * moved + unsent after == unsent before, over all that took part; returns checks by P."""
        turns: dict[tuple[int, int, int], list[Any]] = defaultdict(list)
        for rank, entries in self.entries.items():
            for _, step, index, *rest in (each for each in entries if each[0] == "turn"):
                turns[rank % self.devices, step, index].append(rest)
        checked: dict[int, int] = defaultdict(int)
        for hosts in turns.values():
            sizes, before, after, moved, average = zip(*hosts, strict=True)
            assert len(set(sizes)) == 1
            assert all(torch.equal(each, moved[0]) for each in moved)
            assert all(torch.equal(each, average[0]) for each in average)
            if len(hosts) == sizes[0]:  # else one has died before it could note it
                left = sum(x.double() for x in before) - sum(x.double() for x in after)
                error = (left - sizes[0] * moved[0].double()).abs().max()
                assert error <= MOST_ERROR * max(1.0, float(average[0].abs().max())), error
                checked[sizes[0]] += 1
        return dict(checked)

    def check_columns(self) -> None:
        """A turn has counted for all ranks of a host or for none, but for the last one before a rank was killed."""
        for first in range(0, max(self.entries) + 1, self.devices):
            turns = [[each[1:4] for each in self.entries[first + i] if each[0] == "turn"] for i in range(self.devices)]
            shortest = min(map(len, turns))
            assert len({tuple(each[:shortest]) for each in turns}) == 1
            assert max(map(len, turns)) - shortest <= MOST_GROUPS


def _entries(path: Path) -> Any:
    with path.open("rb") as file, suppress(EOFError, pickle.UnpicklingError):  # the last one may be cut off
        while True:
            yield pickle.load(file)

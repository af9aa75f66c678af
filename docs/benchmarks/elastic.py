"""Loss of the byte model where hosts die and come back, or where one is slow, and seconds to a loss.

    python docs/benchmarks/elastic.py faults --hosts 3 --steps 350
    python docs/benchmarks/elastic.py kinds --hosts 3 --devices 2 --steps 300
    python docs/benchmarks/elastic.py unequal --hosts 2 --steps 400

``faults``: a host dies every 100 steps and comes back after 30, as a new process that joins the others; beside a
training without faults, and one whose ranks torchrun starts again from a checkpoint of every 100 steps.  ``kinds``:
one fault of each kind, after 100 steps, and after 30 more a new host in the place of one that is gone.  ``unequal``:
one host has half of a processor, with and without ``own_pace``.  Every rank is a process of this machine; the extra
"elastic" installs the lighthouse.  Losses are of x̄, on text that nobody trains on.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from simulate import validation_loss

import lightning_sparse as ls
from lightning_sparse.bench.compare.ranks import free_port
from lightning_sparse.bench.compare.workloads import byte_lm, learning_rate

PEAK = 3e-3  # the learning rate, which falls as a cosine
OFTEN, BACK_AFTER, CHECKPOINT = 100, 30, 100  # steps
FIRST_AT = 50  # steps, half-way from one checkpoint to the next
KEEP = 25  # steps, after which the average is kept, to be judged at the end
LIMIT_S = 15  # to end
HALF_S = 0.05  # that a host at half a processor is stopped, and goes on
RENDEZVOUS = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"  # torchrun waits no longer


class Model(L.LightningModule):
    """The byte model, its batches by host and step, and its schedule."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.task, self.steps = byte_lm(0), steps
        self.model = self.task.model

    def training_step(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return self.model.training_step(batch)

    def configure_optimizers(self) -> dict:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(PEAK, step, self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Diary(L.Callback):
    """Writes each step to a file, keeps the average now and then, and what is left at the end."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.file, self.next, self.batches = folder, folder / f"{number}.json", KEEP, 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        self.batches += 1
        self._note(trainer, {})
        if self.file.stem == "1" and trainer.global_step >= self.next:
            self.next = trainer.global_step - trainer.global_step % KEEP + KEEP
            average = trainer.strategy.lightning_module_state_dict()
            if trainer.is_global_zero:
                torch.save((time.time(), average), self.folder / f"{time.time():.3f}.pt")

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.strategy.show_average()
        said = trainer.strategy.averager.metrics() | {"end_s": time.time()}
        self._note(trainer, said | {"loss": validation_loss(module.task)})

    def _note(self, trainer: L.Trainer, more: dict[str, Any]) -> None:
        if not trainer.is_global_zero:
            self.file.with_suffix(".pid").write_text(str(os.getpid()))
            return
        said = {"step": trainer.global_step, "pid": os.getpid(), "batches": self.batches}
        self.file.with_suffix(".new").write_text(json.dumps(said | more))
        self.file.with_suffix(".new").rename(self.file)


def work(args: argparse.Namespace) -> None:
    """Train as the host of number ``--work``, or as a rank of torchrun."""
    torch.set_num_threads(1)
    folder, restarts = Path(args.folder), "TORCHELASTIC_RUN_ID" in os.environ
    model = Model(args.steps)
    task = model.task
    saved = sorted(folder.glob("*.ckpt"), key=lambda path: path.stat().st_mtime) if restarts else []
    own = int(os.environ.get("LOCAL_RANK", "0"))
    generator = torch.Generator().manual_seed(args.work + 100 * own + 1000 * len(saved))

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[list[torch.Tensor]]:
            while True:
                chosen = torch.randint(len(task.training[0]), (task.batch_size,), generator=generator)
                yield [task.training[0][chosen]]

    hosts = ls.Elastic(timeout=args.timeout, replica_id=f"host{args.work}", own_pace=args.own_pace)
    strategy = ls.SparseDDPStrategy("sparse_dense", local_steps=2, wire_dtype="int4", elastic=not restarts and hosts)
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=CHECKPOINT, save_top_k=-1)
    trainer = L.Trainer(
        accelerator="cpu", devices=args.devices, strategy=strategy, max_steps=args.steps, logger=False,
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]) if restarts else 1,
        callbacks=[Diary(folder, args.work), *([saver] if restarts else [])], enable_checkpointing=restarts,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(Stream(), batch_size=None), ckpt_path=saved[-1] if saved else None)


@dataclass
class Host:
    """A process, or torchrun and its rank, and where it notes how far it is."""

    process: subprocess.Popen
    diary: Path

    def note(self) -> dict[str, Any]:
        with suppress(OSError, ValueError):
            return json.loads(self.diary.read_text())
        return {"step": -1}

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            self.process.send_signal(number)
            if "pid" in (note := self.note()):
                os.kill(note["pid"], number)

    def signal_other(self, number: int) -> None:
        """Send it to another rank of this host than the first."""
        with suppress(OSError):
            os.kill(int(self.diary.with_suffix(".pid").read_text()), number)


class Training:
    """One training of several hosts in a folder of its own."""

    def __init__(self, args: argparse.Namespace, fewest: int, own_pace: bool = False, restarts: bool = False) -> None:
        self.fewest = fewest
        self.args, self.folder, self.port, self.begun = args, Path(tempfile.mkdtemp()), free_port(), 0
        self.restarts, self.own_pace = restarts, own_pace
        self.environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.environment |= {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{self.port}"}
        self.environment |= {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self.lighthouse: subprocess.Popen | None = None
        self.hosts = [self.start() for _ in range(args.hosts)]

    def start(self) -> Host:
        """Start one host more."""
        self.begun += 1
        program = [sys.executable]
        if self.restarts:
            program += ["-m", "torch.distributed.run", f"--nnodes=1:{self.args.hosts}", "--max-restarts=100"]
            program += ["--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{self.port}", "--rdzv-id=1"]
            program += [f"--rdzv-conf={RENDEZVOUS},is_host={int(self.begun == 1)}", "--local-addr=localhost"]
            program += ["--monitor-interval=0.1", f"--nproc-per-node={self.args.devices}"]
        program += [str(Path(__file__).resolve()), "work", "--work", str(self.begun), "--folder", str(self.folder)]
        program += ["--steps", str(self.args.steps), "--devices", str(self.args.devices)]
        program += ["--timeout", str(self.args.timeout)]
        program += [*(["--own-pace"] if self.own_pace else [])]
        process = subprocess.Popen(program, env=self.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return Host(process, self.folder / f"{self.begun}.json")

    def run(self, beside: Callable[["Training"], None]) -> dict[str, Any]:
        """Return what the first host has at its end, and seconds since its first step; ``beside`` is called often."""
        if not self.restarts:
            self.start_lighthouse()
        try:
            while self.hosts[0].note()["step"] < 0 and self.hosts[0].process.poll() is None:
                time.sleep(0.02)
            start_s = time.time()
            while self.hosts[0].process.poll() is None:
                beside(self)
            for host in self.hosts[1:]:
                host.signal(signal.SIGCONT)
                with suppress(subprocess.TimeoutExpired):  # one that came after the end waits for others
                    host.process.wait(LIMIT_S)
            ends = [host.note() for host in self.hosts]
        finally:
            for host in self.hosts:
                host.signal(signal.SIGKILL)
                host.signal_other(signal.SIGKILL)
            if self.lighthouse is not None:
                self.lighthouse.kill()
        end = ends[0]
        own = "/".join(str(each.get("batches", 0)) for each in ends)
        return end | {"seconds": end["end_s"] - start_s, "to": self._when(self.args.loss) - start_s, "own": own}

    def start_lighthouse(self) -> None:
        """Start it, at the same address as before."""
        program = Path(sys.executable).with_name("torchft_lighthouse")
        limits = ["--min_replicas", str(self.fewest), "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "10000"]
        command = [program, "--bind", f"[::]:{self.port}", *limits]
        self.lighthouse = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def _when(self, loss: float) -> float:
        """The time of the first average of this loss."""
        model = Model(self.args.steps)
        for path in sorted(self.folder.glob("*.pt"), key=lambda path: float(path.stem)):
            then_s, averages = torch.load(path)
            model.load_state_dict(averages, strict=False)
            if validation_loss(model.task) <= loss:
                return then_s
        return float("nan")


class Faults:
    """Kills the last host every so many steps of the first one, and starts another."""

    def __init__(self) -> None:
        self.killed = 0

    def __call__(self, training: Training) -> None:
        time.sleep(0.02)
        hosts, step = training.hosts, training.hosts[0].note()["step"]
        at = FIRST_AT + OFTEN * self.killed
        if len(hosts) == training.args.hosts and at <= step < training.args.steps - BACK_AFTER - 10:
            self.killed += 1
            hosts.pop().signal(signal.SIGKILL)
        elif len(hosts) < training.args.hosts and step >= at - OFTEN + BACK_AFTER:
            hosts.append(training.start())


class Fault:
    """Has the last host, or the lighthouse, a fault, and starts another host where that has ended."""

    def __init__(self, kind: str) -> None:
        self.kind, self.faulty, self.is_over = kind, None, False

    def __call__(self, training: Training) -> None:
        time.sleep(0.02)
        step = training.hosts[0].note()["step"]
        if self.is_over or step < OFTEN:
            return
        if self.kind == "the lighthouse starts again":
            training.lighthouse.kill()
            training.lighthouse.wait()
            training.start_lighthouse()
            self.is_over = True
        elif self.faulty is None:
            self.faulty = training.hosts.pop()
            KINDS[self.kind](self.faulty)
        elif step >= OFTEN + BACK_AFTER:
            self.faulty.signal(signal.SIGKILL)
            self.faulty.signal_other(signal.SIGKILL)
            training.hosts.append(training.start())
            self.is_over = True


KINDS = {
    "rank 0 of a host is killed": lambda host: host.signal(signal.SIGKILL),
    "rank 1 of a host is killed": lambda host: host.signal_other(signal.SIGKILL),
    "rank 0 of a host stands still": lambda host: host.signal(signal.SIGSTOP),
    "rank 1 of a host stands still": lambda host: host.signal_other(signal.SIGSTOP),
    "the lighthouse starts again": None,
}


def kinds(args: argparse.Namespace) -> None:
    """Print what a fault of each kind costs."""
    print(f"| | hosts at the end | exchanges dropped | held-out loss | seconds | to {args.loss:g} |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in ("undisturbed", *KINDS):
        if "rank 1" in name and args.devices == 1:
            continue
        end = Training(args, args.hosts - 1).run(Fault(name) if name in KINDS else wait)
        hosts, dropped = end.get("sparse/hosts", 0), end.get("sparse/dropped_exchanges", 0)
        print(
            f"| {name} | {hosts:.0f} | {dropped:.0f} | {end['loss']:.4f} | {end['seconds']:.0f} | {end['to']:.0f} |",
            flush=True,
        )


def halve(training: Training) -> None:
    """Let the last host have a processor for half of the time."""
    for number in (signal.SIGSTOP, signal.SIGCONT):
        if training.hosts[-1].process.poll() is None:
            training.hosts[-1].process.send_signal(number)
        time.sleep(HALF_S)


def wait(_: Training) -> None:
    """Leave the hosts alone."""
    time.sleep(0.02)


def faults(args: argparse.Namespace) -> None:
    """Print what dying hosts cost."""
    print(f"| | hosts killed | exchanges dropped | held-out loss | seconds | to {args.loss:g} |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, restarts, dying in (
        ("undisturbed", False, False),
        ("a host killed every 100 steps, back after 30", False, True),
        ("the same, torchrun starts all from the last checkpoint", True, True),
    ):
        beside = Faults() if dying else wait
        end = Training(args, args.hosts - dying, restarts=restarts).run(beside)
        killed, dropped = getattr(beside, "killed", 0), end.get("sparse/dropped_exchanges", 0)
        print(
            f"| {name} | {killed} | {dropped:.0f} | {end['loss']:.4f} | {end['seconds']:.0f} | {end['to']:.0f} |",
            flush=True,
        )


def unequal(args: argparse.Namespace) -> None:
    """Print what a slow host costs."""
    print(f"| | own steps of each host | held-out loss | seconds | to {args.loss:g} |\n| --- | --- | --- | --- | --- |")
    for name, beside, own_pace, more in (
        ("equal hosts", wait, False, 1.0),
        ("one at half a processor", halve, False, 1.0),
        ("the same, `own_pace=True`", halve, True, 1.0),
        ("the same, half as many steps more", halve, True, 1.5),
    ):
        settings = argparse.Namespace(**vars(args) | {"steps": round(args.steps * more)})
        end = Training(settings, args.hosts, own_pace=own_pace).run(beside)
        print(f"| {name} | {end['own']} | {end['loss']:.4f} | {end['seconds']:.0f} | {end['to']:.0f} |", flush=True)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["faults", "kinds", "unequal", "work"], help="work: of this program itself")
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--devices", type=int, default=1, help="of each host")
    parser.add_argument("--steps", type=int, default=350)
    parser.add_argument("--loss", type=float, default=2.2, help="nats a byte, which the seconds are to")
    parser.add_argument("--work", type=int, help="the number of this host")
    parser.add_argument("--folder", help="where it writes")
    parser.add_argument("--timeout", type=float, default=20, help="for a message, and for a rank that stands still")
    parser.add_argument("--own-pace", action="store_true")
    args = parser.parse_args()
    {"faults": faults, "kinds": kinds, "unequal": unequal, "work": work}[args.what](args)


if __name__ == "__main__":
    main()

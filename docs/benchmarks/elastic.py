"""Loss of the byte model where a host dies every 100 steps and comes back after 30, beside a training without faults.

    python docs/benchmarks/elastic.py --hosts 3 --steps 300

Every host is a process of this machine; all are joined by a lighthouse of torchft, which the extra "elastic" installs.
Who comes back is a new process that joins the others.  The loss is of x̄, on text that nobody trains on.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import lightning as L
import torch

import lightning_sparse as ls
from lightning_sparse.bench.compare.byte_lm import byte_lm, learning_rate

PEAK = 3e-3  # the learning rate, which falls as a cosine
LIMIT_S = 60  # to start


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
    """Writes each step to a file, and what is left at the end."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
        self.file.write_text(json.dumps({"step": trainer.global_step}))

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        trainer.strategy.show_average()
        said = trainer.strategy.exchange.metrics()
        self.file.write_text(json.dumps(said | {"step": trainer.global_step, "loss": module.task.validation_loss()}))


def work(args: argparse.Namespace) -> None:
    """Train as one host; ``--work`` has its number."""
    torch.set_num_threads(1)
    model = Model(args.steps)
    generator = torch.Generator().manual_seed(int(args.work))
    task = model.task

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[list[torch.Tensor]]:
            while True:
                chosen = torch.randint(len(task.training[0]), (task.batch_size,), generator=generator)
                yield [task.training[0][chosen]]

    strategy = ls.SparseDDPStrategy(
        "sparse_dense", local_steps=2, wire_dtype="int4", elastic=ls.Elastic(timeout=20, replica_id=f"host{args.work}")
    )
    trainer = L.Trainer(
        accelerator="cpu", devices=1, strategy=strategy, max_steps=args.steps, callbacks=[Diary(Path(args.diary))],
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, torch.utils.data.DataLoader(Stream(), batch_size=None))


def step_of(diary: Path) -> int:
    """The last step that a host has noted; -1 before the first."""
    with suppress(OSError, ValueError):
        return json.loads(diary.read_text())["step"]
    return -1


def train(args: argparse.Namespace, faults: bool) -> dict[str, float]:
    """One training; returns what host 0 has at its end."""
    folder = Path(tempfile.mkdtemp())
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    program = Path(sys.executable).with_name("torchft_lighthouse")
    limits = ["--min_replicas", "1", "--heartbeat_timeout_ms", "1000", "--join_timeout_ms", "10000"]
    lighthouse = subprocess.Popen([program, "--bind", f"[::]:{port}", *limits], stderr=subprocess.DEVNULL)
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}", "GLOO_SOCKET_IFNAME": "lo"}
    begun = 0

    def start() -> tuple[subprocess.Popen, Path]:
        nonlocal begun
        begun += 1
        diary = folder / f"{begun}.json"
        own = [sys.executable, str(Path(__file__).resolve()), "--steps", str(args.steps), "--work", str(begun)]
        return subprocess.Popen([*own, "--diary", str(diary)], env=environment, stderr=subprocess.DEVNULL), diary

    try:
        hosts = [start() for _ in range(args.hosts)]
        start_s, killed = time.perf_counter(), 0
        while hosts[0][0].poll() is None:
            time.sleep(0.02)
            step = step_of(hosts[0][1])
            if faults and len(hosts) == args.hosts and step >= 100 * killed + 100 and step < args.steps - 40:
                killed += 1
                hosts.pop()[0].send_signal(signal.SIGKILL)
            if faults and len(hosts) < args.hosts and step >= 100 * killed + 30:
                hosts.append(start())
        for host, _ in hosts[1:]:
            host.wait(LIMIT_S)
        seconds = time.perf_counter() - start_s
        return json.loads(hosts[0][1].read_text()) | {"killed": killed, "seconds": seconds}
    finally:
        for host, _ in hosts:
            host.kill()
        lighthouse.kill()


def main() -> None:
    """Train twice, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--work", help="of this program: it is the host of this number")
    parser.add_argument("--diary", help="where that host writes")
    args = parser.parse_args()
    if args.work:
        work(args)
        return
    print(
        "| | hosts killed | held-out loss, nats a byte | exchanges dropped | seconds |\n| --- | --- | --- | --- | --- |"
    )
    for name, faults in (("undisturbed", False), ("a host killed every 100 steps, back after 30", True)):
        end = train(args, faults)
        dropped = end["sparse/dropped_exchanges"]
        print(f"| {name} | {end['killed']} | {end['loss']:.4f} | {dropped:.0f} | {end['seconds']:.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""Train as one host of the demo: each strategy in turn, in an ordinary Trainer.

    torchrun --nproc-per-node 4 examples/demo_rank.py "ddp;sparse_auto" --seconds 10

`examples/demo.py` starts one in each of its hosts. Rank 0 writes what it has measured every now and then, as JSON.
"""

import argparse
import gc
import json
import logging
import math
import time
import warnings
from dataclasses import replace
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.fabric.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import Strategy
from torch.utils.data import DataLoader, TensorDataset

import lightning_sparse as ls
from lightning_sparse.auto.policy import CANDIDATES
from lightning_sparse.bench.compare.callbacks import Judge, LearningRate, Probe
from lightning_sparse.bench.compare.strategies import PEERS, StrategySpec
from lightning_sparse.bench.compare.workloads import byte_lm, workload_named

WINDOWS = 2  # of 64 bytes, that a host learns from in a step
TELL_S = 0.2  # between two lines
EVERYTHING_OFF: dict[str, Any] = dict.fromkeys(
    ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
)


class OnLink(Probe):
    """Adds to each step the seconds in which its bytes would pass a link, where there is none to wait for."""

    def __init__(self, s_per_byte: float) -> None:
        super().__init__(None, learns=True)
        self._s_per_byte = s_per_byte

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        super().on_train_batch_end(*args, **kwargs)
        last = self.steps[-1]
        self.steps[-1] = replace(last, s=last.s + last.counted_bytes * self._s_per_byte)


class Tell(L.Callback):
    """Writes what has been measured so far, after each evaluation and every now and then; to be called last."""

    def __init__(self, strategy: str, probe: Probe) -> None:
        self._strategy, self._probe = strategy, probe
        self._told_s = 0.0

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        steps, now = self._probe.steps, time.monotonic()
        if not trainer.is_global_zero or (steps[-1].held_out is None and now < self._told_s + TELL_S):
            return
        self._told_s = now
        sent_bytes = sum(step.counted_bytes if step.wire_bytes is None else step.wire_bytes for step in steps)
        figures = {"strategy": self._strategy, "seconds": sum(step.s for step in steps), "steps": len(steps)}
        print(json.dumps({**figures, "sent_bytes": sent_bytes, "loss": steps[-1].held_out}), flush=True)


def strategy_named(name: str) -> str | Strategy:
    """Return what a Trainer takes: `sparse_auto` as it is, a peer that counts its bytes, or a candidate."""
    if name == "sparse_auto":
        return name
    if name in PEERS:
        return StrategySpec(name, name).build()
    candidate = next(each for each in CANDIDATES if str(each) == name)
    return ls.SparseDDPStrategy(
        candidate.compressor, wire_dtype=candidate.wire_dtype, local_steps=candidate.local_steps
    )


def train(name: str, probe: Probe, seconds: float, seed: int) -> None:
    """Train the byte language model for so many seconds, evaluations not counted."""
    L.seed_everything(seed, verbose=False)  # each strategy begins with the same model
    workload = workload_named("byte_lm")
    judge = Judge(probe, workload.held_out()[::2], lowest=-math.inf, seconds=seconds, least=1)
    trainer = L.Trainer(
        strategy=strategy_named(name),
        num_nodes=TorchElasticEnvironment().world_size(),
        devices=1,
        accelerator="cpu",
        max_epochs=-1,
        callbacks=[probe, LearningRate(None, workload.schedule), judge, Tell(name, probe)],
        plugins=[TorchElasticEnvironment()],
        **EVERYTHING_OFF,
    )
    windows = TensorDataset(*byte_lm(seed).training)
    trainer.fit(workload.module(), DataLoader(windows, WINDOWS, shuffle=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("strategies", help="separated by semicolons")
    parser.add_argument("--seconds", type=float, default=10, help="of each training")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--interface", help="whose sent bytes the kernel is asked for; not given: messages are counted")
    parser.add_argument("--s-per-byte", type=float, help="of a link, added to each step for the bytes it sent")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    for name in args.strategies.split(";"):
        probe = OnLink(args.s_per_byte) if args.s_per_byte else Probe(args.interface, learns=True)
        train(name, probe, args.seconds, args.seed)
    dist.barrier()
    gc.collect()  # what is left of DistributedDataParallel goes before its process group
    dist.destroy_process_group()  # else Python may end while Gloo's threads run, and abort


if __name__ == "__main__":
    main()

"""Train what simulate.py trains with PyTorch's PowerSGD hook over Gloo.

Run: python docs/benchmarks/powersgd_loss.py DIR [PROCESSES]; results are added to DIR/simulate.jsonl, as powersgd_1 and
powersgd_4.  On fewer processes than ranks each has the windows of several.  The factors and the mean of what ranks keep
are linear in the gradients, so that the result is the same but for rounding: one process is soonest on few cores.
"""

import json
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from simulate import FILE, WEIGHT_DECAY, Result, Run, read, validation_loss
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from lightning_sparse.bench.compare.workloads import byte_lm, learning_rate
from lightning_sparse.network.comm import traffic

RANKS, STEPS = 4, 600
RATES, SEEDS = (2e-3, 4e-3, 8e-3), (0, 1, 2)
START = 2  # the first compressed step: the least PyTorch allows
ONE_BUCKET_MB = 1024


class Loss(nn.Module):
    """A model whose forward is its loss, as DDP wants it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Tensor) -> Tensor:
        """The loss of a batch."""
        loss: Tensor = self.model.training_step([batch])
        return loss


def train(process: int, processes: int, run: Run, folder: Path) -> None:
    """Train in one of the processes; the first writes the result down."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=process, world_size=processes)
    start_s, task, curve = time.perf_counter(), byte_lm(run.seed), []
    ddp = DistributedDataParallel(Loss(task.model), bucket_cap_mb=ONE_BUCKET_MB)
    power = int(run.strategy.removeprefix("powersgd_"))
    state = PowerSGDState(None, matrix_approximation_rank=power, start_powerSGD_iter=START)
    ddp.register_comm_hook(state, powerSGD_hook)
    optimizer = AdamW(ddp.parameters(), weight_decay=WEIGHT_DECAY)
    for step in range(run.steps):
        optimizer.zero_grad()
        ranks = range(process, run.ranks, processes)
        ddp(torch.cat([task.batch(run.seed, step, rank) for rank in ranks])).backward()
        optimizer.param_groups[0]["lr"] = learning_rate(run.learning_rate, step, run.steps)
        optimizer.step()
        if (step + 1) % (run.steps // 6) == 0 and process == 0:
            curve.append((step + 1, validation_loss(task)))
    if process == 0:
        parameters = sum(p.numel() for p in ddp.parameters())
        elements = START * parameters + state.total_numel_after_compression
        sent = traffic("all_reduce", 4 * elements, run.ranks) / run.steps / parameters
        result = Result(run, curve[-1][1], curve, sent, round(time.perf_counter() - start_s, 1))
        with (folder / FILE).open("a") as file:
            file.write(json.dumps(asdict(result)) + "\n")
    dist.destroy_process_group()


def result_of(run: Run, folder: Path, processes: int) -> Result:
    """The result of a training, which is trained if it is not known yet."""
    path = folder / FILE
    if run not in read(path):
        (folder / "store").unlink(missing_ok=True)
        spawn(train, (processes, run, folder), processes)
    return read(path)[run]


def main(folder: Path, processes: int = 1) -> None:
    """Train all: every learning rate with the first seed, the best with the others."""
    for strategy in ("powersgd_1", "powersgd_4"):
        runs = partial(Run, strategy, RANKS, STEPS)
        tried = [result_of(runs(rate, SEEDS[0]), folder, processes) for rate in RATES]
        rate = min(tried, key=lambda result: result.loss).run.learning_rate
        print(*(result_of(runs(rate, seed), folder, processes) for seed in SEEDS), sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *map(int, sys.argv[2:]))

"""Times plain sums in turn, within the same processes: DDP's, the bfloat16 hook's, and ours in long and short messages.

    python docs/benchmarks/plain_sums.py --workload gpt_3m --emulate 4x1gbit

Every rank has a copy of the model for each, so that a machine whose speed drifts is as slow for all.  A row has the
median step, the processor's time of a rank in it, and the ratio of each block of steps to DDP's beside it.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.bench.cluster import Cluster
from lightning_sparse.bench.compare.strategies import bf16_hook
from lightning_sparse.bench.compare.workloads import WORKLOADS, workload_named
from lightning_sparse.compressors.wrappers import Rounded
from lightning_sparse.engine.groups import hand_over_bytes

DENSE, BFLOAT16 = ls.Dense(), Rounded(ls.Dense(), "bfloat16")
BATCHES, SETTLING = 100, 8
LIMIT_S = 1_200


class Step(nn.Module):
    """A LightningModule whose forward is its training step."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        return self.module.training_step(batch)


class Contender:
    """A copy of the model that trains on its own; ``put_on`` registers what sums its gradients."""

    def __init__(self, name: str, workload: str, hand_over_mb: float, put_on: Callable[[Any], object]) -> None:
        torch.manual_seed(0)
        module, self.name = workload_named(workload).module(), name
        self.ddp = DistributedDataParallel(Step(module), bucket_cap_mb=hand_over_mb, process_group=dist.new_group())
        self.optimizer = torch.optim.AdamW(module.parameters())
        self.hook = put_on(self.ddp)
        self.blocks: list[list[tuple[float, float]]] = []

    def train(self, batches: Sequence[Any]) -> None:
        """Take a step with each batch; keep their seconds, and those of the processor."""
        dist.barrier()
        times = []
        for batch in batches:
            before = time.perf_counter(), time.process_time()
            loss = self.ddp(batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            times.append((time.perf_counter() - before[0], time.process_time() - before[1]))
        self.blocks.append(times)

    def medians_ms(self) -> list[float]:
        return [1e3 * median(each[0] for each in block) for block in self.blocks]

    def row(self, beside: "Contender") -> str:
        ratios = [own / other for own, other in zip(self.medians_ms(), beside.medians_ms(), strict=True)]
        low, middle, high = quantiles(ratios, n=4)
        seconds, busy = zip(*(step for block in self.blocks for step in block), strict=True)
        figures = f"{1e3 * median(seconds):.0f} | {1e3 * median(busy):.0f} | {middle:.2f} | {low:.2f} to {high:.2f}"
        return f"| {self.name} | {figures} |"


def ours(compressor: ls.Compressor, message_bytes: int, ddp: DistributedDataParallel) -> ls.SparseHook:
    """Sum where DDP has the gradients, in messages of so many bytes of float32, or the least that are more."""
    hook = ls.SparseHook(ddp, compressor, wire_dtype="float32", fusion="bucket")
    hook.averager.in_place.may = True
    payload_bytes = message_bytes if compressor is DENSE else message_bytes // 2
    hook.averager.lanes.set_latencies(*hook.averager.lanes.latencies[:2], payload_bytes)
    return hook


def contenders(workload: str, sizes_mb: Sequence[float]) -> list[Contender]:
    """DDP first, and again last, which shows what chance does; ours in messages of so many MiB of gradient."""
    parameters = workload_named(workload).module().parameters()
    hand_over_mb = hand_over_bytes(sum(parameter.nbytes for parameter in parameters)) / 2**20
    plain = partial(Contender, workload=workload, hand_over_mb=25, put_on=lambda ddp: None)
    found = [
        plain("`ddp`"),
        Contender("bf16 hook", workload, 25, lambda ddp: ddp.register_comm_hook(ddp.process_group, bf16_hook)),
    ]
    for compressor, kind in ((BFLOAT16, "bfloat16"), (DENSE, "float32")):
        for mb in sizes_mb:
            put_on = partial(ours, compressor, round(mb * 2**20))
            found.append(Contender(f"{kind}, messages of {mb:g} MiB of gradient", workload, hand_over_mb, put_on))
    return [*found, plain("`ddp`, again")]


def train(options: argparse.Namespace) -> None:
    """Train on this rank, and print the rows on the first."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    seed_everything(dist.get_rank(), verbose=False)
    loader = workload_named(options.workload).fit_arguments()["train_dataloaders"]
    batches = cycle(islice(iter(loader), BATCHES))
    every = contenders(options.workload, options.messages)
    for each in every:
        each.train(list(islice(batches, SETTLING)))
        each.blocks.clear()
    for number in range(options.rounds):
        for each in every[:: -1 if number % 2 else 1]:
            each.train(list(islice(batches, options.block)))
    if dist.get_rank() == 0:
        print("| | ms a step | ms of a processor | of `ddp`'s step | quartiles |\n| --- | ---: | ---: | ---: | --- |")
        print("\n".join(each.row(every[0]) for each in every), flush=True)
    dist.barrier()
    for each in every:
        if each.hook is not None:
            each.hook.close()
    os._exit(0)  # copies of DDP outlive their process groups


def main() -> None:
    """Start the ranks, or be one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", default="gpt_3m", choices=list(WORKLOADS))
    parser.add_argument("--emulate", default="4x1gbit", metavar="CLUSTER")
    parser.add_argument("--messages", type=float, nargs="+", default=[25, 4, 2, 1], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=14, help="blocks of steps of each, in turn")
    parser.add_argument("--block", type=int, default=5, metavar="STEPS")
    options = parser.parse_args()
    if "RANK" in os.environ:
        train(options)
        return
    with Cluster(options.emulate) as cluster:
        print(cluster.run([[sys.executable, __file__, *sys.argv[1:]]] * cluster.ranks, LIMIT_S)[0].stdout, end="")


if __name__ == "__main__":
    main()

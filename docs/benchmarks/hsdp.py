"""Steps of a model that is sharded inside two nodes, as PyTorch's HSDP takes them and with compressed averages.

    python docs/benchmarks/hsdp.py --inside 10gbit --between 100mbit

Two nodes are emulated, each with two processes; what crosses nodes is counted by the kernel.  The
ways take turns: some steps each, over and over.  Linux, as root or with user namespaces.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import lightning_sparse as ls
from lightning_sparse.bench.cluster import INTERFACE, Cluster
from lightning_sparse.bench.compare.workloads import CONTEXT, ByteGPT
from lightning_sparse.sharded.model import ShardedModel
from lightning_sparse.sharded_hook import ShardedHook, options_of

WAYS = {
    "native HSDP": None,
    "ours, float32": (ls.Dense(), "float32"),
    "ours, int4": (ls.Dense(), "int4"),
    "ours, micro 1 %": (ls.MiCRO(density=0.01), None),
}


class Training:
    """One way of training the same model."""

    def __init__(self, way: tuple[ls.Compressor, str | None] | None, width: int, layers: int) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        torch.manual_seed(0)
        self.model = ByteGPT(width, layers, heads=8)
        on = mesh if way is None else mesh["shard"]
        for block in self.model.blocks.layers:
            fully_shard(block, mesh=on)
        fully_shard(self.model, mesh=on)
        self.sharded = None
        if way is not None:
            self.sharded = ShardedModel(self.model, mesh)
            self.hook = ShardedHook(self.sharded, options_of(*way, 0), None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=5e-4)

    def step(self, batch: torch.Tensor) -> None:
        if self.sharded is not None:
            self.hook.begin_forward()
        loss = self.model(batch)
        if self.sharded is not None:
            self.hook.end_forward()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def forward(self: ByteGPT, batch: torch.Tensor) -> torch.Tensor:
    """The loss of windows of bytes; FSDP gathers weights around a forward, which ``training_step`` is not."""
    x = self.token(batch[:, :-1]) + self.position
    mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
    return cross_entropy(self.head(self.blocks(x, mask, is_causal=True)).flatten(0, 1), batch[:, 1:].flatten())


def work(args: argparse.Namespace) -> None:
    """Train on one rank; rank 0 says which way's steps begin and end, and how long they took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ByteGPT.forward = forward
    trainings = {name: Training(way, args.width, args.layers) for name, way in WAYS.items()}
    generator = torch.Generator().manual_seed(dist.get_rank())
    for turn in range(args.turns + 1):  # the first one warms up
        for name, training in trainings.items():
            dist.barrier()
            say("begin", name, [])
            seconds = []
            for _ in range(args.steps):
                batch = torch.randint(256, (args.batch, CONTEXT + 1), generator=generator)
                dist.barrier()
                start_s = time.perf_counter()
                training.step(batch)
                seconds.append(time.perf_counter() - start_s)
            dist.barrier()
            say("end" if turn else "warm", name, seconds)
            time.sleep(0.3)  # until the counters are read
    dist.destroy_process_group()


def say(what: str, name: str, seconds: list[float]) -> None:
    """Write a line for the program that started the ranks."""
    if dist.get_rank() == 0:
        print(json.dumps([what, name, seconds]), flush=True)


def sent_bytes(cluster: Cluster) -> int:
    """Bytes that the first node has sent to the other so far."""
    said = cluster.network.run(cluster.namespace(0), "ip", "-s", "-j", "link", "show", INTERFACE)
    return json.loads(said)[0]["stats64"]["tx"]["bytes"]


def main() -> None:
    """Start two ranks in each node, count, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--between", default="100mbit", help="rate of the link between the two nodes")
    parser.add_argument("--inside", default="10gbit", help="rate between the processes of a node")
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    if "RANK" in os.environ:
        work(args)
        return
    own = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    times = {name: [] for name in WAYS}
    counted = {name: [] for name in WAYS}
    with Cluster(f"2x{args.between}") as cluster:
        for node in range(2):
            limit = [
                "tc",
                "qdisc",
                "add",
                "dev",
                "lo",
                "root",
                "tbf",
                "rate",
                args.inside,
                "burst",
                "2mb",
                "latency",
                "50ms",
            ]
            cluster.network.run(cluster.namespace(node), *limit)
        group = {"MASTER_ADDR": cluster.address(0), "MASTER_PORT": "29400", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
        ranks = [
            cluster.popen(rank // 2, own, env=group | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(4)
        ]
        for line in ranks[0].stdout:
            what, name, seconds = json.loads(line)
            if what == "begin":
                before = sent_bytes(cluster)
            elif what == "end":
                times[name] += seconds
                counted[name].append((sent_bytes(cluster) - before) / len(seconds))
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank failed; what it wrote stands above")
    native_s = statistics.median(times["native HSDP"])
    print("| way | step, median | of native | bytes between nodes, a step and node |\n| --- | --- | --- | --- |")
    for name, seconds in times.items():
        median_s, nbytes = statistics.median(seconds), statistics.median(counted[name])
        print(f"| {name} | {1e3 * median_s:,.0f} ms | {median_s / native_s:.2f} | {nbytes:,.0f} |")


if __name__ == "__main__":
    main()

"""A model that is sharded inside two nodes, trained as PyTorch's HSDP does it and with compressed averages.

    python docs/benchmarks/hsdp.py steps --inside 10gbit --between 100mbit
    python docs/benchmarks/hsdp.py loss --inside 10gbit --between 100mbit --until 2.2,2.0

Two nodes are emulated, each with two processes; what crosses nodes is counted by the kernel.  The ways take turns: some
steps each, over and over.  ``steps`` times single steps on random bytes; ``loss`` trains the byte model byte_lm of the
bench from scratch and judges it by text that nobody trains on, with the clock stopped.  Linux, as root or with user
namespaces.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

import lightning_sparse as ls
from lightning_sparse.bench.cluster import INTERFACE, Cluster
from lightning_sparse.bench.compare.workloads import CONTEXT, GPT, byte_lm, held_out, schedule
from lightning_sparse.sharded.model import ShardedModel
from lightning_sparse.sharded_hook import ShardedHook, options_of

NATIVE = "native HSDP"
WAYS = {  # compressor, wire format, local steps
    "steps": {
        NATIVE: None,
        "ours, float32": (ls.Dense(), "float32", 0),
        "ours, int4": (ls.Dense(), "int4", 0),
        "ours, micro 1 %": (ls.MiCRO(density=0.01), None, 0),
    },
    "loss": {
        NATIVE: None,
        "ours, int4": (ls.Dense(), "int4", 0),
        "ours, `sparse_auto`": ("sparse_auto", None, 0),
        "ours, int4, 2 local steps": (ls.Dense(), "int4", 2),
        "ours, int4, 4 local steps": (ls.Dense(), "int4", 4),
    },
}
RATE = 4e-3  # largest learning rate of byte_lm, the best of all ways in simulated trainings


class Training:
    """One way of training a model."""

    def __init__(self, way: tuple | None, model: GPT, rate: float) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        self.model, self.steps, self.loss = model, 0, math.inf
        on = mesh if way is None else mesh["shard"]
        for block in self.model.blocks.layers:
            fully_shard(block, mesh=on)
        fully_shard(self.model, mesh=on)
        self.hook = None
        if way is not None:
            compressor, wire_dtype, local_steps = way
            options = options_of(compressor, wire_dtype, 0, local_steps=local_steps)
            self.hook = ShardedHook(ShardedModel(self.model, mesh), options, None)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=rate)

    def step(self, batch: torch.Tensor) -> None:
        if self.hook is not None:
            self.hook.expect_step()
        with self.forward():
            loss = self.model(batch)
        if self.hook is None:
            loss.backward()
        else:
            with self.hook.backward(), self.hook.model.backward(always=True):
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.hook is not None:
            self.hook.averager.end_step()
        self.steps += 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        if self.hook is not None:
            self.hook.begin_forward()
        yield
        if self.hook is not None:
            self.hook.end_forward()

    def settle(self) -> None:
        """Wait for what is under way between nodes."""
        if self.hook is not None:
            self.hook.averager.settle()

    @torch.no_grad()
    def judge(self, windows: torch.Tensor) -> None:
        """Set the loss of ``windows``, of the average with local steps; each rank judges a part of them."""
        own = windows[dist.get_rank() :: dist.get_world_size()].long()
        self.model.eval()
        with self.forward():
            known = torch.tensor([float(self.model(own)) * len(own), len(own)], dtype=torch.float64)
        self.model.train()
        dist.all_reduce(known)
        self.loss = float(known[0] / known[1])


def forward(self: GPT, batch: torch.Tensor) -> torch.Tensor:
    """The loss of windows of bytes; FSDP gathers weights around a forward, which ``training_step`` is not."""
    x = self.token(batch[:, :-1]) + self.position
    mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT)
    return cross_entropy(self.head(self.blocks(x, mask, is_causal=True)).flatten(0, 1), batch[:, 1:].flatten())


def work(args: argparse.Namespace) -> None:
    """Train on one rank; rank 0 says which way's steps begin and end, and how long they took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    GPT.forward = forward
    (time_steps if args.what == "steps" else train_to_loss)(args)
    dist.destroy_process_group()


def time_steps(args: argparse.Namespace) -> None:
    """Time single steps of each way."""
    trainings = {}
    for name, way in WAYS["steps"].items():
        torch.manual_seed(0)
        trainings[name] = Training(way, GPT(args.width, args.layers, heads=8), rate=5e-4)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for turn in range(args.turns + 1):  # the first one warms up
        for name, training in trainings.items():
            dist.barrier()
            say("begin", name)
            seconds = []
            for _ in range(args.steps):
                batch = torch.randint(256, (args.batch, CONTEXT + 1), generator=generator)
                dist.barrier()
                start_s = time.perf_counter()
                training.step(batch)
                seconds.append(time.perf_counter() - start_s)
            dist.barrier()
            say("end" if turn else "warm", name, seconds=seconds)
            time.sleep(0.3)  # until the counters are read


def train_to_loss(args: argparse.Namespace) -> None:
    """Train with each seed until every way has the lowest loss, or has had so many turns."""
    for seed in args.seeds:
        torch.manual_seed(seed)
        windows = held_out()
        tasks = {name: byte_lm(seed) for name in WAYS["loss"]}
        trainings = {name: Training(way, tasks[name].model, RATE) for name, way in WAYS["loss"].items()}
        for _ in range(args.turns):
            for name, training in trainings.items():
                if training.loss <= args.until[-1]:
                    continue
                dist.barrier()
                say("begin", name)
                time.sleep(0.1)  # until the counters are read
                start_s = time.perf_counter()
                for _ in range(args.steps):
                    for group in training.optimizer.param_groups:
                        group["lr"] = RATE * schedule(training.steps, -1)
                    training.step(tasks[name].batch(seed, training.steps, dist.get_rank())[0].long())
                training.settle()
                dist.barrier()
                seconds = time.perf_counter() - start_s
                say("end", name, seconds=[seconds])
                training.judge(windows)
                say("judged", name, seed=seed, steps=training.steps, s=seconds, loss=training.loss)


def say(what: str, name: str, **more: object) -> None:
    """Write a line for the program that started the ranks."""
    if dist.get_rank() == 0:
        print(json.dumps({"what": what, "way": name} | more), flush=True)


def sent_bytes(cluster: Cluster) -> int:
    """Bytes that the first node has sent to the other so far."""
    said = cluster.network.run(cluster.namespace(0), "ip", "-s", "-j", "link", "show", INTERFACE)
    return json.loads(said)[0]["stats64"]["tx"]["bytes"]


def table_of_steps(times: dict[str, list[float]], counted: dict[str, list[float]]) -> None:
    """Print what single steps took."""
    native_s = statistics.median(times[NATIVE])
    print("| way | step, median | of native | bytes between nodes, a step and node |\n| --- | --- | --- | --- |")
    for name, seconds in times.items():
        median_s, nbytes = statistics.median(seconds), statistics.median(counted[name])
        print(f"| {name} | {1e3 * median_s:,.0f} ms | {median_s / native_s:.2f} | {nbytes:,.0f} |")


def seconds_to(turns: list[dict], loss: float) -> float:
    """Seconds until a training had this loss, which is taken to fall evenly from one turn to the next."""
    seconds = list(accumulate(turn["s"] for turn in turns))
    if turns[0]["loss"] <= loss:
        return seconds[0]
    for (before, after), (before_s, after_s) in zip(pairwise(turns), pairwise(seconds), strict=True):
        if after["loss"] <= loss:
            return before_s + (after_s - before_s) * (before["loss"] - loss) / (before["loss"] - after["loss"])
    return math.nan


def table_of_losses(args: argparse.Namespace, trainings: list[dict]) -> None:
    """Print what trainings took to each loss: the mean over seeds, and the ratio to native with its standard error."""
    to = [column for loss in args.until for column in (f"s to {loss:g}", "of native")]
    print(f"| way | step | {' | '.join(to)} | bytes between nodes, a step and node |\n|{' --- |' * (len(to) + 3)}")
    native = [each["turns"] for each in trainings if each["way"] == NATIVE]
    for way in WAYS["loss"]:
        own = [each["turns"] for each in trainings if each["way"] == way]
        cells = [f"{1e3 * statistics.mean(turn['s'] for turns in own for turn in turns) / args.steps:,.0f} ms"]
        for loss in args.until:
            seconds = [seconds_to(turns, loss) for turns in own]
            ratios = [s / seconds_to(turns, loss) for s, turns in zip(seconds, native, strict=True)]
            error = statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else math.nan
            cells += [f"{statistics.mean(seconds):.1f}", f"{statistics.mean(ratios):.2f} ± {error:.2f}"]
        nbytes = statistics.median(turn["bytes_per_step"] for turns in own for turn in turns)
        print(f"| {way} | {' | '.join(cells)} | {nbytes:,.0f} |")


class Heard:
    """What rank 0 has said, and what the kernel had counted then."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.steps = args.steps
        self.times: dict[str, list[float]] = {name: [] for name in WAYS[args.what]}
        self.counted: dict[str, list[float]] = {name: [] for name in WAYS[args.what]}
        self.turns: dict[tuple[str, int], list[dict]] = {}

    def take(self, said: dict, cluster: Cluster) -> None:
        name = said["way"]
        if said["what"] == "begin":
            self.before = sent_bytes(cluster)
        elif said["what"] == "end":
            self.times[name] += said["seconds"]
            self.counted[name].append((sent_bytes(cluster) - self.before) / self.steps)
        elif said["what"] == "judged":
            turn = {key: said[key] for key in ("steps", "s", "loss")} | {"bytes_per_step": self.counted[name][-1]}
            self.turns.setdefault((name, said["seed"]), []).append(turn)


def start(args: argparse.Namespace, heard: Heard) -> None:
    """Start two ranks in each node, and listen to the first."""
    own = [sys.executable, str(Path(__file__).resolve()), *sys.argv[1:]]
    with Cluster(f"2x{args.between}") as cluster:
        for node in range(2):
            limit = ["tc", "qdisc", "add", "dev", "lo", "root", "tbf", "rate", args.inside, "burst", "2mb"]
            cluster.network.run(cluster.namespace(node), *limit, "latency", "50ms")
        group = {"MASTER_ADDR": cluster.address(0), "MASTER_PORT": "29400", "WORLD_SIZE": "4", "OMP_NUM_THREADS": "1"}
        ranks = [
            cluster.popen(rank // 2, own, env=group | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(4)
        ]
        for line in ranks[0].stdout:
            if line.startswith("{"):  # else a word of the averager's
                heard.take(json.loads(line), cluster)
        if any(rank.wait() for rank in ranks):
            sys.exit("a rank failed; what it wrote stands above")


def main() -> None:
    """Do what the command line says, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=list(WAYS), nargs="?", default="steps")
    parser.add_argument("--between", default="100mbit", help="rate of the link between the two nodes")
    parser.add_argument("--inside", default="10gbit", help="rate between the processes of a node")
    parser.add_argument("--width", type=int, default=256, help="of the model whose steps are timed")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, help="of each way's turn; by default 3, or 20 to a loss")
    parser.add_argument("--turns", type=int, help="of each way; by default 5, or 40 with each seed to a loss")
    parser.add_argument("--until", default="2.2,2.0", help="losses in nats a byte, falling")
    parser.add_argument("--seeds", default="0,1,2", help="of trainings to a loss")
    parser.add_argument("--output", type=Path, help="a file for trainings to a loss, a JSON line each")
    args = parser.parse_args()
    args.steps = args.steps or {"steps": 3, "loss": 20}[args.what]
    args.turns = args.turns or {"steps": 5, "loss": 40}[args.what]
    args.until = [float(loss) for loss in args.until.split(",")]
    args.seeds = [int(seed) for seed in args.seeds.split(",")]
    if "RANK" in os.environ:
        work(args)
        return
    heard = Heard(args)
    start(args, heard)
    if args.what == "steps":
        table_of_steps(heard.times, heard.counted)
        return
    trainings = [
        {"link": args.between, "way": way, "seed": seed, "turns": each} for (way, seed), each in heard.turns.items()
    ]
    if args.output:
        args.output.write_text("".join(json.dumps(each) + "\n" for each in trainings))
    table_of_losses(args, trainings)


if __name__ == "__main__":
    main()

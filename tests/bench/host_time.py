"""How long the host takes for a group in a step on a device: ``python -m tests.bench.host_time``.

What is timed is our Python, PyTorch's, and what its dispatcher does.  Nothing is left of the work itself: tensors have
few elements and lie on the CPU, where an operation takes about as long as the launch of one on a device; they say that
they lie on another device, so that all goes the way it goes there.  Messages are those of PyTorch's "fake" backend,
below all of ``torch.distributed`` that is Python, kernels the functions that start them, without the start.

Not in it: switching streams, Triton's own launch, and the dispatch of our operators, whose number is printed beside
what one takes.
"""

import argparse
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import lightning_sparse as ls
from lightning_sparse.compressors.group import Group, HostCopy
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.kernels import ops, reference
from lightning_sparse.network import torch_comm
from lightning_sparse.network.process_groups import LANES
from lightning_sparse.network.torch_comm import TorchComm
from lightning_sparse.selection import device
from lightning_sparse.wire import wire_format
from tests.support.buckets import Bucket
from tests.support.fake_cuda import _host_function, kernel_modules

GROUPS, PARAMETERS, SHAPE = 4, 12, (8, 16)
CASES = {
    "dense float32": (ls.Dense(), "float32"),
    "dense int4": (ls.Dense(), "int4"),
    "micro int4": (ls.MiCRO(), "int4"),
    "top k int4": (ls.TopK(), "int4"),
    "random k float32": (ls.RandomK(), "float32"),
}
OPERATORS = [n for n in vars(reference) if n in vars(ops) and n[0].islower() and n != "torch"]
ELSEWHERE = torch.device("xpu", 0)  # a type that we know nothing about
MADE = ("empty", "zeros", "ones", "full", "arange", "tensor", "randint", "rand")


def _as_there(made: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda *args, device=None, **options: made(*args, **options)


@contextmanager
def elsewhere(called: Counter[str]) -> Iterator[None]:
    """Have tensors say that they lie on a device; count which operators are ``called``."""
    made = {name: _as_there(getattr(torch, name)) for name in MADE} | {"empty": _as_there(torch.zeros)}
    future = torch.futures.Future

    def counted(name: str) -> Callable[..., Any]:
        work = _host_function(name)

        def call(*args: Any) -> Any:
            called[name] += 1
            return work(*args)

        return call

    scatter = kernel_modules()[1]
    with ExitStack() as stack:
        for name, function in made.items():
            stack.enter_context(mock.patch.object(torch, name, function))
        for name in OPERATORS:
            stack.enter_context(mock.patch.object(ops, name, counted(name)))
        for kind, name, new in (
            (Tensor, "device", property(lambda x: ELSEWHERE)),
            (Tensor, "new_empty", Tensor.new_zeros),
            (type(scatter._scatter), "run", lambda *args, **options: None),
            (torch_comm, "Future", lambda devices=None: future()),
            (torch_comm, "carries_by_nccl", lambda *_: True),
            (device, "placed", lambda edges, x: edges),
            (Group, "generator", lambda group, seed: torch.Generator().manual_seed(group.draw(seed))),
            (HostCopy, "read", lambda copy: torch.ones_like(copy.of)),
        ):
            stack.enter_context(mock.patch.object(kind, name, new))
        yield


def microseconds(case: str, size: int, steps: int) -> tuple[float, float, float]:
    """The host's time a group, the least of ``steps`` since other work only adds to it, and operators and messages."""
    compressor, wire_dtype = CASES[case]
    dist.init_process_group("fake", rank=1, world_size=size, store=FakeStore())
    called: Counter[str] = Counter()
    of = {f"layer {i}": torch.zeros(SHAPE) for i in range(GROUPS * PARAMETERS)}
    group_bytes = 4 * PARAMETERS * SHAPE[0] * SHAPE[1]
    backward = list(of.values())[::-1]
    with elsewhere(called):
        world = dist.group.WORLD
        assert world is not None
        comms = [TorchComm(world).in_format(wire_format(wire_dtype)) for _ in range(LANES)]
        for comm in comms:
            comm.costs.by_backend = True
            comm.costs.latencies = 0, 0, 0  # as of a long message, which goes in two hops
        groups = lay_out(of, compressor, "bucket", group_bytes)
        assert len(groups) == GROUPS
        averager = GradientAverager(groups, comms, threaded=False)
        buckets = []
        for i in range(0, len(backward), PARAMETERS):
            last, part = i + PARAMETERS == len(backward), backward[i : i + PARAMETERS]
            buffer = torch.tensor([1.0]).repeat(sum(p.numel() for p in part))
            buckets.append(Bucket(part, buffer=buffer, last=last))
        times = []
        for _ in range(steps):
            called.clear()
            sent_before = sum(comm.messages for comm in comms)
            start = time.thread_time()
            averager.between_steps()
            for future in [averager.hook(None, bucket) for bucket in buckets]:  # type: ignore[arg-type]
                future.wait()
            averager.end_step()
            times.append(time.thread_time() - start)
            for bucket in buckets:
                bucket.buffer().fill_(1.0)
        messages = (sum(comm.messages for comm in comms) - sent_before) / GROUPS
    dist.destroy_process_group()
    return 1e6 * min(times) / GROUPS, sum(called.values()) / GROUPS, messages


def microseconds_of_dispatch(times: int = 2000) -> float:
    """What a call of an operator takes beside what it calls."""
    index, x = torch.zeros(1, dtype=torch.int64), torch.zeros(2)

    def call(work: Callable[..., Any]) -> float:
        start = time.thread_time()
        for _ in range(times):
            work(index, x, False)
        return 1e6 * (time.thread_time() - start) / times

    return median(call(ops.pick) - call(reference.pick) for _ in range(5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="8,64", help="numbers of ranks")
    parser.add_argument("--cases", default=",".join(CASES), help="which of them")
    parser.add_argument("--steps", type=int, default=60, help="of each")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{PARAMETERS} parameters a group; dispatch of an operator {microseconds_of_dispatch():.0f} us")
    print(f"{'':18}{'ranks':>6}{'us a group':>12}{'operators':>11}{'messages':>10}")
    for case in given.cases.split(","):
        for size in map(int, given.ranks.split(",")):
            spent, called, messages = microseconds(case, size, given.steps)
            print(f"{case:18}{size:6}{spent:12.0f}{called:11.1f}{messages:10.1f}")


if __name__ == "__main__":
    main()

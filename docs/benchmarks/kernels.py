"""Milliseconds of each kernel on a CUDA device, beside plain PyTorch there and beside a copy of as many bytes.

    python docs/benchmarks/kernels.py

Each is timed by the device's own clock, one call at a time, so that the shortest contain a part of the host's time to
launch them; the median of 20.  The gradient does not fit into the device's cache.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.kernels import ops, reference
from lightning_sparse.kernels.blocks import block16_bytes, block_bytes
from lightning_sparse.selection.sketch import CountSketch, hashes

N = 2**26  # elements
RANKS = 4
DENSITY = 0.01
TIMES = 20
DEVICE = torch.device("cuda")

Case = tuple[str, int, str, tuple[Any, ...]]  # name, bytes moved at least, operator, its arguments


def milliseconds(work: Callable[[], object]) -> float:
    """The median time of ``work`` on the device."""
    for _ in range(3):
        work()
    spans = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return median(spans)


def coding(x: Tensor, bits: int) -> Iterator[Case]:
    """Of dense sums: what a rank sends is taken from its gradient, what it gets is added, the mean is read."""
    name = {8: "int8", 4: "int4", 2: "int2", 1: "sign"}[bits]
    payload = torch.empty(block_bytes(N, bits), dtype=torch.uint8, device=DEVICE)
    own = torch.empty(N // RANKS, device=DEVICE)
    rows = torch.empty(RANKS, block_bytes(own.numel(), bits), dtype=torch.uint8, device=DEVICE)
    for row in rows:
        ops.take_blocks(x[: own.numel()].clone(), row, bits)
    yield f"{name}: take", 8 * N + payload.numel(), "take_blocks", (x, payload, bits)
    added = rows, own, bits, 0, 1, RANKS, False
    yield f"{name}: add {RANKS} ranks' quarters", 4 * own.numel() + rows.numel(), "add_rows", added
    yield f"{name}: read", 4 * N + payload.numel(), "read_rows", (payload[None], x, bits, N, 0, N, 0)


def selecting(x: Tensor) -> Iterator[Case]:
    """Of strategies that select elements."""
    m = int(DENSITY * N)
    threshold = x.abs()[: 2**20].quantile(1 - DENSITY)
    capacity = int(1.1 * m)
    found = kernels.select(x, threshold, capacity)
    index, out = found.index[0], torch.empty_like(x)
    values = kernels.pick(index, x)
    payload = torch.empty(1, block16_bytes(N, capacity), dtype=torch.uint8, device=DEVICE)
    counts = torch.empty(1, 4, dtype=torch.int32, device=DEVICE)
    own = found.index, found.count, found.seen, found.near, None, N, None, counts, payload
    yield "select 1 %", 4 * N + 8 * capacity, "select", (x, threshold, 1.0, capacity, capacity, None)
    yield "scatter 1 %", 4 * N + 12 * capacity, "scatter", (index, values, found.count[0], RANKS, out)
    yield "write indices of 1 %", 10 * capacity, "encode_indices", own
    yield "read indices of 1 %", 10 * capacity, "decode_indices", (payload, counts, N, capacity, None, N)
    sketch = CountSketch(5, 4 * m, seed=0)
    hashed, table = hashes(sketch, N, DEVICE), torch.empty(5, 4 * m, device=DEVICE)
    drawn = hashed.offsets, hashed.signs
    yield "sketch, 5 rows", 4 * N + table.nbytes, "sketch_encode", (x, *drawn, table)
    yield "estimates from it", 4 * N + table.nbytes, "sketch_estimate", (table, *drawn, out)


def main() -> None:
    """Print the table of the results page."""
    x = torch.randn(N, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0))
    other = torch.empty_like(x)
    copy_ms = milliseconds(lambda: other.copy_(x))
    rate = 8 * N / copy_ms
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "elements": N}))
    print(f"a copy: {copy_ms:.3f} ms, {rate / 1e9:.2f} TB/s\n")
    print("| | ms | in copies | plain PyTorch, ms |\n| --- | ---: | ---: | ---: |")
    for bits in (8, 4, 2, 1):
        for case in coding(x, bits):
            show(case, rate)
        x.normal_()
    for case in selecting(x):
        show(case, rate)


def show(case: Case, rate: float) -> None:
    """A row; ``rate`` is of a copy, in bytes a millisecond."""
    name, moved, operator, arguments = case
    ours, plain = (milliseconds(partial(getattr(each, operator), *arguments)) for each in (ops, reference))
    print(f"| {name} | {ours:.3f} | {ours * rate / moved:.1f} | {plain:.1f} |", flush=True)


if __name__ == "__main__":
    main()

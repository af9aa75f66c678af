"""How fast the kernels are on a GPU, beside a copy of as many bytes and ``torch.topk``.

``python -m lightning_sparse.bench.kernels [elements]``
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from lightning_sparse import kernels
from lightning_sparse.kernels.ops import HAS_TRITON
from lightning_sparse.sketch import CountSketch
from lightning_sparse.wire import INDEX_FORMATS

ELEMENTS = 100_000_000  # 400 MB: more than a GPU's caches hold
DENSITY = 0.01
ROWS = 5  # of the sketch
WARM_UP = 10
REPEATS = 50


@dataclass(frozen=True)
class Timing:
    """One kernel.

    Attributes:
        name: of the function.
        ms: milliseconds of one call, the median.
        nbytes: least bytes it must read and write.
        copy_ms: milliseconds of a copy on the device that reads and writes as many.
        topk_ms: milliseconds in which ``torch.topk`` finds as many elements among as many; the same for every kernel.
    """

    name: str
    ms: float
    nbytes: int
    copy_ms: float
    topk_ms: float

    @property
    def gb_per_s(self) -> float:
        """10**9 bytes a second."""
        return self.nbytes / self.ms / 1e6


def measure(n: int) -> list[Timing]:
    """Time every kernel on the current CUDA device, for ``n`` elements of which one in a hundred is selected."""
    device = torch.device("cuda")
    topk_ms = _median_ms(_topk(n, device))
    timings = []
    for name, (call, nbytes) in _calls(n, device).items():
        timings.append(Timing(name, _median_ms(call), nbytes, _median_ms(_copy(nbytes, device)), topk_ms))
    return timings


def _copy(nbytes: int, device: torch.device) -> Callable[[], object]:
    half = torch.randint(0, 256, (nbytes // 2,), dtype=torch.uint8, device=device)
    other = torch.empty_like(half)
    return lambda: other.copy_(half)


def _topk(n: int, device: torch.device) -> Callable[[], object]:
    magnitudes = torch.randn(n, device=device).abs_()
    return lambda: magnitudes.topk(max(1, round(DENSITY * n)), sorted=False)


def _calls(n: int, device: torch.device) -> dict[str, tuple[Callable[[], object], int]]:
    """Of each kernel a call, and the least bytes it must read and write."""
    block16 = INDEX_FORMATS["block16"]
    unsent, out = torch.randn(n, device=device), torch.empty(n, device=device)
    gradient = 1e-6 * torch.randn(n, device=device)  # so small that after many steps as many are selected
    threshold = torch.tensor(2.5758, device=device)  # one in a hundred of a normal distribution
    capacity = max(1, round(1.25 * DENSITY * n))
    found = kernels.select(unsent, gradient, threshold, capacity)
    picks = int(found.count)
    values = torch.randn(capacity, device=device)
    payload = torch.empty(block16.nbytes(n, capacity), dtype=torch.uint8, device=device)
    kernels.encode_indices(found.index, found.count, n, payload)
    sketch = CountSketch(ROWS, max(1, round(4 * DENSITY * n)))
    hashed = kernels.hashes(sketch, n, device)
    table = torch.empty(ROWS, sketch.columns, device=device)
    sketched = 4 * (n + table.numel())
    return {
        "select": (lambda: kernels.select(unsent, gradient, threshold, capacity), 12 * n + 8 * capacity),
        "scatter": (lambda: kernels.scatter(found.index, values, found.count, 3, out), 4 * n + 12 * picks),
        "sketch_encode": (lambda: kernels.sketch_encode(unsent, hashed, table), sketched),
        "sketch_estimate": (lambda: kernels.sketch_estimate(table, hashed, out), sketched),
        "encode_indices": (
            lambda: kernels.encode_indices(found.index, found.count, n, payload),
            8 * picks + payload.numel(),
        ),
        "decode_indices": (
            lambda: kernels.decode_indices(payload, n, capacity, found.count),
            payload.numel() + 8 * capacity,
        ),
    }


def _median_ms(call: Callable[[], object]) -> float:
    for _ in range(WARM_UP):
        call()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPEATS)]
    for start, end in pairs:
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(end) for start, end in pairs))


def table_of(timings: Sequence[Timing]) -> Table:
    """One row a kernel."""
    table = Table("kernel", "ms", "MB", "GB/s", "time / copy", "time / topk")
    for t in timings:
        table.add_row(
            t.name, f"{t.ms:.3f}", f"{t.nbytes / 1e6:.1f}", f"{t.gb_per_s:.0f}", f"{t.ms / t.copy_ms:.2f}",
            f"{t.ms / t.topk_ms:.3f}",
        )  # fmt: skip
    return table


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the timings; the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not torch.cuda.is_available():
        print("There is no CUDA device, so there is nothing to time.", file=sys.stderr)
        return 1
    if not HAS_TRITON:
        print("There is no triton (pip install triton), so there is nothing to time.", file=sys.stderr)
        return 1
    n = int(arguments[0]) if arguments else ELEMENTS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {n:,} elements, {DENSITY:.0%} selected")
    Console(width=100).print(table_of(measure(n)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Times the kernels on a GPU, beside a copy of as many bytes and ``torch.topk``.

``python -m lightning_sparse.bench.kernels [elements]``
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from rich.console import Console
from rich.table import Table

from lightning_sparse import kernels
from lightning_sparse.kernels.ops import HAS_TRITON
from lightning_sparse.selection.sketch import CountSketch, hashes
from lightning_sparse.wire import INDEX_FORMATS, INT4, INT8, SIGN

ELEMENTS = 100_000_000  # 400 MB: more than a GPU's caches hold
DENSITY = 0.01
ROWS = 5  # of the sketch

Call = Callable[[], object]


def measure(n: int) -> Table:
    """Time every kernel on the current CUDA device, for ``n`` elements of which 1 % are selected: a row for each.

    Beside the milliseconds of a call (the median) stand the least bytes it must read and write, and how long it takes
    beside a copy that reads and writes as many, and beside ``torch.topk`` of as many elements among ``n``.
    """
    from triton.testing import do_bench  # type: ignore[import-not-found,import-untyped,unused-ignore]

    def median_ms(call: Call) -> float:
        return float(do_bench(call, return_mode="median"))

    device = torch.device("cuda")
    magnitudes = torch.randn(n, device=device).abs_()
    topk_ms = median_ms(lambda: magnitudes.topk(max(1, round(DENSITY * n)), sorted=False))
    table = Table("kernel", "ms", "MB", "GB/s", "time / copy", "time / topk")
    for name, (call, nbytes) in _calls(n, device).items():
        half, other = torch.zeros(2, nbytes // 2, dtype=torch.uint8, device=device)
        ms, copy_ms = median_ms(call), median_ms(partial(other.copy_, half))
        rates = f"{nbytes / 1e6:.1f}", f"{nbytes / ms / 1e6:.0f}", f"{ms / copy_ms:.2f}", f"{ms / topk_ms:.3f}"
        table.add_row(name, f"{ms:.3f}", *rates)
    return table


def _calls(n: int, device: torch.device) -> dict[str, tuple[Call, int]]:
    """For each kernel a call, and the least bytes it must read and write."""
    block16 = INDEX_FORMATS["block16"]
    unsent, out = torch.randn(2, n, device=device)
    threshold = torch.tensor(2.5758, device=device)  # which 1 % of a normal distribution reach
    capacity = max(1, round(1.25 * DENSITY * n))
    found = kernels.select(unsent, threshold, capacity)
    index, count, selected = found.index, found.count, int(found.count)
    values = torch.randn(capacity, device=device)
    payload = torch.empty(block16.nbytes(n, capacity), dtype=torch.uint8, device=device)
    kernels.encode_indices(index, count, n, payload)
    sketch = CountSketch(ROWS, max(1, round(4 * DENSITY * n)))
    hashed, table = hashes(sketch, n, device), torch.empty(ROWS, sketch.columns, device=device)
    sketched, coded = 4 * (n + table.numel()), payload.numel()
    calls: dict[str, tuple[Call, int]] = {
        "select": (lambda: kernels.select(unsent, threshold, capacity), 4 * n + 8 * capacity),
        "scatter": (lambda: kernels.scatter(index, values, count, 3, out), 4 * n + 12 * selected),
        "sketch_encode": (lambda: kernels.sketch_encode(unsent, hashed, table), sketched),
        "sketch_estimate": (lambda: kernels.sketch_estimate(table, hashed, out), sketched),
        "encode_indices": (lambda: kernels.encode_indices(index, count, n, payload), 8 * selected + coded),
        "decode_indices": (lambda: kernels.decode_indices(payload, n, capacity, count), coded + 8 * capacity),
    }
    for form in (INT8, INT4, SIGN):
        packed = torch.empty(form.nbytes(n), dtype=torch.uint8, device=device)
        nbytes = 8 * n + packed.numel()
        calls[f"{form} take"] = partial(form.take, unsent, packed), nbytes
        calls[f"{form} add"] = partial(form.add, packed, out), nbytes
    return calls


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the timings; the exit status."""
    if not torch.cuda.is_available() or not HAS_TRITON:
        missing = "triton (pip install triton)" if torch.cuda.is_available() else "CUDA device"
        print(f"There is no {missing}, so there is nothing to time.", file=sys.stderr)
        return 1
    words = sys.argv[1:] if arguments is None else arguments
    n = int(words[0]) if words else ELEMENTS
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: {n:,} elements, {DENSITY:.0%} selected")
    Console(width=100).print(measure(n))
    return 0


if __name__ == "__main__":
    sys.exit(main())

# mypy: allow-untyped-decorators
"""Select and compact: one pass over the vector, one over a bit an element.

The first kernel writes a bit for each element that is selected and two counts for each block; ``cumsum`` tells where
each block's indices begin; the second kernel writes them there.  No atomics, so every run is the same.
"""

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from lightning_sparse.kernels.launch import launch

BLOCK = 4096  # elements a program works on
WORD = 32  # of them share an int32, a bit each


def select(x: Tensor, threshold: Tensor, near: float, capacity: int) -> tuple[Tensor, Tensor]:
    """As :func:`lightning_sparse.kernels.reference.select`."""
    n = x.numel()
    blocks = triton.cdiv(n, BLOCK)
    bits = x.new_empty(blocks * BLOCK // WORD, dtype=torch.int32)
    counts = x.new_empty((2, blocks), dtype=torch.int32)  # that reach the threshold, and that nearly do
    index = x.new_full((capacity,), n, dtype=torch.int64)
    launch(_mark, (blocks,), x, threshold, bits, counts, n, NEAR=near, WORDS=BLOCK // WORD, WORD=WORD, num_warps=8)
    begins = counts[0].cumsum(0) - counts[0]
    launch(_compact, (blocks,), bits, begins, index, capacity, WORDS=BLOCK // WORD, WORD=WORD, num_warps=8)
    return index, counts.sum(1)


@triton.jit
def _mark(
    x: tl.tensor, threshold: tl.tensor, bits: tl.tensor, counts: tl.tensor, n: tl.tensor,
    NEAR: tl.constexpr, WORDS: tl.constexpr, WORD: tl.constexpr,
) -> None:  # fmt: skip
    block = tl.program_id(0)
    word = block.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, WORD)[None, :]
    element = word[:, None] * WORD + lane  # [WORDS, WORD]
    inside = element < n
    value = tl.load(x + element, mask=inside, other=0.0)  # beyond the end: zeros, which are never selected
    magnitude = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    limit = tl.load(threshold)
    reached = (magnitude >= _least(limit)).to(tl.int32)
    near = (magnitude >= _least(limit * NEAR)).to(tl.int32)
    tl.store(bits + word, tl.sum(reached << lane, axis=1))
    tl.store(counts + block, tl.sum(tl.sum(reached, axis=1), axis=0))
    tl.store(counts + tl.num_programs(0) + block, tl.sum(tl.sum(near, axis=1), axis=0))


@triton.jit
def _least(threshold: tl.tensor) -> tl.tensor:
    bits = tl.maximum(threshold.to(tl.int32, bitcast=True), 1)
    return tl.where(threshold == threshold, bits, 1)


@triton.jit(do_not_specialize=["capacity"])
def _compact(
    bits: tl.tensor, begins: tl.tensor, index: tl.tensor, capacity: tl.tensor, WORDS: tl.constexpr, WORD: tl.constexpr
) -> None:
    block = tl.program_id(0)
    word = block.to(tl.int64) * WORDS + tl.arange(0, WORDS)
    lane = tl.arange(0, WORD)[None, :]
    chosen = (tl.load(bits + word)[:, None] >> lane) & 1  # [WORDS, WORD]
    in_word = tl.sum(chosen, axis=1)
    before = tl.load(begins + block) + tl.cumsum(in_word, axis=0) - in_word  # the word
    place = before[:, None] + tl.cumsum(chosen, axis=1) - chosen
    tl.store(index + place, word[:, None] * WORD + lane, mask=(chosen == 1) & (place < capacity))

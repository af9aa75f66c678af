"""What the kernels compute, in plain PyTorch: for devices without Triton, and what the kernels are tested against.

Nothing here waits for the device, so counts and thresholds are tensors [] on it.  The public functions of
:mod:`lightning_sparse.kernels` describe arguments and results.
"""

import math

import torch
from torch import Tensor

from lightning_sparse.kernels.blocks import (
    BELOW_ONE,
    BLOCK,
    BLOCK_BITS,
    FILLER,
    MOST_SCALE,
    SCALE_BITS,
    TINY,
    SliceSegment,
    block16_bytes,
    block_bytes,
    halves,
    in_blocks,
    scales_and_codes,
)

INFINITY = 0x7F800000  # its bits as a float32
MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 but for its sign: as an integer they rise with the magnitude


def select(
    x: Tensor, threshold: Tensor, near: float, capacity: int, most: int, edges: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Index [R, capacity] of what of ``x`` [n] reaches ``threshold`` in each part, and three counts, [3, R].

    They are of elements that reach it, of those that reach ``near`` times as much, and of the first at most ``most``.
    ``edges`` [R + 1] cut ``x``; without them it is one part.
    """
    magnitude = x.view(torch.int32) & MAGNITUDE
    reached = magnitude >= _least(threshold)
    nearly = magnitude >= _least(near * threshold)
    edges = torch.arange(2, device=x.device) * x.numel() if edges is None else edges
    sums = torch.nn.functional.pad(torch.stack([reached, nearly]).cumsum(1), (1, 0))  # [2, n + 1]
    totals = sums.index_select(1, edges).diff()  # [2, R]
    return _compact(reached, sums[0], capacity, edges), torch.cat([totals, totals[:1].clamp(max=most)])


def _least(threshold: Tensor) -> Tensor:
    """The least bits of a magnitude that reaches ``threshold`` [] float32: never those of zero, always below NaN's."""
    return torch.where(threshold.isnan(), INFINITY, threshold.view(torch.int32).clamp(min=1))


def _compact(chosen: Tensor, before: Tensor, capacity: int, edges: Tensor) -> Tensor:
    """Where ``chosen`` [n] bool is true, of each part the first ``capacity``, then n: [R, capacity] int64.

    ``before`` [n + 1] says how many are chosen before each element.
    """
    n, rows = chosen.numel(), edges.numel() - 1
    element = torch.arange(n, device=chosen.device)
    part = torch.searchsorted(edges, element, right=True) - 1
    place = before[:-1] - before.index_select(0, edges.index_select(0, part))
    nowhere = rows * capacity
    place = torch.where(chosen & (place < capacity), part * capacity + place, nowhere)
    index = place.new_full((nowhere + 1,), n)
    return index.scatter_(0, place, element)[:nowhere].view(rows, capacity)


def scatter(index: Tensor, values: Tensor, count: Tensor, size: int, out: Tensor) -> None:
    """Set ``out`` [n] to ``values`` [m] / ``size`` at the first ``count`` of ``index`` [m], and to zero elsewhere."""
    n = out.numel()
    meant = (torch.arange(index.numel(), device=index.device) < count) & (index >= 0) & (index < n)
    mean = values / values.new_full((), size)  # on the device: by a number of the host, CUDA multiplies by 1 / size
    out.copy_(values.new_zeros(n + 1).index_copy_(0, torch.where(meant, index, n), mean)[:n])


def sketch_encode(x: Tensor, offsets: Tensor, signs: Tensor, out: Tensor) -> None:
    """Set ``out`` [R, c] to the count-sketch of ``x`` [n]; ``offsets``, ``signs`` [R, blocks]."""
    columns = out.shape[1]
    column = torch.arange(columns, device=x.device)
    out.zero_()
    for part, offset, sign in zip(x.split(columns), offsets.T, signs.T, strict=False):  # an empty x has no block
        place = (column - offset[:, None]) % columns  # [R, c]
        padded = torch.cat([part, part.new_zeros(columns - part.numel())])
        out.add_(padded[place] * sign[:, None])  # in the order of blocks, so that sums are rounded as by CountSketch


def sketch_estimate(table: Tensor, offsets: Tensor, signs: Tensor, out: Tensor) -> None:
    """Set ``out`` [n] to the median over the rows of ``table`` [R, c]; ``offsets``, ``signs`` [R, blocks]."""
    columns = table.shape[1]
    for part, offset, sign in zip(out.split(columns), offsets.T, signs.T, strict=False):
        place = torch.arange(part.numel(), device=out.device)  # [elements of the block]
        bucket = (place + offset[:, None]) % columns
        part.copy_(median(table.gather(1, bucket) * sign[:, None]))


def pick(index: Tensor, x: Tensor, magnitudes: bool) -> Tensor:
    """The elements ``index`` [*s] of ``x`` [n], or their ``magnitudes``; zero where an index is not in [0, n): [*s]."""
    padded = torch.nn.functional.pad(x, (0, 1))
    values = padded[torch.where((index >= 0) & (index < x.numel()), index, x.numel())]
    return values.abs() if magnitudes else values


def put(index: Tensor, values: Tensor, out: Tensor, onto: bool) -> None:
    """Set the elements ``index`` [m] of ``out`` [n] to ``values`` [m], or add to them if ``onto``; others are left out.

    Every index is written to: those that are not in [0, n) at an element more.
    """
    n = out.numel()
    place = torch.where((index >= 0) & (index < n), index, n)
    padded = torch.nn.functional.pad(out, (0, 1))
    out.copy_(padded.index_copy(0, place, padded[place] + values if onto else values)[:n])


def among(index: Tensor, others: Tensor, n: int) -> Tensor:
    """``index`` [R, m], with n in place of what is not in the same row of ``others`` [R, l]; rows rise to n."""
    at = torch.searchsorted(others, index).clamp(max=others.shape[1] - 1)
    return torch.where(others.gather(1, at) == index, index, n)


def add_up(index: Tensor, values: Tensor, out: Tensor) -> Tensor:
    """Set ``out`` [n] to the sum of ``values`` [R, m] at ``index`` [R, m], row after row; how many it reaches, [].

    What is not below n is left out.
    """
    index = index.clamp(max=out.numel())
    summed = out.new_zeros(out.numel() + 1)
    reached = torch.zeros_like(summed, dtype=torch.bool)
    for place, row in zip(index, values, strict=True):
        summed.index_add_(0, place, row)
        reached.index_fill_(0, place, True)
    out.copy_(summed[:-1])
    return reached[:-1].sum()


def encode_indices(
    index: Tensor, count: Tensor, seen: Tensor, near: Tensor, load: Tensor | None, n: int, edges: Tensor | None,
    counts: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """Write the first ``count`` [R] of ``index`` [R, capacity] to ``out`` [R, bytes] as block16 does below ``n``.

    And all counts to ``counts`` [R, 4] int32, as far as it can hold them; without ``load`` that is 0.
    """
    columns = [each.long() for each in (count, seen, near, torch.zeros_like(count) if load is None else load)]
    counts.copy_(torch.stack(columns, 1).clamp(max=2**31 - 1))
    start = 0 if edges is None else edges[:-1, None]
    meant = torch.arange(index.shape[1], device=index.device) < count[:, None]
    bounds = torch.arange(block16_bytes(n, 0) // 4 + 1, device=index.device) << BLOCK_BITS
    inside = torch.where(meant, index - start, bounds[-1])
    counts = torch.searchsorted(inside, bounds.repeat(len(index), 1)).diff().to(torch.int32)  # [R, blocks]
    low = torch.where(meant, inside, 0).to(torch.int16)
    written = torch.cat([counts.view(torch.uint8), low.view(torch.uint8)], 1)
    out[:, : written.shape[1]] = written
    out[:, written.shape[1] :] = 0


def decode_indices(
    payloads: Tensor, counts: Tensor, n: int, capacity: int, edges: Tensor | None, width: int
) -> tuple[Tensor, Tensor]:
    """Read what :func:`encode_indices` wrote to ``payloads`` [R, bytes], as many as ``counts`` [R, c] int32 say first.

    Returns:
        Indices, then ``width``: [R, capacity] int64; and 1 where all is as it must be, [R] int32.
    """
    start, limit = (0, width) if edges is None else (edges[:-1, None], edges.diff()[:, None])
    rows, head = len(payloads), block16_bytes(n, 0)
    # Copied, since a payload may start anywhere: [R, blocks] and [R, capacity].
    announced = payloads[:, :head].flatten().clone().view(torch.int32).view(rows, head // 4).long()
    low = (
        payloads[:, head : head + 2 * capacity].flatten().clone().view(torch.int16).view(rows, capacity).long() & 0xFFFF
    )
    place = torch.arange(capacity, device=payloads.device).repeat(rows, 1)
    index = (torch.searchsorted(announced.clamp(min=0).cumsum(1), place, right=True) << BLOCK_BITS) | low
    count = counts[:, :1]
    meant = place < count
    wrong = meant & (index >= limit)
    wrong[:, 1:] |= meant[:, 1:] & (index[:, 1:] <= index[:, :-1])
    possible = (announced >= 0).all(1) & (counts >= 0).all(1) & (announced.sum(1, True) == count)[:, 0]
    intact = possible & (count <= capacity)[:, 0] & ~wrong.any(1)
    return torch.where(meant & (index < limit), index + start, width), intact.to(torch.int32)


def take_blocks(values: Tensor, out: Tensor, bits: int) -> None:
    """Move ``values`` [n] to ``out`` [bytes] as the format of :mod:`lightning_sparse.wire.values` with ``bits``."""
    scales = values.new_empty(-(-values.numel() // BLOCK))
    head, codes = out[: 4 * scales.numel()], out[4 * scales.numel() :]
    for part, scale, code in in_blocks(values, scales, codes, bits, max(1, scales.numel())):
        scale.copy_(_scales(part, bits))
        if bits == 1:
            multiples = part.new_ones(()).copysign(part)
        elif bits == 2:
            multiples = (part * scale.reciprocal()).floor().nan_to_num(0.0).clamp(-2, 1) + 0.5
        else:
            multiples = (part * (scale.reciprocal() * BELOW_ONE)).round().nan_to_num(0.0)
        code.copy_(_written(multiples, bits))
        part.sub_(multiples * scale).masked_fill_(~scale.isfinite(), 0.0)
    head.copy_(scales.view(torch.uint8))


def read_blocks(payload: Tensor, out: Tensor, bits: int) -> None:
    """Set ``out`` [n] to what :func:`take_blocks` wrote to ``payload`` [bytes]."""
    scales, codes = scales_and_codes(payload, out.numel())
    for part, scale, code in in_blocks(out, scales, codes, bits, max(1, scales.numel())):
        part.copy_(_multiples(code, bits)[:, : part.shape[1]] * scale)


def add_blocks(payload: Tensor, out: Tensor, bits: int) -> None:
    """Add to ``out`` [n] what :func:`read_blocks` reads from ``payload`` [bytes]."""
    values = torch.empty_like(out)
    read_blocks(payload, values, bits)
    out.add_(values)


def take_rows(
    values: Tensor, out: Tensor, bits: int, width: int, start: int, length: int, rotation: int, first: int, count: int
) -> None:
    """:func:`take_blocks` of the segments of ``count`` ranks, from ``first`` on, into their rows of ``out`` [P, bytes].

    The ``FILLER`` bytes behind a segment's in its row become zeros.  The others say which: as of :class:`SliceSegment`.
    """
    cut = SliceSegment(len(out), width, start, length, rotation)
    for i in range(count):
        owner = (first + i) % cut.size
        own = cut.of(values, owner)
        used = block_bytes(own.numel(), bits)
        take_blocks(own, out[owner, :used], bits)
        out[owner, used : used + FILLER] = 0


def read_rows(payloads: Tensor, out: Tensor, bits: int, width: int, start: int, length: int, rotation: int) -> None:
    """:func:`read_blocks` of the row of each rank in ``payloads`` [P, bytes] into its segment of ``out`` [n]."""
    cut = SliceSegment(len(payloads), width, start, length, rotation)
    for owner, payload in enumerate(payloads):
        own = cut.of(out, owner)
        read_blocks(payload[: block_bytes(own.numel(), bits)], own, bits)


def add_rows(payloads: Tensor, out: Tensor, bits: int, first: int, step: int, count: int, onto: bool) -> None:
    """Add ``count`` rows of ``payloads`` [P, bytes] to ``out`` [n], every ``step``-th from ``first`` on, modulo P.

    They are added in this order; ``onto=False`` sets ``out`` to their sum.
    """
    for i in range(count):
        payload = payloads[(first + i * step) % len(payloads), : block_bytes(out.numel(), bits)]
        (add_blocks if onto or i else read_blocks)(payload, out, bits)


def take_floats(
    values: Tensor, out: Tensor, width: int, start: int, length: int, rotation: int, first: int, count: int
) -> None:
    """Move the segments of ``values`` [n] that ``count`` ranks own, from ``first`` on, into their rows of ``out``.

    They are rounded to the type of ``out`` [P, m]; beyond the largest float16 that is sent.  What a segment does not
    fill of its row becomes zeros.  The others say which: as of :class:`SliceSegment`.
    """
    cut = SliceSegment(len(out), width, start, length, rotation)
    limit = torch.finfo(torch.float16 if out.dtype == torch.float16 else torch.float32).max
    for owner in ((first + i) % len(out) for i in range(count)):
        own, row = cut.of(values, owner), out[owner]
        row[: own.numel()].copy_(torch.where(own.isinf(), own, own.clamp(-limit, limit)))
        row[own.numel() :] = 0
        own.sub_(row[: own.numel()]).nan_to_num_(0.0, 0.0, 0.0)


def read_floats(payloads: Tensor, out: Tensor, width: int, start: int, length: int, rotation: int) -> None:
    """Set the segment of ``out`` [n] that each rank owns to its row of ``payloads`` [P, m]."""
    cut = SliceSegment(len(payloads), width, start, length, rotation)
    for owner, row in enumerate(payloads):
        own = cut.of(out, owner)
        own.copy_(row[: own.numel()])


def add_floats(payloads: Tensor, out: Tensor, first: int, step: int, count: int, onto: bool) -> None:
    """As :func:`add_rows`, of ``payloads`` [P, m] in their own type."""
    for i in range(count):
        row = payloads[(first + i * step) % len(payloads), : out.numel()]
        (out.add_ if onto or i else out.copy_)(row)


def _scales(part: Tensor, bits: int) -> Tensor:
    """The scales of ``part`` [b, width], [b, 1], rounded as they may be sent."""
    magnitudes = part.abs()
    if bits == 2:
        squares = magnitudes.double().square().sum(1, keepdim=True)
        scales = (squares.sqrt() * (1 / math.sqrt(part.shape[1]))).float()
        scales = torch.where((scales > MOST_SCALE) & scales.isfinite(), MOST_SCALE, scales)
        scales = torch.where(scales <= 4 * TINY, 0.0, scales)
    elif bits > 1:
        scales = (magnitudes.amax(1, keepdim=True) * (1 / ((1 << bits - 1) - 1))).clamp(min=TINY)
    else:  # in float64, where the order of a sum hardly matters
        scales = (magnitudes.sum(1, keepdim=True, dtype=torch.float64) * (1 / part.shape[1])).float()
    scales = (scales.view(torch.int32) & SCALE_BITS).view(torch.float32)
    return torch.where(scales <= TINY, 0.0, scales) if bits == 1 else scales


def _written(multiples: Tensor, bits: int) -> Tensor:
    """``multiples`` [b, width] as [b, bytes] uint8."""
    if bits == 8:
        return multiples.to(torch.int8).view(torch.uint8)
    b, width = multiples.shape
    if bits == 1:
        negative = torch.nn.functional.pad((multiples < 0).to(torch.uint8), (0, -width % 8)).view(b, -(-width // 8), 8)
        return (negative << _shifts(multiples)).sum(2, dtype=torch.uint8)
    if bits == 2:
        fours = torch.nn.functional.pad((multiples + 1.5).to(torch.uint8), (0, -width % 4)).view(b, -(-width // 4), 4)
        return (fours << _shifts(multiples, 2)).sum(2, dtype=torch.uint8)
    low, high = halves(torch.nn.functional.pad(multiples, (0, width % 2)))
    return (low + 16 * high + 8).to(torch.int8).view(torch.uint8)


def _multiples(code: Tensor, bits: int) -> Tensor:
    """What :func:`_written` wrote to ``code`` [b, bytes]: [b, 8 / bits * bytes] float32."""
    if bits == 1:
        return 1 - 2 * ((code[:, :, None] >> _shifts(code)) & 1).flatten(1).float()
    if bits == 2:
        return ((code[:, :, None] >> _shifts(code, 2)) & 3).flatten(1).float() - 1.5
    signed = code.contiguous().view(torch.int8)
    return signed.float() if bits == 8 else torch.cat([(code & 15).float() - 8, (signed >> 4).float()], 1)


def _shifts(x: Tensor, bits: int = 1) -> Tensor:
    """By how much each value of a byte is shifted: signs from the highest bit down, levels from the lowest up."""
    down = torch.arange(7, -1, -1, dtype=torch.uint8, device=x.device)
    return down if bits == 1 else torch.arange(0, 8, bits, dtype=torch.uint8, device=x.device)


def borders(index: Tensor, count: Tensor, n: int, step: int) -> Tensor:
    """How many of the first ``count`` of ``index`` [m], rising, are below 0, step, 2 step, ..., n or just more.

    Returns:
        [ceil(n / step) + 1] int64: where the indices of each block of ``step`` elements begin, and where the last end.
    """
    blocks = -(-n // step)
    meant = torch.arange(index.numel(), device=index.device) < count
    return torch.searchsorted(
        torch.where(meant, index, blocks * step), torch.arange(blocks + 1, device=index.device) * step
    )


def median(rows: Tensor) -> Tensor:
    """The median of each column of ``rows`` [R, m], R odd: [m]."""
    if len(rows) == 1:
        return rows[0]
    if len(rows) == 3:
        return _median3(*rows)
    if len(rows) == 5:
        a, b, c, d, e = rows
        below = torch.maximum(torch.minimum(a, b), torch.minimum(c, d))  # neither of these two is the least ...
        above = torch.minimum(torch.maximum(a, b), torch.maximum(c, d))  # ... or the greatest of the five
        return _median3(below, above, e)
    return rows.median(0).values


def _median3(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    return torch.maximum(torch.minimum(a, b), torch.minimum(torch.maximum(a, b), c))

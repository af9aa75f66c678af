"""What communication among many ranks costs: modelled from counts, fitted to what was measured.  Pure functions."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from lightning_sparse.bench.report import Summary
from lightning_sparse.bench.scale_ranks import Traffic
from lightning_sparse.rehearsal import Link

DENSE = "sparse_dense"  # its all-reduce is what others' growth is compared with
ROUNDS_IN_FLIGHT = 4  # times round a ring that wait for each other: as in `rehearsal.model_cost`


@dataclass(frozen=True)
class Measured:
    """One strategy on one cluster of the bench.

    Attributes:
        strategy: name of its compressor, or "ddp".
        ranks: P.
        sent_bytes: payload a rank counted in a step.
        seconds: of a step that no computation explains: without those of a step that sends nothing, and without those
            in the compressor's own code.
    """

    strategy: str
    ranks: int
    sent_bytes: float
    seconds: float


@dataclass(frozen=True)
class Fit:
    """A link, as measured points tell of it.

    Attributes:
        link: latency of a hop, and seconds for each byte.
        rms_s: root of the mean square of (modelled - measured), in seconds.
        median_share: median of |modelled - measured| / measured.
        points: how many there were.
    """

    link: Link
    rms_s: float
    median_share: float
    points: int


@dataclass(frozen=True)
class Growth:
    """By how much bytes of a rank grow: 0.25 is a quarter more.

    Attributes:
        plain: of the strategy.
        of_dense: of the strategy's share in what dense's all-reduce sends, which grows too, with (P - 1) / P.
    """

    plain: float
    of_dense: float


def model_s(hops: int, sent_bytes: float, ranks: int, link: Link) -> float:
    """Seconds that messages take, one after the other: a latency for every hop, and time for every byte.

    Segments of one ring follow each other, so at most ``4 (P - 1)`` hops count, as in ``rehearsal.model_cost``.

    Raises:
        ValueError: for fewer than two ranks.
    """
    if ranks < 2:
        raise ValueError(f"ranks={ranks!r}: a message needs 2 or more.")
    return _hops(hops, ranks) * link.latency_s + sent_bytes * link.s_per_byte


def _hops(hops: int, ranks: int) -> int:
    return min(hops, ROUNDS_IN_FLIGHT * (ranks - 1))


def fit(measured: Sequence[Measured], counts: Iterable[Traffic]) -> Fit:
    """The link with the least sum of squared differences between modelled and measured seconds, neither part negative.

    Bytes are those measured; hops are those counted for the same compressor (for "ddp": dense) among as many ranks.

    Raises:
        ValueError: if points are too few, or do not tell latency and rate apart; or counts for one are missing.
    """
    known = {(each.strategy, each.ranks): each.hops for each in counts}
    rows = []
    for point in measured:
        key = (DENSE if point.strategy == "ddp" else point.strategy, point.ranks)
        if key not in known:
            raise ValueError(f"measured {point.strategy!r} on {point.ranks} ranks, which was not counted.")
        rows.append((_hops(known[key], point.ranks), point.sent_bytes))
    x = np.array(rows, dtype=np.float64).reshape(-1, 2)  # [m, 2]
    y = np.array([point.seconds for point in measured])  # [m]
    unit = np.abs(x).max(axis=0) if len(x) else np.ones(2)  # hops and bytes are of very different size
    if len(x) < 2 or not unit.all() or np.linalg.matrix_rank(x / unit, tol=1e-6) < 2:
        raise ValueError(f"{len(x)} measured points do not tell latency and rate apart: measure more clusters.")
    both = np.linalg.lstsq(x / unit, y, rcond=None)[0] / unit
    alone = [np.array([x[:, 0] @ y / (x[:, 0] @ x[:, 0]), 0.0]), np.array([0.0, x[:, 1] @ y / (x[:, 1] @ x[:, 1])])]
    candidates = [both] if (both >= 0).all() else [np.maximum(each, 0) for each in alone]
    found = min(candidates, key=lambda each: float(((x @ each - y) ** 2).sum()))
    missed = x @ found - y
    shares = [abs(miss) / seconds for miss, seconds in zip(missed, y, strict=True) if seconds > 0]
    return Fit(
        link=Link(float(found[0]), float(found[1])),
        rms_s=float(np.sqrt((missed**2).mean())),
        median_share=float(median(shares)) if shares else float("nan"),
        points=len(y),
    )


def growth(counts: Iterable[Traffic], few: int = 4, many: int = 16) -> dict[str, Growth]:
    """By how much each strategy's bytes per rank grow from ``few`` to ``many`` ranks.

    Raises:
        ValueError: if dense was not counted among both, or another strategy only among one; or elements differ.
    """
    found: dict[str, dict[int, Traffic]] = {}
    for each in counts:
        found.setdefault(each.strategy, {})[each.ranks] = each
    for strategy, by_ranks in {DENSE: {}, **found}.items():
        for ranks in (few, many):
            if ranks not in by_ranks:
                raise ValueError(f"{strategy!r} was not counted among {ranks} ranks, only among {list(by_ranks)}.")
        if by_ranks[few].elements != by_ranks[many].elements:
            raise ValueError(
                f"{strategy!r} was counted with {by_ranks[few].elements} and {by_ranks[many].elements} elements."
            )
    more = {name: each[many].most_bytes / each[few].most_bytes for name, each in found.items()}
    return {name: Growth(times - 1, times / more[DENSE] - 1) for name, times in more.items()}


def measured_points(rows: Iterable[Summary]) -> list[Measured]:
    """What the bench's rows say of communication; those without a step that sends nothing to compare with are left out.

    Differences that noise made negative are zero.
    """
    return [
        Measured(
            strategy=row.strategy.partition(":")[0],
            ranks=row.ranks,
            sent_bytes=row.counted_bytes,
            seconds=max(row.s.value - row.s_without_communication - (row.ms_compress or 0.0) / 1e3, 0.0),
        )
        for row in rows
        if row.s_without_communication is not None and row.counted_bytes > 0
    ]


def scaled_bytes(count: Traffic, elements: int) -> float:
    """Bytes of the rank that sends most, for a gradient of ``elements``, in proportion to the one counted.

    That is a little much where the one counted is shorter: parts of fixed size weigh less in longer messages.
    """
    return count.most_bytes * (elements / count.elements)

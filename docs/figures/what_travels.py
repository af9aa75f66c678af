"""Count what every strategy sends, and write it between the marks in docs/how-it-works.md.

Run: python docs/figures/what_travels.py (some minutes)
"""

from dataclasses import dataclass
from functools import partial
from math import isqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lightning_sparse.bench.scale import add_gradient, scales
from lightning_sparse.compressors import COMPRESSORS, Compressor
from lightning_sparse.compressors.base import take_step
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Pending
from lightning_sparse.network.costs import HOP_BYTES
from lightning_sparse.network.simulated import SimComm, SimNetwork
from lightning_sparse.selection.sparse import dense
from lightning_sparse.wire import FLOAT32, WIRE_DTYPES, ValueFormat

PAGE = Path(__file__).parents[1] / "how-it-works.md"
RANKS = (4, 16)
N = 1024**2  # elements of the one parameter, a square matrix, whose gradient travels
STEPS, COUNTED = 6, 3  # in the first steps thresholds are estimated
ROUNDED = "int4"  # stands for all formats that round
START, END = "<!-- counted by docs/figures/what_travels.py -->\n", "<!-- end of what is counted -->"


class CountingNetwork(SimNetwork):
    """Simulated ranks that know how many messages had to follow each other.

    Attributes:
        waited: [P], rounds behind what each rank has received.
    """

    def __init__(self, size: int, wire_dtype: ValueFormat, hop_bytes: int) -> None:
        super().__init__(size, wire_dtype, hop_bytes)
        self.waited = [0] * size
        self._rounds: dict[int, int] = {}  # behind each message, by number

    def add(self, part: Any) -> Pending:
        """Take a rank's part of a message, which follows all that this rank has received."""
        self._rounds[part.number] = max(self._rounds.get(part.number, 0), self.waited[part.rank] + 1)
        return super().add(part)

    def deliver(self, part: Any) -> Tensor:
        """Hand a rank a message, which has waited for all ranks."""
        self.waited[part.rank] = max(self.waited[part.rank], self._rounds[part.number])
        return super().deliver(part)


class Marked(ValueFormat):
    """Values as they are, but for those that a rank sends in one round: these are altered, so that it is seen where."""

    name = "marked"

    def __init__(self, network: CountingNetwork, comm: SimComm, marked: int) -> None:
        self._network, self._comm, self._round = network, comm, marked

    def nbytes(self, count: int) -> int:
        """Bytes of ``count`` values."""
        return FLOAT32.nbytes(count)

    def take(self, values: Tensor, out: Tensor) -> None:
        """Move ``values`` onto the wire."""
        written = values.clone()
        if self._network.waited[self._comm.rank] + 1 == self._round:
            written *= 1 + (torch.arange(1, len(values) + 1) % 7) / 1000
        values -= written
        FLOAT32.take(written, out)

    def read(self, payload: Tensor, out: Tensor) -> None:
        """Set ``out`` to the values in ``payload``."""
        FLOAT32.read(payload, out)

    def add(self, payload: Tensor, out: Tensor) -> None:
        """Add the values in ``payload`` to ``out``."""
        FLOAT32.add(payload, out)


@dataclass(frozen=True)
class Counts:
    """What a rank sends in each of the steps that are counted."""

    sent_bytes: list[int]
    messages: list[int]
    rounds: list[int]
    hops: list[int]
    total: Tensor  # [n], of the last step

    @property
    def bytes_each(self) -> str:
        """Bytes for each element, the mean over the steps."""
        return f"{fmean(self.sent_bytes) / self.total.numel():.3f}"

    @property
    def numbers(self) -> list[str]:
        """Messages, rounds and hops."""
        return [_range(each) for each in (self.messages, self.rounds, self.hops)]


def _range(counts: list[int]) -> str:
    return f"{min(counts)}" if len(set(counts)) == 1 else f"{min(counts)} to {max(counts)}"


def count(
    compressor: Compressor,
    ranks: int,
    wire_dtype: ValueFormat,
    n: int = N,
    hop_bytes: int = HOP_BYTES,
    steps: int = STEPS,
    marked: int = -1,
) -> Counts:
    """Count the last steps of a matrix of ``n`` elements; with ``marked``, that round of the last is altered."""
    weights = torch.ones(isqrt(n), isqrt(n))
    groups, scale = [Group(0, ("weight",), (weights,)) for _ in range(ranks)], scales(n)
    found = []
    for step in range(steps):
        network = CountingNetwork(ranks, wire_dtype, hop_bytes)
        if marked >= 0:
            altered = marked if step == steps - 1 else 0
            network.comms = [comm.in_format(Marked(network, comm, altered)) for comm in network.comms]
        for rank, group in enumerate(groups):
            add_gradient(group.unsent, scale, step, rank)
        totals = network.run([take_step(compressor, g, c) for g, c in zip(groups, network.comms, strict=True)])
        comm = network.comms[0]
        found.append((comm.sent_bytes, comm.messages, max(network.waited), comm.hops))
    return Counts(*(list(each) for each in zip(*found[-COUNTED:], strict=True)), dense(totals[0], n))


def roundings(compressor: Compressor, ranks: int) -> int:
    """How often a value is rounded, at most, on its way into the total: in how many rounds altering it is felt."""
    longer = FLOAT32.nbytes(N) / WIRE_DTYPES[ROUNDED].nbytes(
        N
    )  # marked values: with as much latency, sums go as theirs
    marked_count = partial(count, compressor, ranks, FLOAT32, N, round(longer * HOP_BYTES), steps=2)
    plain = marked_count(marked=0)
    felt = torch.zeros_like(plain.total)
    for marked in range(1, plain.rounds[-1] + 1):
        total = marked_count(marked=marked).total
        altered = (total - plain.total).abs() > 1e-5 * plain.total.abs()  # not merely added in another order
        felt += altered & (total != 0) & (plain.total != 0)
    return int(felt.max())


def row(*cells: object) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(map(str, cells))} |\n"


def table() -> str:
    """Bytes of every strategy for each element; in rounded values also rounds, hops and roundings."""
    columns = [(ranks, wire) for ranks in RANKS for wire in ("float32", ROUNDED)]
    heads = [f"{wire}, {ranks} ranks" for ranks, wire in columns]
    text = row("strategy", *heads, "rounds", "hops", "roundings") + row(*["---"] * (4 + len(columns)))
    for name, kind in COMPRESSORS.items():
        found = {at: count(kind(), at[0], WIRE_DTYPES[at[1]]) for at in columns}
        numbers = found[RANKS[0], ROUNDED].numbers[1:]
        text += row(f"`{name}`", *(found[at].bytes_each for at in columns), *numbers, roundings(kind(), RANKS[0]))
    return text


if __name__ == "__main__":
    torch.set_num_threads(1)
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(f"{before}{START}\n{table()}\n{END}{rest.partition(END)[2]}")

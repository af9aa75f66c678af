"""Members: what averages with others, a rank alone or the ranks of a machine together."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

AUTO, NODE = "auto", "node"  # what local_group may be, beside a number


@dataclass(frozen=True)
class Members:
    """Who averages with whom: M members of L ranks each.

    A rank owns a slice of everything, and exchanges it with its column, the ranks at the same place in all members.
    Ranks are numbered as in the group that they are of, P = M * L.

    Attributes:
        ranks: of each member [M][L], rising, as process groups number them; members are sorted by their first.
        why: the ranks are together so, in words.
    """

    ranks: tuple[tuple[int, ...], ...]
    why: str = ""

    @property
    def size(self) -> int:
        """M."""
        return len(self.ranks)

    @property
    def local_size(self) -> int:
        """L."""
        return len(self.ranks[0])

    @property
    def columns(self) -> list[list[int]]:
        """The ranks of each column [L][M]."""
        return [list(column) for column in zip(*self.ranks, strict=True)]

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of the member that ``rank`` is in, and its place in it."""
        return next((m, ranks.index(rank)) for m, ranks in enumerate(self.ranks) if rank in ranks)

    def differing_in_columns(self, values: Sequence[Hashable]) -> str:
        """Say which ranks' ``values`` [P] are not those of the others in their column; empty if all are the same."""
        return _differing(values, self.columns)

    def differing_inside(self, values: Sequence[Hashable]) -> str:
        """Say which ranks' ``values`` [P] are not those of the others in their member; empty if all are the same."""
        return _differing(values, self.ranks)

    def __str__(self) -> str:
        if self.local_size == 1:
            return f"{self.size} ranks{f' ({self.why})' if self.why else ''}"
        return f"{self.size} members of {self.local_size} ranks each ({self.why})"


def alone(size: int, why: str = "") -> Members:
    """Every one of ``size`` ranks is a member."""
    return Members(tuple((rank,) for rank in range(size)), why)


def _differing(values: Sequence[Hashable], parts: Sequence[Sequence[int]]) -> str:
    """In words the ranks that have the same, of the first of ``parts`` that do not all have the same."""
    for part in parts:
        ranks_of: dict[Hashable, list[int]] = {}
        for rank in part:
            ranks_of.setdefault(values[rank], []).append(rank)
        if len(ranks_of) > 1:
            return " and on ".join(f"rank{'s' * (len(r) > 1)} {', '.join(map(str, r))}" for r in ranks_of.values())
    return ""

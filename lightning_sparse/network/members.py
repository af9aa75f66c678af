"""Members: what averages with others, a rank alone or the ranks of a machine together."""

from dataclasses import dataclass

from lightning_sparse.settings import counted

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

    def __str__(self) -> str:
        return f"{counted(self.size, 'member')} of {self.local_size} ranks each ({self.why})"


def alone(size: int) -> Members:
    """Every one of ``size`` ranks is a member."""
    return Members(tuple((rank,) for rank in range(size)))

"""Skip-Reduce: leave out the first steps of a ring reduce-scatter.  No indices, no selection."""

from dataclasses import dataclass
from typing import Literal

from lightning_sparse.checks import (
    check_seed,
    check_setting,
    check_switch,
    checked_patterns,
    is_number,
    is_whole,
    matches,
)
from lightning_sparse.compressors.base import Compressor
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.comm import Comm, Rounds
from lightning_sparse.network.sums import two_hop_sum
from lightning_sparse.selection.streams import draw

ROTATIONS = "even", "random", "static"
DIVISORS = "world", "contributors"


@dataclass(frozen=True)
class SkipReduce(Compressor):
    """A ring all-reduce whose first s = round(skip * P) reduce-scatter steps are left out (at most P - 1).

    Each rank sends 2(P-1) - s slices of n / P values instead of 2(P-1); every slice of the result holds the sum of
    P - s ranks.  They go to the slice's owner in one hop and from it in another, where the papers go round a ring.
    What a rank did not contribute stays in its ``unsent`` and goes out when the rotation next lets it.
    Kasan, Abts, Choi and Kim, "SkipReduce" (MICRO 2025); Kainolda, "Skip-Reduce" (KAIST, 2023).

    Args:
        skip: fraction of the P ranks left out of every slice, in [0, 1].
        rotation: how the ring's labels are turned from step to step, which decides who is left out.  "even" leaves
            every (rank, slice) out in s of P steps, spread as evenly as can be, so that nothing waits longer than it
            must; "random" turns by a shared random amount, as the papers do, to the same frequency s / P; "static"
            never turns: the same slices of a rank are left out for ever, so it cannot deliver what it keeps.
        divisor: "world" divides the sum by P; "contributors" by the P - s ranks in it, an unbiased estimate for use
            without error feedback.
        error_feedback: keep what was left out.  False drops it, as the papers' code does, for replication.
        protect: shell-style patterns (``"*.embedding.*"``) of parameter names that are always summed densely.
        protect_below: parameters with fewer elements than this are always summed densely.
        whole_below: groups with fewer elements than this are summed whole.
        seed: of the rotation's start or draws; the same on every rank.
    """

    skip: float = 0.5
    rotation: Literal["even", "random", "static"] = "even"
    divisor: Literal["world", "contributors"] = "world"
    error_feedback: bool = True
    protect: tuple[str, ...] = ()
    protect_below: int = 0
    whole_below: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        fraction = is_number(self.skip) and 0 <= self.skip <= 1
        check_setting(self, "skip", fraction, "a number in [0, 1], the fraction of ranks left out: 0.5 for half")
        check_setting(self, "rotation", self.rotation in ROTATIONS, f"one of {', '.join(ROTATIONS)}")
        check_setting(self, "divisor", self.divisor in DIVISORS, f"one of {', '.join(DIVISORS)}")
        check_switch(self, "error_feedback")
        if self.divisor == "contributors" and self.error_feedback:
            raise ValueError(
                "SkipReduce(divisor='contributors', error_feedback=True) would apply what is kept a second time when "
                "it is sent; use divisor='world', or error_feedback=False."
            )
        for name in ("protect_below", "whole_below"):
            elements = is_whole(getattr(self, name), least=0)
            check_setting(self, name, elements, "an integer, at least 0: a number of elements; 0 is none")
        check_seed(self, self.seed)
        object.__setattr__(self, "protect", checked_patterns("SkipReduce: protect", self.protect))

    @classmethod
    def as_published(cls, skip: float = 0.5, protect: tuple[str, ...] = ()) -> "SkipReduce":
        """As the authors' code runs it: random rotation, nothing kept, and no step skipped of a bucket below 100,000.

        Theirs are the buckets of DDP, so give the strategy ``fusion="bucket"``; and to ``protect`` what they protect by
        the size of its bucket, such as the embedding of BERT.
        """
        return cls(skip, rotation="random", error_feedback=False, protect=protect, whole_below=100_000)

    def steps_skipped(self, size: int) -> int:
        """s: reduce-scatter steps left out among ``size`` ranks."""
        return min(round(self.skip * size), size - 1)

    def reduce(self, group: Group, comm: Comm) -> Rounds:
        """Sum what the shortened ring would."""
        skipped = self.steps_skipped(comm.size) if group.n >= self.whole_below else 0
        rotation = self._rotation_now(group, comm.size, skipped)
        total = yield from two_hop_sum(group.unsent, comm, skipped, rotation)
        if not self.error_feedback:
            group.unsent.zero_()
        if self.divisor == "contributors":
            total.mul_(comm.size / (comm.size - skipped))
        return total

    def _rotation_now(self, group: Group, size: int, skipped: int) -> int:
        if self.rotation == "random":
            return group.draw(self.seed) % size
        if self.rotation == "even":  # the arc of skipped ranks moves on by its own length, from a random start
            return (draw(self.seed, group.index) + group.step * skipped) % size
        return 0

    def is_dense(self, name: str, elements: int) -> bool:
        return elements < self.protect_below or matches(name, self.protect)

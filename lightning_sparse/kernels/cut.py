"""A vector cut into a slice for each rank, and a segment of each slice."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Cut:
    """The same segment of each of P slices of a vector [n].

    With labels L = (rank + rotation) mod P, the rank with label c owns slice c.
    """

    size: int  # P
    width: int  # elements of a slice; the last ones may be shorter, or empty, where the vector ends
    start: int  # of the segment in its slice
    length: int  # elements of the segment, at most ``width - start``
    rotation: int = 0

    def of(self, flat: Tensor, owner: int) -> Tensor:
        """The segment of ``flat`` [n] that rank ``owner`` owns; shorter, or empty, where ``flat`` ends."""
        first = (owner + self.rotation) % self.size * self.width + self.start
        return flat[min(first, flat.numel()) : min(first + self.length, flat.numel())]

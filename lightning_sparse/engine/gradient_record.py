"""A record of this rank's last gradients, at some elements, for trying other compressors on them."""

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group

STEPS = 8  # that are kept
RUN = 256  # neighbours that are taken together


class GradientRecord:
    """The gradients of the last steps at ``elements`` spread evenly over all groups, which must stay as they are.

    There are so many in all, at most, but at least one of each group that has any.
    """

    def __init__(self, groups: Sequence[Group], elements: int) -> None:
        n = sum(group.n for group in groups)
        self._groups = groups
        self._places = [
            _spread(group.n, -(-elements * group.n // max(n, 1))).to(group.unsent.device) for group in groups
        ]
        self._unsent: list[Tensor | None] = [None] * len(groups)
        self._left = self._read()
        self._steps: deque[Tensor] = deque(maxlen=STEPS)

    def before(self, group: Group) -> None:
        """Note what is unsent of ``group`` before this step's messages, its gradient included."""
        self._unsent[group.index] = group.unsent[self._places[group.index]]

    def restored(self, group: Group) -> None:
        """Note that what is unsent of ``group`` was set to what it had been."""
        self._left[group.index] = group.unsent[self._places[group.index]]

    def end_step(self) -> None:
        """Note what is left of it."""
        left = self._read()
        unsent = [x if x is not None else y for x, y in zip(self._unsent, left, strict=True)]
        self._steps.append(torch.cat([now - before for now, before in zip(unsent, self._left, strict=True)]))
        self._left, self._unsent = left, [None] * len(self._groups)

    def gradients(self) -> Tensor:
        """The gradients, [T, m]; one of zeros if there was none."""
        return torch.stack(list(self._steps) or [torch.cat(self._left).zero_()]).nan_to_num_(0.0, 0.0, 0.0)

    def weights(self) -> Tensor:
        """The parameters' values at the same elements, [m]."""
        flat = [torch.cat([p.detach().reshape(-1) for p in group.parameters]).float() for group in self._groups]
        return torch.cat([x[places] for x, places in zip(flat, self._places, strict=True)])

    def _read(self) -> list[Tensor]:
        return [group.unsent[places] for group, places in zip(self._groups, self._places, strict=True)]


def _spread(n: int, elements: int) -> Tensor:
    """Indices of about ``elements`` of ``n``: runs of neighbours, which share a scale, evenly spread."""
    runs = max(1, min(elements, n) // RUN)
    starts, within = (torch.arange(count, device="cpu") for count in (runs, min(RUN, elements, n)))
    return ((starts * n // runs)[:, None] + within).flatten().clamp_(max=max(n - 1, 0))[: n or 0]

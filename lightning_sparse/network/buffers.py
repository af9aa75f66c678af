"""Memory for messages, which the groups of a lane use one after the other."""

from collections import Counter

import torch
from torch import Tensor


class Buffers:
    """Tensors by name, lent until a group's step ends; the next group gets the same memory."""

    def __init__(self) -> None:
        # Bytes, by name, device, and the loans before in the group's step.
        self._kept: dict[tuple[str, torch.device, int], Tensor] = {}
        self._lent: Counter[tuple[str, torch.device]] = Counter()

    def lend(self, name: str, elements: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Lend a tensor [elements], uninitialised; several loans under a name differ by their order."""
        key, size = (name, device, self._lent[name, device]), elements * dtype.itemsize
        self._lent[name, device] += 1
        if key not in self._kept or self._kept[key].numel() < size:
            self._kept[key] = torch.empty(size, dtype=torch.uint8, device=device)
        return self._kept[key][:size].view(dtype)

    @property
    def nbytes(self) -> int:
        return sum(kept.numel() for kept in self._kept.values())

    def reuse(self) -> None:
        self._lent.clear()

    def free(self) -> None:
        self._kept.clear()

"""Memory that is used again: on a CPU the first touch of new memory costs more than what is then computed in it."""

import threading

import torch
from torch import Tensor


class Scratch:
    """Lends tensors [n], uninitialised, and takes them back; on other devices PyTorch keeps what was freed itself."""

    def __init__(self) -> None:
        self._free: list[Tensor] = []
        self._lock = threading.Lock()  # lanes take, the main thread gives back

    def take(self, like: Tensor) -> Tensor:
        """Return a tensor of the shape [n] and kind of ``like``: the smallest that is free, or a new one."""
        if like.device.type != "cpu":
            return torch.empty_like(like)
        with self._lock:
            fitting = [x for x in self._free if x.dtype == like.dtype and x.numel() >= like.numel()]
            if fitting:
                found = min(fitting, key=Tensor.numel)
                self._free = [x for x in self._free if x is not found]
            else:  # one that is too small is replaced, so that there are as many as are in use at once
                self._free = sorted(self._free, key=Tensor.numel)[1:]
                found = torch.empty_like(like)
        return found[: like.numel()]

    def give(self, lent: Tensor) -> None:
        """Take back what was lent; nobody may use it any more."""
        if lent.device.type == "cpu":
            with self._lock:
                self._free.append(lent if lent._base is None else lent._base)

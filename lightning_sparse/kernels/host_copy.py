"""A tensor on its way from a device to the host."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of ``x`` for the host, made beside the device's work; of a tensor on the CPU it is that tensor.

    It must not change before what is launched on the current stream now is done.
    """

    def __init__(self, x: Tensor) -> None:
        self.of, self._host = x, x
        self._arrived: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            self._host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(x.device))

    def read(self) -> Tensor:
        """Wait until it has arrived, which a step later it has, and return it, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host

"""How a Triton kernel is started."""

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], x: Tensor, *others: Tensor | int | float, **options: Any) -> None:
    """Start ``grid`` programs of ``kernel(x, *others)`` on the device of ``x``; none where the grid is empty.

    Products are rounded before they are added to, as on the CPU.
    """
    if 0 not in grid:
        with torch.cuda.device_of(x):
            kernel[grid](x, *others, enable_fp_fusion=False, **options)

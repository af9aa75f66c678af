"""The text that byte models train on and are judged by: the source of Python's own standard library."""

import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

TEXT_BYTES = 2_000_000  # of source code that the byte models train on
CONTEXT = 64  # bytes a byte model sees
HELD_OUT_WINDOWS = 64  # of source code after that, to judge byte models by


def source_windows(most_bytes: int, wanted: Callable[[int], bool] = lambda number: True) -> Tensor:
    """Windows [N, CONTEXT + 1] of the bytes of the standard library's modules, of those whose number is ``wanted``."""
    text = bytearray()
    for number, file in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))):
        text += file.read_bytes() if wanted(number) else b""
        if len(text) >= most_bytes:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:most_bytes].unfold(0, CONTEXT + 1, CONTEXT)


def other_source_code() -> Tensor:
    """Windows [HELD_OUT_WINDOWS, CONTEXT + 1] from all over the source code after that of :func:`source_code`."""
    after = source_windows(2 * TEXT_BYTES)[TEXT_BYTES // CONTEXT + 1 :]
    return after[:: len(after) // HELD_OUT_WINDOWS][:HELD_OUT_WINDOWS]

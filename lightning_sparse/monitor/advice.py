"""What a training could send less with: settings that its strategy has."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from lightning_sparse.auto.policy import Auto
from lightning_sparse.compressors import MomentumCorrection
from lightning_sparse.compressors.wrapper import Wrapper

LESS = {"density": "a lower density", "skip": "a higher skip", "rank": "a lower rank"}  # of a compressor
SHORTEST = ("sign", "int2")  # formats on the wire


def ways_to_send_less(options: Any, is_sharded: bool) -> list[str]:
    """Name what may be set otherwise with these ``options`` of a strategy; nothing where ``sparse_auto`` chooses."""
    inner, may_be_local = options.compressor, not is_sharded and options.local_group == 1
    if isinstance(inner, Auto):
        return []
    while isinstance(inner, Wrapper):
        may_be_local &= not isinstance(inner, MomentumCorrection)
        inner = inner.compressor
    has: Callable[[str], bool] = {field.name for field in fields(inner)}.__contains__
    found = [text for name, text in LESS.items() if has(name)]
    if not found and options.wire_dtype not in SHORTEST:
        found.append("a shorter wire_dtype")
    if may_be_local:
        found.append("more local_steps" if options.local else "local_steps")
    return found

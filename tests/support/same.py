"""Whether two things are the same."""

from collections import deque
from typing import Any

import torch
from torch import Tensor


def same(a: Any, b: Any) -> bool:
    """Whether both are of the same types, and equal to the last bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple | deque):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)

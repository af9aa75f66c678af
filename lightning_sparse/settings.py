"""Settings as text that is equal where their values are: in every process, and in a checkpoint."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import fields, is_dataclass
from types import BuiltinFunctionType, FunctionType

import numpy as np
import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes)  # whose ``repr`` is their value
DIGEST = 16  # hexadecimal digits of the SHA-256 of a tensor's bytes


def as_text(value: object) -> str:
    """``value`` as text, equal for two values only if all their parts are equal.

    A dataclass shows every field, also those that its ``repr`` leaves out; a tensor or an array its dtype, its shape
    and a digest of its bytes; a function or a class where it is defined; any other object what pickling would keep.

    Raises:
        TypeError: if the value cannot be known, as that of a lambda.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _place(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return _digest(value.dtype, value.shape, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _digest(value.dtype, value.shape, np.ascontiguousarray(value))
    if is_dataclass(value):
        return f"{type(value).__qualname__}({_all((f.name, getattr(value, f.name)) for f in fields(value))})"
    return _container(value) if type(value) in (tuple, list, dict, set, frozenset) else _pickled(value)


def same(a: object, b: object) -> bool:
    """Whether ``a`` and ``b`` have the same text."""
    return a is b or as_text(a) == as_text(b)


def _all(named: Iterable[tuple[str, object]]) -> str:
    return ", ".join(f"{name}={as_text(value)}" for name, value in named)


def _place(value: type | FunctionType | BuiltinFunctionType) -> str:
    """Where a function or class is defined, by which it is found again."""
    if "<lambda>" in value.__qualname__ or ("<locals>" in value.__qualname__ and not isinstance(value, type)):
        raise TypeError(f"{value.__qualname__} has no name of its own in its module")
    return f"{value.__module__}.{value.__qualname__}"


def _digest(dtype: object, shape: Iterable[int], data: np.ndarray) -> str:
    digest = hashlib.sha256(data.tobytes()).hexdigest()[:DIGEST]
    return f"tensor({str(dtype).removeprefix('torch.')} {list(shape)} {digest})"


def _container(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{as_text(key)}: {as_text(each)}" for key, each in value.items())) + "}"
    assert isinstance(value, tuple | list | set | frozenset)
    parts = [as_text(each) for each in value]
    if isinstance(value, list):
        return f"[{', '.join(parts)}]"
    if isinstance(value, tuple):
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    return f"{type(value).__name__}({', '.join(sorted(parts))})"


def _pickled(value: object) -> str:
    """The class of ``value``, and what pickling would keep of it."""
    kept = value.__reduce_ex__(4)
    if isinstance(kept, str):  # the name of a constant
        return f"{type(value).__qualname__} {kept}"
    parts = [list(part) if isinstance(part, Iterator) else part for part in kept[1:] if part is not None]
    return f"{type(value).__qualname__}{_container(tuple(parts))}"

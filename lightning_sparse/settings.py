"""Settings: what is none is refused; and as text they are equal where their values are, in every process and file."""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import wraps
from inspect import signature
from types import BuiltinFunctionType, FunctionType
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype)  # whose ``repr`` is their value
DIGEST = 16  # hexadecimal digits of the SHA-256 of a tensor's bytes

Kind = TypeVar("Kind")


def unknown_setting(kind: type, given: Iterable[str]) -> str | None:
    """The first of the names ``given`` that the ``__init__`` of ``kind`` does not take."""
    takes = signature(kind.__init__).parameters  # type: ignore[misc]  # of the class that is made
    if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        return None
    return next((name for name in given if name not in takes), None)


def check_known(kind: type, given: Mapping[str, object]) -> None:
    """Raise a TypeError for a keyword of ``given`` that the ``__init__`` of ``kind`` does not take."""
    name = unknown_setting(kind, given)
    if name is None:
        return
    known = list(signature(kind.__init__).parameters)[1:]  # type: ignore[misc]  # of the class that is made
    close = get_close_matches(name, known, n=1)
    raise TypeError(
        f"{kind.__name__}: {name} must be one of its settings, {', '.join(known) or 'of which it has none'}; got "
        f"{name}={given[name]!r}.{f' Did you mean {close[0]}?' if close else ''}"
    )


def names_checked(kind: type[Kind]) -> type[Kind]:
    """Have the class ``kind`` refuse what is not a setting in these words, not in Python's."""
    init = kind.__init__

    @wraps(init)  # whose signature a config file goes by
    def checked(self: Kind, *args: object, **given: object) -> None:
        check_known(kind, given)
        init(self, *args, **given)

    kind.__init__ = checked  # type: ignore[method-assign,assignment]
    return kind


def as_text(value: object) -> str:
    """Return ``value`` as text, equal for two values only if all their parts are equal.

    A dataclass shows every field, also those that its ``repr`` leaves out, but for a default of one whose metadata have
    "newer": it is newer than checkpoints, which have such texts.  A tensor or an array its dtype, its shape
    and a digest of its bytes; a function or a class where it is defined.

    Raises:
        TypeError: if the value cannot be known, as that of a lambda or of an object of any other class.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if type(value) in PLAIN:
        return repr(value)
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, type | FunctionType | BuiltinFunctionType):
        return _place(value)
    if isinstance(value, Tensor) and value.layout == torch.strided:
        return _digest(value.dtype, value.shape, value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return _digest(value.dtype, value.shape, np.ascontiguousarray(value))
    if is_dataclass(value):
        shown = [field for field in fields(value) if not ("newer" in field.metadata and _is_default(value, field))]
        parts = (f"{field.name}={as_text(getattr(value, field.name))}" for field in shown)
        return f"{type(value).__qualname__}({', '.join(parts)})"
    return _container(value)


def _is_default(value: object, field: Field[object]) -> bool:
    return bool(getattr(value, field.name) == field.default)


def same(a: object, b: object) -> bool:
    """Whether ``a`` and ``b`` have the same text."""
    return a is b or as_text(a) == as_text(b)


def changed(value: object) -> dict[str, object]:
    """The settings of a dataclass that are not the defaults, by name.

    Where a field's default stands for something else, its metadata have that as "default".
    """
    found = {}
    for field in fields(value):  # type: ignore[arg-type]  # it is one
        usual = field.default if field.default_factory is MISSING else field.default_factory()
        usual = field.metadata.get("default", usual)
        now = getattr(value, field.name)
        if usual is MISSING or not same(now, usual):
            found[field.name] = now
    return found


def brief(value: object) -> str:
    """Write a compressor for a line that people read: its first setting, and those that are not the defaults."""
    if not is_dataclass(value):
        return repr(value)
    if type(value).__str__ is not object.__str__:
        return str(value)
    first = {field.name: getattr(value, field.name) for field in fields(value)[:1]}
    shown = [f"{name}={brief(now)}" for name, now in (first | changed(value)).items()]
    return f"{type(value).__qualname__}({', '.join(shown)})"


def counted(count: int, what: str) -> str:
    """Write "1 step" or "1,000 steps"."""
    return f"{count:,} {what}{'s'[: count != 1]}"


def _place(value: type | FunctionType | BuiltinFunctionType) -> str:
    """The place where a function or class is defined, by which it is found again."""
    if "<lambda>" in value.__qualname__ or ("<locals>" in value.__qualname__ and not isinstance(value, type)):
        raise TypeError(f"{value.__qualname__} has no name of its own in its module")
    return f"{value.__module__}.{value.__qualname__}"


def _digest(dtype: object, shape: Iterable[int], data: np.ndarray) -> str:
    digest = hashlib.sha256(data.tobytes()).hexdigest()[:DIGEST]
    return f"tensor({str(dtype).removeprefix('torch.')} {list(shape)} {digest})"


def _container(value: object) -> str:
    if type(value) is dict:
        return "{" + ", ".join(sorted(f"{as_text(key)}: {as_text(each)}" for key, each in value.items())) + "}"
    if type(value) is list:
        return f"[{', '.join(map(as_text, value))}]"
    if type(value) is tuple:
        return f"({', '.join(map(as_text, value))}{',' if len(value) == 1 else ''})"
    if type(value) in (set, frozenset):
        assert isinstance(value, set | frozenset)
        return f"{type(value).__name__}({', '.join(sorted(map(as_text, value)))})"
    raise TypeError(f"what a {type(value).__name__} holds is not known")

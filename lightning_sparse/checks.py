"""Checks of arguments: each raises an error that says what must be, what was given, and what to do."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase
from numbers import Integral, Real
from typing import Any, TypeGuard

from lightning_sparse.wire import INDEX_FORMATS, INDEX_LIMIT


def check_whole(name: str, value: object, least: int, advice: str = "") -> None:
    """Raise a ValueError with ``advice`` unless ``value`` is an integer of at least ``least``."""
    if not is_whole(value, least):
        raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}.{advice and ' ' + advice}")


def check_one_of(name: str, value: object, allowed: Collection[str]) -> None:
    """Raise a ValueError unless ``value`` is one of the strings ``allowed``."""
    if not isinstance(value, str) or value not in allowed:
        close = get_close_matches(str(value), allowed, n=1)
        meant = f" Did you mean {close[0]!r}?" if close else ""
        raise ValueError(f"{name} must be one of {', '.join(allowed)}; got {value!r}.{meant}")


def check_density(compressor: object, density: float) -> None:
    """Raise a ValueError that names the compressor and the value unless ``density`` is in (0, 1]."""
    if not (is_number(density) and 0 < density <= 1):
        raise ValueError(
            f"{type(compressor).__name__}: density must be a number above 0 and at most 1; got {density!r}. It is the "
            "fraction of elements sent: 0.01 sends one in a hundred."
        )


def check_seed(compressor: object, seed: int) -> None:
    """Raise a ValueError that names the compressor and the value unless ``seed`` is an integer."""
    if not isinstance(seed, int):
        raise ValueError(f"{type(compressor).__name__}: seed must be an integer; got {seed!r}. Give every rank one.")


def check_selecting(compressor: object) -> None:
    """Raise a ValueError unless ``density``, ``slack`` and ``indices`` of ``compressor``, where it has them, can be."""
    name, slack, indices = (
        type(compressor).__name__,
        getattr(compressor, "slack", 1.0),
        getattr(compressor, "indices", ""),
    )
    check_density(compressor, getattr(compressor, "density", 1.0))
    if not (is_number(slack) and 1 <= slack <= INDEX_LIMIT):
        raise ValueError(
            f"{name}: slack must be a number of at least 1 and at most 2**31; got {slack!r}. It is the room in a "
            "message, over what is meant to travel in it: 1.25 leaves a quarter for steps with more."
        )
    if not isinstance(indices, str) or indices not in ("auto", *INDEX_FORMATS):
        raise ValueError(f"{name}(indices={indices!r}): indices must be one of auto, {', '.join(INDEX_FORMATS)}.")


def check_switch(compressor: object, name: str) -> None:
    """Raise a ValueError that names the compressor and the value unless its setting ``name`` is True or False."""
    if not isinstance(value := getattr(compressor, name), bool):
        raise ValueError(f"{type(compressor).__name__}: {name} must be True or False; got {value!r}.")


def checked_patterns(what: str, given: object) -> tuple[str, ...]:
    """The patterns that were ``given`` as a tuple, since a config file gives a list and settings are hashable.

    Raises:
        ValueError: if it is a string, or anything else than strings.
    """
    if is_names(given):
        return tuple(given)
    meant = [given] if isinstance(given, str) else ["*bias"]
    raise ValueError(f"{what} must be a list of patterns; got {given!r}. Write {meant!r}, say.")


def is_number(value: object) -> bool:
    """Whether ``value`` is an integer or a fraction, and not NaN."""
    return not isinstance(value, bool) and isinstance(value, Real) and value == value


def is_whole(value: object, least: int) -> bool:
    """Whether ``value`` is an integer, ``least`` or more."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def is_list(value: object) -> TypeGuard[Sequence[object]]:
    """Whether ``value`` is a list, a tuple or the like, and not a string."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def is_names(value: object) -> TypeGuard[Sequence[str]]:
    """Whether ``value`` is a list of strings."""
    return is_list(value) and all(isinstance(each, str) for each in value)


def class_names(objects: Iterable[object]) -> set[str]:
    """The names of the classes of these, and of what those derive from: two packages have classes of the same names."""
    return {kind.__name__ for each in objects for kind in type(each).__mro__}


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether ``name`` matches one of the shell-style ``patterns``."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_setting(compressor: object, name: str, valid: bool, must: str) -> None:
    """Raise a ValueError that names the compressor and the value of its setting ``name`` unless it is ``valid``."""
    if not valid:
        raise ValueError(f"{type(compressor).__name__}: {name} must be {must}; got {getattr(compressor, name)!r}.")


def uncompiled(name: str) -> str:
    """The name of a parameter or buffer without what ``torch.compile`` adds to it."""
    return name.replace("_orig_mod.", "")


def renamed(old: str, new: str) -> Any:
    """A property with the ``old`` name of an attribute, which warns, and is what the ``new`` one is."""

    def read(owner: Any) -> Any:
        message = f"{old} is called {new} now, and will go: write .{new} in place of .{old}."
        warnings.warn(message, DeprecationWarning, stacklevel=2)
        return getattr(owner, new)

    return property(read)

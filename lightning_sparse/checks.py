"""Checks of arguments: each raises an error that says what must be, what was given, and what to do."""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from numbers import Integral, Real

from lightning_sparse.wire import INDEX_LIMIT


def check_density(compressor: object, density: float) -> None:
    """Raise a ValueError that names the compressor and the value unless ``density`` is in (0, 1]."""
    if not (is_number(density) and 0 < density <= 1):
        raise ValueError(
            f"{type(compressor).__name__}(density={density!r}): density is the fraction of elements sent, "
            "so it must be above 0 and at most 1; 0.01 sends one in a hundred."
        )


def check_slack(compressor: object, slack: float) -> None:
    """Raise a ValueError that names the compressor and the value unless ``slack`` is from 1 to 2**31."""
    if not (is_number(slack) and 1 <= slack <= INDEX_LIMIT):
        raise ValueError(
            f"{type(compressor).__name__}(slack={slack!r}): a message needs room for the elements that are meant to "
            "travel in it, so slack is 1 or more, at most 2**31; 1.25 leaves a quarter for steps with more."
        )


def check_seed(compressor: object, seed: int) -> None:
    """Raise a ValueError that names the compressor and the value unless ``seed`` is an integer."""
    if not isinstance(seed, int):
        raise ValueError(f"{type(compressor).__name__}(seed={seed!r}): seed is an integer, the same on every rank.")


def check_switch(compressor: object, name: str) -> None:
    """Raise a ValueError that names the compressor and the value unless its setting ``name`` is True or False."""
    if not isinstance(value := getattr(compressor, name), bool):
        raise ValueError(f"{type(compressor).__name__}({name}={value!r}): {name} is True or False.")


def checked_patterns(compressor: object, protect: object) -> tuple[str, ...]:
    """``protect`` as a tuple, since a config file gives a list and settings are hashable.

    Raises:
        ValueError: if it is a string, or anything else than strings.
    """
    if isinstance(protect, Sequence) and is_list(protect) and all(isinstance(p, str) for p in protect):
        return tuple(protect)
    meant = [protect] if isinstance(protect, str) else ["*bias"]
    raise ValueError(f"{type(compressor).__name__}(protect={protect!r}): protect is a list of patterns: {meant!r}.")


def is_number(value: object) -> bool:
    """Whether ``value`` is an integer or a fraction, and not NaN."""
    return not isinstance(value, bool) and isinstance(value, Real) and value == value


def is_whole(value: object, least: int) -> bool:
    """Whether ``value`` is an integer, ``least`` or more."""
    return not isinstance(value, bool) and isinstance(value, Integral) and int(value) >= least


def is_list(value: object) -> bool:
    """Whether ``value`` is a list, a tuple or the like, and not a string."""
    return isinstance(value, Sequence) and not isinstance(value, str)


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether ``name`` matches one of ``patterns``, as of a shell."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_warmup(warmup_steps: object) -> None:
    """Raise a ValueError with the value unless it is a number of steps."""
    if not is_whole(warmup_steps, least=0):
        raise ValueError(f"warmup_steps={warmup_steps!r} is a number of dense steps, so 0 or more; 0 is none.")


def check_setting(compressor: object, name: str, valid: bool, must: str) -> None:
    """Raise a ValueError that names the compressor and the value of its setting ``name`` unless it is ``valid``."""
    if not valid:
        value = getattr(compressor, name)
        raise ValueError(f"{type(compressor).__name__}({name}={value!r}): {name} must be {must}.")

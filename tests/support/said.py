"""What a call says, as a warning or an error."""

import warnings
from collections.abc import Callable
from typing import Any


def warned(call: Callable[..., object], *args: Any, **kwargs: Any) -> list[str]:
    """The texts of all warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args, **kwargs)
    return [str(each.message) for each in caught]


def refusal(call: Callable[..., object], *args: Any, **kwargs: Any) -> str:
    """The text of the error it ends with: one that a user may cause; empty if there is none."""
    try:
        call(*args, **kwargs)
    except (ValueError, TypeError, RuntimeError) as error:
        return str(error)
    return ""


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Which error it ends with: its type and text."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"

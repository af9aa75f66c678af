"""A clock whose time does not depend on what else runs here."""

import itertools
from collections.abc import Callable


def ticking() -> Callable[[], float]:
    """A clock that goes on by a tenth of a millisecond whenever somebody looks at it."""
    looks = itertools.count()
    return lambda: next(looks) * 1e-4

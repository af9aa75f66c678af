"""The compressors, by name, and what a name that is none of theirs was probably meant to be."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

from lightning_sparse.compressors.base import OPTIONS, Compressor, check_settings

#: Name -> class, filled by :mod:`lightning_sparse.compressors`.
COMPRESSORS: dict[str, type[Compressor]] = {}

#: What others call it -> what it is called here.
_ELSEWHERE = {"powersgd": "low_rank", "randk": "sparse_random_k", "allreduce": "sparse_dense", "ddp": "sparse_dense"}

#: What the names of strategies have around a compressor's.
_AROUND = re.compile("^ddp_(?=.)|_spawn|_fork|_notebook|_find_unused_parameters_true|_hsdp$")


def did_you_mean(given: str, known: Iterable[str] = COMPRESSORS) -> str:
    """Return " Did you mean 'skip_reduce'?" if ``given`` is like one of the ``known`` names, else nothing."""
    by_letters: dict[str, str] = {}  # without what is easily left out or added
    for name in known:
        by_letters.setdefault(_letters(name.removeprefix("sparse_")), name)
        by_letters[_letters(name)] = name
    by_letters |= {_letters(kind.__name__): name for name, kind in COMPRESSORS.items() if name in by_letters.values()}
    letters = _letters(_AROUND.sub("", given.partition(":")[0].lower()))
    for close in get_close_matches(letters, by_letters, n=1, cutoff=0.7):
        return f" Did you mean {by_letters[close]!r}?"
    meant = _ELSEWHERE.get(letters)
    return f" Did you mean {meant!r}?" if meant in by_letters.values() else ""


def _letters(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def by_name(compressor: object, names: Iterable[str] = COMPRESSORS) -> Compressor:
    """Return a compressor with its defaults if a name is given, or the instance that is given.

    Raises:
        ValueError: for a name that is not in ``COMPRESSORS``; the error lists ``names``.
        TypeError: for anything that is neither a name nor an instance, and for an instance whose settings cannot be
            compared between ranks.
    """
    if isinstance(compressor, Compressor):
        check_settings(compressor)
        return compressor
    if compressor == "sparse_auto" or type(compressor).__name__ == "Auto":
        raise ValueError(
            "compressor must average gradients by itself; got sparse_auto, which chooses among such. Put what you want "
            "around its candidates and its start: Auto([MomentumCorrection(0.9, MiCRO())], start=Dense())."
        )
    if isinstance(compressor, str):
        if compressor in COMPRESSORS:
            return COMPRESSORS[compressor]()
        if compressor in OPTIONS:
            raise ValueError(
                f"compressor must be one of {', '.join(names)}; got {compressor!r}, an option beside it. Write "
                f"SparseDDPStrategy('sparse_dense', {compressor}={OPTIONS[compressor]!r})."
            )
        raise ValueError(
            f"compressor must be one of {', '.join(names)}; got {compressor!r}.{did_you_mean(compressor, names)} For "
            "settings of its own give an instance, such as SkipReduce(skip=0.5)."
        )
    hint = f"Write {compressor.__name__}()." if isinstance(compressor, type) else "Leave it out for the default."
    raise TypeError(
        f"compressor must be a name ({', '.join(names)}) or an instance of a Compressor; got {compressor!r}. {hint}"
    )

"""What sparse_auto may choose, and how: settings only, as a compressor's are."""

from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

from lightning_sparse.checks import check_whole, checked_patterns, is_list, is_number
from lightning_sparse.compressors import COMPRESSORS, Compressor, Dense, ExactFor, MiCRO
from lightning_sparse.compressors import by_name as compressor_by_name
from lightning_sparse.compressors.base import check_settings
from lightning_sparse.compressors.wrappers import exact_for, rounded
from lightning_sparse.settings import changed, counted, names_checked
from lightning_sparse.wire import wire_format


def _check_compressor(what: str, given: object) -> None:
    if not isinstance(given, Compressor):
        example = COMPRESSORS.get(str(given), MiCRO).__name__
        raise ValueError(f"{what}: {given!r} is not a compressor to choose; give an instance, such as {example}().")
    check_settings(given)


@names_checked
@dataclass(frozen=True)
class Candidate:
    """A way to train that :class:`Auto` may choose.

    Args:
        compressor: what averages.
        wire_dtype: of values on the wire; None: the compressor's own.
        local_steps: H, optimizer steps of each rank between two averages of the same weight; 0: gradients are averaged.
        exact: patterns of names of parameters that are summed in float32, in place of those of the strategy.

    Raises:
        ValueError: for a setting out of range, with the value and what is allowed.
        TypeError: if ``compressor`` is not an instance whose settings can be compared.
    """

    compressor: Compressor
    wire_dtype: str | None = None  # a name, once validated
    local_steps: int = 0
    exact: tuple[str, ...] = field(default=(), metadata={"newer": True})

    def __post_init__(self) -> None:
        _check_compressor("Candidate", self.compressor)
        wire_dtype = self.compressor.default_wire_dtype if self.wire_dtype is None else self.wire_dtype
        object.__setattr__(self, "wire_dtype", wire_format(wire_dtype).name)
        check_whole("Candidate: local_steps", self.local_steps, 0)
        object.__setattr__(self, "exact", checked_patterns("Candidate: exact", self.exact))
        if not isinstance(self.averaging, ExactFor):  # all sums are in float32
            object.__setattr__(self, "exact", ())

    @cached_property
    def averaging(self) -> Compressor:
        """What averages, in the wire format."""
        assert self.wire_dtype is not None
        return exact_for(self.exact, rounded(self.compressor, self.wire_dtype))

    @property
    def settings(self) -> dict[str, Any]:
        """The compressor's density, and its settings that are not the defaults."""
        differs = changed(self.compressor)
        known = [field.name for field in fields(self.compressor)]  # type: ignore[arg-type]  # it is a dataclass
        return {name: getattr(self.compressor, name) for name in known if name == "density" or name in differs}

    def __str__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        what = "dense" if isinstance(self.compressor, Dense) else f"{type(self.compressor).__name__}({settings})"
        local = f"{counted(self.local_steps, 'local step')}, " if self.local_steps else ""
        return f"{local}{what}, {self.wire_dtype}{', exact ' * bool(self.exact)}{' '.join(self.exact)}"


# Wire formats by local steps.
FORMATS = {0: ("float32", "bfloat16", "int8", "int4"), 1: ("int2",), 2: ("int4",), 4: ("int4",), 8: ("int4", "sign")}
CANDIDATES = tuple(Candidate(Dense(), each, steps) for steps, formats in FORMATS.items() for each in formats)
START = Candidate(Dense(), "int4").averaging


@names_checked
@dataclass(frozen=True)
class Auto:
    """Trains with the candidate that is expected to be soonest at a loss: seconds a step, times the steps it needs.

    Before the first step, under Fabric after it, the link is measured, and until steps have been, gradients are
    averaged by ``start``, or in float32 or bfloat16 where the link takes these sums sooner.  Of a far link the latency
    is measured then, and the rate after that step.  Then every candidate's step is predicted from what the link,
    backward and compressing took, and how many more steps than dense training it needs from what it delivers, and when,
    of gradients of this training.  Those whose trial is worth its steps are tried, and the soonest is taken.  When
    times change, it chooses anew; what is unsent goes along.  Choosing needs more than one rank and 262,144 elements;
    below, gradients are summed in float32, or by a ``start`` other than the default.

    Args:
        candidates: to choose from: each a :class:`Candidate`, or a compressor that averages gradients; None: dense
            sums in several formats, of gradients and of local steps.
        start: the compressor that averages until one is chosen, where plain sums are not sooner; None: dense sums in
            int4, which cost hardly any loss, and not much time on a slow link.
        at_most: by what part the loss may be expected above dense training's after as many steps: 0.05 for 5 %; None:
            what is soonest is taken, whatever it loses in a step.

    Raises:
        ValueError: for a setting out of range, with the value and what is allowed.
        TypeError: if a compressor's settings cannot be compared between ranks.
    """

    # None in a config file; once validated, what it stands for.
    candidates: tuple[Candidate | Compressor, ...] | None = field(default=None, metadata={"default": CANDIDATES})
    start: Compressor | None = field(default=None, metadata={"default": START})
    at_most: float | None = 0.05

    def __post_init__(self) -> None:
        given = CANDIDATES if self.candidates is None else self.candidates
        if not is_list(given) or not given:
            raise ValueError(
                f"Auto: candidates must be a list of one candidate or more; got {self.candidates!r}. Write "
                "Auto([MiCRO()]), say."
            )
        for each in given:
            if not isinstance(each, Candidate | Compressor):
                raise ValueError(
                    f"Auto: candidates must be a list of Candidate, or of compressors; got {each!r} in it. Give "
                    "MiCRO(), say, or Candidate(Dense(), 'int4')."
                )
        candidates = tuple(dict.fromkeys(c if isinstance(c, Candidate) else Candidate(c) for c in given))
        object.__setattr__(self, "candidates", candidates)  # a config file gives a list
        object.__setattr__(self, "start", START if self.start is None else self.start)
        _check_compressor("Auto: start", self.start)
        if self.at_most is not None and not (is_number(self.at_most) and 0 <= self.at_most <= 1):
            raise ValueError(
                f"Auto: at_most must be a number from 0 to 1, or None; got {self.at_most!r}. Give the part by which "
                "the loss may be above dense training's: 0.02 for 2 %, None for any."
            )

    def __repr__(self) -> str:
        return f"Auto({', '.join(f'{name}={value!r}' for name, value in changed(self).items())})"

    def __str__(self) -> str:
        return "sparse_auto"

    @property
    def choices(self) -> list[Candidate]:
        """The candidates, whatever they were given as."""
        return [each for each in self.candidates or () if isinstance(each, Candidate)]


#: Every name of a strategy: the compressors', and that of the policy that chooses among them.
NAMES: dict[str, type[Compressor | Auto]] = {**COMPRESSORS, "sparse_auto": Auto}


def by_name(given: object) -> Compressor | Auto:
    """Return what has this name in ``NAMES``, with its defaults, or the instance that is given.

    Raises:
        ValueError: for a name that is not in ``NAMES``.
        TypeError: for anything that is neither a name nor an instance, and for an instance whose settings cannot be
            compared between ranks.
    """
    if isinstance(given, Auto):
        check_settings(given)
        return given
    return Auto() if given == "sparse_auto" else compressor_by_name(given, NAMES)

"""Plans groups from measured steps and costs.  Pure functions."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.groups import BUCKET_BYTES, Piece, fuse
from lightning_sparse.fusion.model import Cost, Plan, StepModel

LEAST_GAIN = 0.1  # Part of a backward that a plan must gain, since the model is not exact; else the groups stay.
FARTHEST = 2.0  # The most by which measured steps correct the model, in spans that it expects.
DDP_PLAN = f"buckets of {BUCKET_BYTES >> 20} MiB"  # The name of DDP's own buckets among a plan's spans.
IN_PLACE = "in place"  # The name of sums of DDP's buckets where they lie.

Kinds = Sequence[tuple[bool, Cost]]  # Whether pieces are summed densely, and what groups of them cost.


@dataclass(frozen=True)
class Measured:
    """Medians over steps and ranks, in seconds.

    Attributes:
        arrivals_s: from the start of backward to the gradient of each piece; NaN where it never arrived.
        span_s: from the start of backward to the last mean.
        rest_s: the rest of a step.
        groups: names of the parameters in each group there was meanwhile.
        messages_s: for which messages were under way; NaN if that is not known.
    """

    arrivals_s: Sequence[float]
    span_s: float
    rest_s: float
    groups: Sequence[Sequence[str]]
    messages_s: float = math.nan

    @property
    def computing_s(self) -> float:
        """Seconds of a step that sends nothing."""
        return self.rest_s + float(np.nanmax([0.0, *self.arrivals_s]))

    @property
    def sums_s(self) -> float:
        """From the last gradient to the last mean."""
        return self.span_s + self.rest_s - self.computing_s


@dataclass(frozen=True)
class Layout:
    """Groups to average in: the names in each, what averages them, and on rank 0 the plan of them, if there is one."""

    groups: Sequence[Sequence[str]]
    compressor: Compressor
    plan: Plan | None = None


def calibrate(pieces: Sequence[Piece], kinds: Kinds, measured: Measured) -> tuple[float, float]:
    """Return by what factor steps were shorter than the model, or by how many seconds longer; else 1, or 0.

    Backward and messages slow each other in ways that are not modelled.  ``kinds`` are of what was at work.
    """
    model, place = _model(pieces, kinds, measured)
    expected_s = model.span(_ends(measured.groups, place))
    if measured.span_s < expected_s:
        return max(measured.span_s / expected_s, 1 / FARTHEST), 0.0
    return 1.0, min(measured.span_s - expected_s, FARTHEST * expected_s)


def best_plan(
    pieces: Sequence[Piece],
    kinds: Kinds,
    measured: Measured,
    calibration: tuple[float, float] = (1.0, 0.0),
    message_bytes: tuple[int, int] | None = None,
) -> Plan:
    """Return the best groups, or those there were if these are hardly slower.

    The span of ``IN_PLACE`` is of sums in messages of so many bytes of float32 gradient: the first, and later ones.
    """
    model, place = _model(pieces, kinds, measured)
    ordered = sorted(pieces, key=lambda piece: place[piece.name])

    def fused(fusion: str, bucket_bytes: int = BUCKET_BYTES) -> list[int]:
        return _ends([[piece.name for piece in group] for group in fuse(ordered, fusion, bucket_bytes)], place)

    plans = {
        "LayerFusion": model.best(),
        DDP_PLAN: fused("bucket"),
        "one group a layer": fused("none"),
        "one group": [len(pieces)],
        "as before": _ends(measured.groups, place),
    }
    if message_bytes is not None:
        first, later = (fused("bucket", each) for each in message_bytes)
        plans[IN_PLACE] = sorted({first[0], *later})
    factor, longer_s = calibration
    spans = {name: factor * model.span(ends) + longer_s for name, ends in plans.items()}
    gains = spans["LayerFusion"] < (1 - LEAST_GAIN) * spans["as before"]
    chosen = "LayerFusion" if gains and model.can_be_indexed(plans["LayerFusion"]) else "as before"
    ends, before = tuple(plans[chosen]), tuple(plans["as before"])
    return Plan(model, tuple(place), ends, before, measured.rest_s, spans[chosen], spans)


def _model(pieces: Sequence[Piece], kinds: Kinds, measured: Measured) -> tuple[StepModel, Mapping[str, int]]:
    """Return the model, and the place of each parameter in the order in which they become ready."""
    ready = np.where(np.isfinite(measured.arrivals_s), measured.arrivals_s, 0.0)
    order = np.argsort(ready, kind="stable")
    elements = [tuple(pieces[i].elements * (pieces[i].dense == dense) for dense, _ in kinds) for i in order]
    model = StepModel(tuple(ready[order].tolist()), tuple(elements), tuple(cost for _, cost in kinds))
    return model, {pieces[i].name: place for place, i in enumerate(order)}


def _ends(groups: Sequence[Sequence[str]], place: Mapping[str, int]) -> list[int]:
    """Return where ``groups`` end in the order in which parameters become ready."""
    return sorted({len(place), *(max(place[name] for name in names) + 1 for names in groups if names)})

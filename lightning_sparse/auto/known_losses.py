"""What compression cost in loss where it was measured, to be said before a training begins."""

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_sparse.compressors import (
    Compressor,
    ImportancePruning,
    LowRank,
    MiCRO,
    OkTopk,
    RandomK,
    Rounded,
    SketchFusion,
    SkipReduce,
    TopK,
)
from lightning_sparse.compressors.wrapper import Wrapper
from lightning_sparse.engine.local_steps import LocalSteps

WORTH_SAYING = 5.0  # Percent above dense training's loss.


@dataclass(frozen=True)
class Known:
    """Losses with some values of one setting, all others at their defaults.

    Args:
        setting: of the compressor.
        more_is_closer: whether a larger value is closer to dense training.
        above: percent above dense training's loss, by value.
        instead: what loses less, where it sends no more.
    """

    setting: str
    more_is_closer: bool
    above: Mapping[float, float]
    instead: str = ""

    def at_least(self, value: float) -> tuple[float, float] | None:
        """Return the largest loss that was measured with a value as close to dense training, and that value."""
        known = [(loss, v) for v, loss in self.above.items() if v == value or (v > value) == self.more_is_closer]
        return max(known, default=None)


IN_FOUR_BITS = ", and strategy='sparse_dense' in wire_dtype='int4', with the bytes of density=0.05, 1.5 %"

# Of a GPT of 279,168 parameters on bytes of text: AdamW, 4 ranks, 600 steps, seed 0 or the mean of 0, 1 and 2, the best
# learning rate of several (RandomK, SketchFusion: 4e-3 alone).  Elements are selected in int4; LowRank and SkipReduce
# send float32.
KNOWN: dict[type[Compressor], Known] = {
    MiCRO: Known("density", True, {0.3: 6.6, 0.1: 15.3, 0.05: 23.4}),
    OkTopk: Known("density", True, {0.3: 4.0, 0.1: 12.4, 0.05: 24.2}),
    TopK: Known("density", True, {0.05: 14.1}),
    ImportancePruning: Known("density", True, {0.05: 30.7}),
    SketchFusion: Known("density", True, {0.05: 18.5}, IN_FOUR_BITS),
    RandomK: Known("density", True, {0.1: 48.3}),
    LowRank: Known("rank", True, {16: 2.5, 4: 12.6, 1: 32.4}),
    SkipReduce: Known("skip", False, {0.5: 12.8}),
}
LOCAL_STEPS = Known("local_steps", False, {2: 1.3, 4: 4.8, 16: 12.7})  # of Dense() in int4; learning rate 3e-3
SIGN = 28.8  # of Dense() in one bit


def caution(compressor: Compressor, wire_dtype: str, local: LocalSteps | None) -> str:
    """Say in a sentence that these settings, or some closer to dense training, cost more than 5 % in loss; or ""."""
    while isinstance(compressor, Wrapper):
        wire_dtype = compressor.wire_dtype if isinstance(compressor, Rounded) else wire_dtype
        compressor = compressor.wrapped
    found, known = None, None if local else KNOWN.get(type(compressor))
    if local:
        found, what = LOCAL_STEPS.at_least(local.steps), "local_steps={:g}"
    elif known:
        found = known.at_least(getattr(compressor, known.setting))
        what = f"{type(compressor).__name__}({known.setting}={{:g}})"
    elif wire_dtype == "sign":
        found, what = (SIGN, 0.0), "a dense sum in wire_dtype='sign'"
    if found is None or found[0] < WORTH_SAYING:
        return ""
    loss, value = found
    instead = known.instead if known else ""
    return (
        f"{what.format(value)} ended {loss:.0f} % above dense training's loss in a small language model{instead}: "
        "compare on your task, or take strategy='sparse_auto' (docs/accuracy.md)."
    )

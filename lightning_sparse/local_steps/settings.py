"""Local steps: each rank takes its own optimizer steps, and what the ranks share is the average of their weights."""

import math
from dataclasses import dataclass, replace

from lightning_sparse.checks import check_one_of, check_setting, check_switch, check_whole, is_number
from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.compressors.wrappers import Wrapper
from lightning_sparse.settings import names_checked

SECOND_MOMENTS = ("mean", "own")
# How far ranks look ahead where what is unsent arrives soon, and in one bit, which arrives later, of several steps;
# and up to how many steps.  docs/benchmarks/2026-11-24-local-steps-loss.md
LEAD, LEAD_OF_SIGNS, MOST_AHEAD = 1 / 0.7, 1.25, 4


@names_checked
@dataclass(frozen=True)
class LocalSteps:
    """Exchange what the optimizer did, not what it was given: every weight once in ``steps`` optimizer steps.

    Each rank r takes its own optimizer step at once.  The model all ranks share is the average x̄, and of a rank
    ``unsent = x_r - x̄``.  A compressor sends some of that as it would send a gradient, with the same law, x̄ moves by
    the mean of what was sent, and ``x_r = x̄ + unsent``.

    Args:
        steps: H, optimizer steps between two exchanges of the same weight.
        fragments: parts that the parameters are cut into, whole parameters each; they take turns, evenly spread over
            the H steps.  None: H, so that a part travels in every step (Streaming DiLoCo, arXiv 2501.18512); 1:
            everything every H steps (DiLoCo, arXiv 2311.08105).
        overlap: exchange beside the next step's forward and backward, and apply the result after its optimizer step.
            False: wait for it after each step.
        outer_rate: of the outer step: x̄ moves by so many times the mean.
        outer_momentum: of the outer step, Nesterov's; DiLoCo takes 0.9, with an ``outer_rate`` of 0.7.
        lead: each rank's own steps are so many times as long as its optimizer says, and x̄ moves by their mean at its
            length: ranks look ahead of x̄.  None: 1.43 where all weights travel within four steps, beside the next,
            and no other setting is changed, or 1.25 in one bit and more than one step; else 1, also with an optimizer
            whose steps do not grow with its learning rate.
        error_decay: None: what is unsent stays in a rank's own weights.  A number: it waits beside them, so that each
            rank goes on from x̄, and from one exchange of a weight to the next so much of it is left: 1 keeps all, as
            the law says; below 1, as 0.95 in SparseLoCo (arXiv 2508.15706), the rest is given up.
        second_moments: "mean": each rank's Adam divides by the second moment of the mean gradient, as that of plain DDP
            does, and not by that of one rank's gradient, which is up to P times as large; "own": it does not.
            Optimizers without such are left alone.

    Raises:
        ValueError: for a setting out of range, with the value and what is allowed.
    """

    steps: int
    fragments: int | None = None
    overlap: bool = True
    outer_rate: float = 1.0
    outer_momentum: float = 0.0
    lead: float | None = None
    error_decay: float | None = None
    second_moments: str = "mean"

    def __post_init__(self) -> None:
        check_whole("local_steps", self.steps, 1, "Or give 0 to average gradients.")
        if self.fragments is not None:
            check_whole("LocalSteps: fragments", self.fragments, 1)
            most = f"at most steps, {self.steps}, since one travels at a time"
            check_setting(self, "fragments", self.fragments <= self.steps, most)
        check_switch(self, "overlap")
        rate, momentum, lead, decay = self.outer_rate, self.outer_momentum, self.lead, self.error_decay
        ahead = lead is None or (is_number(lead) and 1 <= lead < math.inf)
        fading = decay is None or (is_number(decay) and 0 <= decay <= 1)
        check_setting(self, "outer_rate", is_number(rate) and 0 < rate < math.inf, "a number above 0")
        check_setting(
            self, "outer_momentum", is_number(momentum) and 0 <= momentum < 1, "a number of at least 0 and below 1"
        )
        check_setting(self, "lead", ahead, "a number of at least 1, or None")
        check_setting(self, "error_decay", fading, "a number from 0 to 1, or None")
        check_one_of("LocalSteps: second_moments", self.second_moments, SECOND_MOMENTS)

    @classmethod
    def of(cls, given: "int | LocalSteps") -> "LocalSteps | None":
        """Return the settings that a user gave, as a number of steps or whole; None for 0.

        Raises:
            ValueError: if it is anything else.
        """
        if isinstance(given, LocalSteps):
            return given
        check_whole("local_steps", given, 0, "Give H, the steps in which every weight travels once, or LocalSteps(H).")
        return cls(int(given)) if given else None

    def with_lead(self, compressor: Compressor) -> "LocalSteps":
        """Return the settings with the lead that suits what ``compressor`` sends, if none is given."""
        if self.lead is not None:
            return self
        wire_dtype = ""
        while isinstance(compressor, Wrapper):
            wire_dtype, compressor = getattr(compressor, "wire_dtype", wire_dtype), compressor.wrapped
        soon = isinstance(compressor, Dense) and self.steps <= MOST_AHEAD and self.overlap
        if not soon or self.error_decay is not None or self.outer_rate != 1 or self.outer_momentum:
            return replace(self, lead=1.0)
        return replace(self, lead=LEAD_OF_SIGNS if wire_dtype == "sign" and self.steps > 1 else LEAD)

    @property
    def parts(self) -> int:
        """The number of fragments."""
        return self.fragments or self.steps

    def is_turn(self, fragment: int, step: int) -> bool:
        """Whether ``fragment`` travels after ``step``, of which the first is 1."""
        return (step - 1) % self.steps == (fragment + 1) * self.steps // self.parts - 1

    def turn(self, fragment: int, step: int, warmup_steps: int = 0) -> int | None:
        """Return the number of the turn that ``fragment`` has after ``step``, from 0; None if it has none.

        Every fragment travels after each of the ``warmup_steps``.  The number depends on the step alone, so that it
        need not be saved.
        """
        if step <= warmup_steps:
            return step - 1
        return warmup_steps + (step - 1 - warmup_steps) // self.steps if self.is_turn(fragment, step) else None

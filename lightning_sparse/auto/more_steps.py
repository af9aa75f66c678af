"""How many more steps than dense training a strategy needs to the same loss, by what it delivers and how late.

Fitted on stored trainings of three tasks, which differ: docs/benchmarks/2026-11-24-more-steps.md.
"""

import math

# Averaged gradients need exp(OF_UNSENT * u) times as many steps, where u is the part of what is unsent that stays.
OF_UNSENT = 1.0
# Local steps need LOCAL times as many, as long as all ranks together take at most AS_DENSE steps from one average to
# the next.  Where they take n, the factor is LOCAL * (n / AS_DENSE) ** OF_LOCAL.
AS_DENSE, LOCAL, OF_LOCAL = 8, 1.02, 0.12
APART = 2.5  # A task may need the factor to the power of APART, or of 1 / APART.
OF_STEPS = 0.3  # The loss after equal steps is the factor to this power times that of dense training.


def more_steps(delivered: float, staleness: float, ranks: int, local_steps: int) -> float:
    """Return how many times as many steps as dense training are expected to the same loss.

    Args:
        delivered: the part of what is unsent that a step delivers.
        staleness: steps after which a gradient arrives.
        ranks: P.
        local_steps: H; 0: gradients are averaged.
    """
    if local_steps:
        return LOCAL * math.pow(max(1.0, ranks * max(local_steps, staleness) / AS_DENSE), OF_LOCAL)
    return math.exp(OF_UNSENT * (1 - delivered))


def likely(more: float) -> tuple[float, float]:
    """Return the least and the most times as many steps that a task may need where ``more`` are expected."""
    return more ** (1 / APART), more**APART


def loss_above(more: float) -> float:
    """Return by what part the loss after as many steps is expected above dense training's, which needs fewer."""
    return math.exp(OF_STEPS * math.log(more)) - 1

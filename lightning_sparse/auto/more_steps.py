"""How many more steps than dense training a strategy needs to the same loss, by what it delivers and how late.

Fitted on stored trainings of three tasks, which differ: docs/benchmarks/2026-11-24-more-steps.md.
"""

import math

OF_UNSENT = 1.0  # Averaged gradients: the logarithm of how many times as many steps, for each part not delivered.
AS_DENSE = 8  # Local steps: so many on all ranks together, between two averages, need ``LOCAL`` times as many steps,
LOCAL = 1.02
OF_LOCAL = 0.12  # and more of them need this power of their number more.
APART = 2.5  # On a task the logarithm may be so many times larger or smaller.
OF_STEPS = 0.3  # That of how many times the loss after equal steps is dense training's is so much of it.


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

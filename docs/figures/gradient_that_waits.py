"""Draw three steps of a rank that sends its two largest elements of six and keeps the rest: error feedback.

Run: python docs/figures/gradient_that_waits.py
"""

from pathlib import Path

import numpy as np
import style as s
from numpy.typing import NDArray

GRADIENTS = np.array([[5, 2, 1, 4, 2, 1], [1, 2, 2, 1, 3, 1], [2, 1, 2, 1, 1, 3]], float)  # [steps, n], made up
SENT = 2  # elements in a step
UNIT, BAR, LEFT, COLUMN = 11, 13, 16, 118  # points: of height 1, width of a bar, margin, from step to step
BEFORE, WAITS = 128, 216  # baselines of the two rows


def steps() -> list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]]:
    """For each step: what waited [n], what is unsent [n], and which elements are sent [n]."""
    found, unsent = [], np.zeros(GRADIENTS.shape[1])
    for gradient in GRADIENTS:
        before = unsent + gradient
        sent = np.zeros(len(before), bool)
        sent[np.argsort(-before, kind="stable")[:SENT]] = True
        found.append((unsent, before, sent))
        unsent = np.where(sent, 0, before)
        assert np.isclose(np.where(sent, before, 0).sum() + unsent.sum(), before.sum())  # the law, of one rank
    return found


def draw(folder: Path = s.FOLDER) -> None:
    """Draw above what is unsent, below what waits."""
    figure, axes = s.canvas(264)
    for number, (waited, before, sent) in enumerate(steps()):
        left = LEFT + COLUMN * number
        s.write(axes, (left, 16), f"step {number + 1}", size=s.TEXT)
        for i in range(len(before)):
            x = left + (BAR + 2) * i
            if waited[i]:
                s.block(axes, (x, BEFORE - UNIT * waited[i]), (BAR, UNIT * waited[i]), s.ORANGE)
            new = before[i] - waited[i]
            s.block(axes, (x, BEFORE - UNIT * before[i]), (BAR, UNIT * new), s.BLUE)
            if sent[i]:
                s.arrow(
                    axes,
                    (x + BAR / 2, BEFORE - UNIT * before[i] - 2),
                    (x + BAR / 2, BEFORE - UNIT * before[i] - 18),
                    s.GREEN,
                )
            elif before[i]:
                s.block(axes, (x, WAITS - UNIT * before[i]), (BAR, UNIT * before[i]), s.ORANGE)
        for base in (BEFORE, WAITS):
            axes.plot([left - 3, left + 90], [base, base], color=s.LINE, linewidth=1)
        if number < len(GRADIENTS) - 1:
            s.arrow(axes, (left + 92, WAITS - 12), (left + COLUMN - 4, BEFORE - 10), s.ORANGE, dashed=True)
    s.write(axes, (LEFT, BEFORE + 12), "unsent", s.FAINT, s.SMALL)
    s.write(axes, (LEFT, WAITS + 12), "waits", s.FAINT, s.SMALL)
    for x, colour, text in ((LEFT, s.BLUE, "new"), (LEFT + 54, s.ORANGE, "has waited")):
        s.block(axes, (x, 244), (11, 11), colour)
        s.write(axes, (x + 17, 250), text, size=s.SMALL)
    s.arrow(axes, (LEFT + 158, 256), (LEFT + 158, 242), s.GREEN)
    s.write(axes, (LEFT + 168, 250), f"sent: the {SENT} largest of {GRADIENTS.shape[1]}", size=s.SMALL)
    s.store(figure, "a-gradient-that-waits", folder)


if __name__ == "__main__":
    draw()

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
OWED, WAITS = 128, 216  # baselines of the two rows


def steps() -> list[tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]]:
    """For each step: what waited [n], what the rank owes [n], and which elements are sent [n]."""
    found, unsent = [], np.zeros(GRADIENTS.shape[1])
    for gradient in GRADIENTS:
        owed = unsent + gradient
        sent = np.zeros(len(owed), bool)
        sent[np.argsort(-owed, kind="stable")[:SENT]] = True
        found.append((unsent, owed, sent))
        unsent = np.where(sent, 0, owed)
        assert np.isclose(np.where(sent, owed, 0).sum() + unsent.sum(), owed.sum())  # the law, of one rank
    return found


def draw(folder: Path = s.FOLDER) -> None:
    """Draw above what a rank owes, below what waits."""
    figure, axes = s.canvas(264)
    for number, (waited, owed, sent) in enumerate(steps()):
        left = LEFT + COLUMN * number
        s.write(axes, (left, 16), f"step {number + 1}", size=s.TEXT)
        for i in range(len(owed)):
            x = left + (BAR + 2) * i
            if waited[i]:
                s.block(axes, (x, OWED - UNIT * waited[i]), (BAR, UNIT * waited[i]), s.ORANGE)
            new = owed[i] - waited[i]
            s.block(axes, (x, OWED - UNIT * owed[i]), (BAR, UNIT * new), s.BLUE)
            if sent[i]:
                s.arrow(
                    axes, (x + BAR / 2, OWED - UNIT * owed[i] - 2), (x + BAR / 2, OWED - UNIT * owed[i] - 18), s.GREEN
                )
            elif owed[i]:
                s.block(axes, (x, WAITS - UNIT * owed[i]), (BAR, UNIT * owed[i]), s.ORANGE)
        for base in (OWED, WAITS):
            axes.plot([left - 3, left + 90], [base, base], color=s.LINE, linewidth=1)
        if number < len(GRADIENTS) - 1:
            s.arrow(axes, (left + 92, WAITS - 12), (left + COLUMN - 4, OWED - 10), s.ORANGE, dashed=True)
    s.write(axes, (LEFT, OWED + 12), "owed", s.FAINT, s.SMALL)
    s.write(axes, (LEFT, WAITS + 12), "waits", s.FAINT, s.SMALL)
    for x, colour, text in ((LEFT, s.BLUE, "new"), (LEFT + 54, s.ORANGE, "has waited")):
        s.block(axes, (x, 244), (11, 11), colour)
        s.write(axes, (x + 17, 250), text, size=s.SMALL)
    s.arrow(axes, (LEFT + 158, 256), (LEFT + 158, 242), s.GREEN)
    s.write(axes, (LEFT + 168, 250), f"sent: the {SENT} largest of {GRADIENTS.shape[1]}", size=s.SMALL)
    s.store(figure, "a-gradient-that-waits", folder)


if __name__ == "__main__":
    draw()

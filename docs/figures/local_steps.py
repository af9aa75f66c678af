"""Draw the steps of a rank that averages gradients, and of one that takes local steps.

Run: python docs/figures/local_steps.py
"""

from pathlib import Path

import style as s

COMPUTE, SEND = 44, 62  # points of time: forward and backward, the exchange of a gradient in float32
FRAGMENT = 38  # the exchange of one of two fragments in few bits
LEFT, HEIGHT = 16, 24


def draw(folder: Path = s.FOLDER) -> None:
    """Draw two timelines, one below the other."""
    figure, axes = s.canvas(262)
    s.write(axes, (LEFT, 14), "gradients: every step waits for the network")
    x, done = LEFT, 0
    while x + COMPUTE + SEND <= s.WIDTH - 10:
        s.block(axes, (x, 28), (COMPUTE, HEIGHT), s.GREY, f"step {done + 1}")
        s.block(axes, (x + COMPUTE, 28 + HEIGHT), (SEND, HEIGHT), s.ORANGE, "gradient")
        x, done = x + COMPUTE + SEND, done + 1
    s.write(axes, (LEFT, 108), "local_steps=2: half of the weights, beside the next step")
    x = LEFT
    for step in range(7):
        s.block(axes, (x, 122), (COMPUTE, HEIGHT), s.GREY, f"step {step + 1}")
        name, colour = ("A", s.BLUE) if step % 2 == 0 else ("B", s.PURPLE)
        if step < 6:
            s.block(axes, (x + COMPUTE, 122 + HEIGHT), (FRAGMENT, HEIGHT), colour, f"half {name}")
            s.arrow(axes, (x + COMPUTE + FRAGMENT, 122 + 2 * HEIGHT), (x + 2 * COMPUTE, 122 + 2 * HEIGHT + 20), colour)
        x += COMPUTE
    for i in range(2, 8):
        colour = s.BLUE if i % 2 == 0 else s.PURPLE
        s.write(axes, (LEFT + COMPUTE * i, 122 + 2 * HEIGHT + 28), "AB"[i % 2], colour, s.SMALL, "center")
    s.write(axes, (LEFT, 216), "A, B: the average of that half moves, on every rank alike", s.FAINT, s.SMALL)
    s.write(axes, (LEFT, 234), "each rank's own steps since then stay on top of it;", s.FAINT, s.SMALL)
    s.write(axes, (LEFT, 248), "what the message left out is sent in a later turn", s.FAINT, s.SMALL)
    s.store(figure, "local-steps", folder)


if __name__ == "__main__":
    draw()

"""Draw the way of a gradient from backward() to the optimizer.

Run: python docs/figures/way_of_a_gradient.py
"""

from pathlib import Path

import style as s

LEFT, BOX = 14, (206, 42)  # points
STEP = 58  # from box to box

# what happens in two lines, its colour, and what to know beside it in up to three lines
STATIONS = [
    ("backward()\nfills DDP's buckets", s.GREY, "PyTorch's own;\nsays only when"),
    ("group\nunsent += gradient", s.GREEN, "layers that travel\ntogether; planned\nby LayerFusion"),
    ("lane\none group after the other", s.BLUE, "beside backward;\nsame order on\nevery rank"),
    ("compressor\npicks, and takes out of unsent", s.GREEN, "what is not picked\nstays in unsent"),
    ("network\nmessages of all ranks are summed", s.ORANGE, "bytes are\ncounted here"),
    ("mean\nsum / P, into DDP's bucket", s.BLUE, "the same bits\non every rank"),
    ("optimizer.step()\nas in any training", s.GREY, "clipping, schedules\nas ever"),
]


def draw(folder: Path = s.FOLDER) -> None:
    """Draw a column of boxes with notes beside them, and the way back of what waits."""
    figure, axes = s.canvas(14 + STEP * len(STATIONS))
    tops = [14 + STEP * i for i in range(len(STATIONS))]
    for top, (text, colour, note) in zip(tops, STATIONS, strict=True):
        s.box(axes, (LEFT, top), BOX, text, colour)
        lines = note.count("\n")
        s.write(axes, (LEFT + BOX[0] + 34, top + BOX[1] / 2 - 6.2 * lines), note, s.FAINT, s.SMALL)
    for top in tops[:-1]:
        s.arrow(axes, (LEFT + BOX[0] / 2, top + BOX[1]), (LEFT + BOX[0] / 2, top + STEP))
    right = LEFT + BOX[0]
    corners = [(right, tops[3] + 21), (right + 18, tops[3] + 21), (right + 18, tops[1] + 21), (right, tops[1] + 21)]
    s.path(axes, corners, s.GREEN, dashed=True)
    s.store(figure, "way-of-a-gradient", folder)


if __name__ == "__main__":
    draw()

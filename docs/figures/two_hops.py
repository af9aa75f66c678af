"""Draw how a sum goes round a ring of four ranks and how it goes in two hops, with measured times.

Run: python docs/figures/two_hops.py
"""

import re
from math import cos, pi, sin
from pathlib import Path

import style as s

MEASURED = Path(__file__).parents[1] / "benchmarks" / "2026-11-22-sums.md"
ROW = "| 4x100mbit+50ms | float32, 20 KB |"  # of its table
RANKS, RADIUS, NODE = 4, 50, 13
CENTRES = {"ring": (92, 92), "two hops": (268, 92)}


def measured() -> dict[str, float]:
    """Milliseconds of one hop, two hops and Gloo's ring, with 50 ms from host to host."""
    line = next(line for line in MEASURED.read_text().splitlines() if line.startswith(ROW))
    one, two, ring = (float(re.search(r"[\d.]+", cell)[0]) for cell in line.split("|")[3:6])
    return {f"ring: {2 * (RANKS - 1)} hops": ring, "two hops": two, "one hop": one}


def places(name: str) -> list[s.Point]:
    """The middle of each rank's circle."""
    x, y = CENTRES[name]
    return [
        (x + RADIUS * cos(2 * pi * i / RANKS - pi / 4), y + RADIUS * sin(2 * pi * i / RANKS - pi / 4))
        for i in range(RANKS)
    ]


def between(start: s.Point, end: s.Point) -> tuple[s.Point, s.Point]:
    """The ends of an arrow from the edge of a circle to the edge of another."""
    length = ((end[0] - start[0]) ** 2 + (end[1] - start[1]) ** 2) ** 0.5
    x, y = (NODE + 2) * (end[0] - start[0]) / length, (NODE + 2) * (end[1] - start[1]) / length
    return (start[0] + x, start[1] + y), (end[0] - x, end[1] - y)


def draw(folder: Path = s.FOLDER) -> None:
    """Draw the ranks, and bars of what was measured below."""
    figure, axes = s.canvas(306)
    for name in CENTRES:
        at = places(name)
        for i, start in enumerate(at):
            for j, end in enumerate(at):
                if j == (i + 1) % RANKS or (name == "two hops" and i != j):
                    ends = between(start, end)
                    if name == "ring":
                        s.arrow(axes, *ends, s.ORANGE)
                    elif i < j:
                        s.arrow(axes, *ends, s.BLUE)
                        s.arrow(axes, *reversed(ends), s.BLUE)
        for i, point in enumerate(at):
            axes.add_patch(s.plt.Circle(point, NODE, facecolor=s.PAPER, edgecolor=s.INK, linewidth=1.2))
            s.write(axes, (point[0], point[1] + 0.5), str(i), side="center")
    s.write(axes, (92, 18), "round a ring", side="center")
    s.write(axes, (268, 18), "in two hops", side="center")
    s.write(axes, (92, 166), "P-1 times to sum,\nP-1 times to hand round", s.FAINT, s.SMALL, "center")
    s.write(axes, (268, 166), "each rank sums its part,\nthen hands it to all", s.FAINT, s.SMALL, "center")
    times = measured()
    s.write(axes, (16, 208), "20 kB, 50 ms from host to host", s.INK, s.SMALL)
    for i, (name, ms) in enumerate(times.items()):
        y = 220 + 28 * i
        s.write(axes, (16, y + 11), name, size=s.SMALL)
        s.block(axes, (96, y), (196 * ms / max(times.values()), 20), s.ORANGE if i == 0 else s.BLUE)
        s.write(axes, (102 + 196 * ms / max(times.values()), y + 11), f"{ms:.0f} ms", size=s.SMALL)
    s.store(figure, "two-hops", folder)


if __name__ == "__main__":
    draw()

"""Draw the end of a step with one group a layer, with planned groups and with one group of all.

A message takes a fixed time and the time of its bytes; the planned groups are the best of all there are.

Run: python docs/figures/fusion_timeline.py
"""

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import style as s

READY = [4, 7, 10, 14, 18, 21, 24, 28]  # ms, when backward has each layer's gradient
SENDING = [2, 2, 3, 5, 2, 2, 2, 1]  # ms of link for each layer's bytes
MESSAGE = 4  # ms that a message takes however short it is
LEFT, RIGHT, ROW = 16, 344, 92  # points


class Sent(NamedTuple):
    """A group on the link."""

    layers: range
    start: float  # ms
    end: float


def timeline(ends: tuple[int, ...]) -> list[Sent]:
    """Send groups of layers one after the other, each as soon as its last layer is ready."""
    found: list[Sent] = []
    for first, last in zip((0, *ends), ends, strict=False):
        start = max(found[-1].end if found else 0.0, READY[last - 1])
        found.append(Sent(range(first, last), start, start + MESSAGE + sum(SENDING[first:last])))
    return found


def plans() -> Iterator[tuple[int, ...]]:
    """Every way to cut the layers into groups."""
    n = len(READY)
    for cuts in range(n):
        for chosen in combinations(range(1, n), cuts):
            yield (*chosen, n)


def draw(folder: Path = s.FOLDER) -> None:
    """Draw three plans below each other, on one scale."""
    n = len(READY)
    best = min(plans(), key=lambda ends: timeline(ends)[-1].end)
    shown = {"one group a layer": tuple(range(1, n + 1)), "LayerFusion's plan": best, "one group of all": (n,)}
    longest = max(timeline(ends)[-1].end for ends in shown.values())
    scale = (RIGHT - LEFT) / (longest + 2)
    figure, axes = s.canvas(22 + ROW * len(shown))
    for row, (title, ends) in enumerate(shown.items()):
        top, sent = 14 + ROW * row, timeline(ends)
        planned = title.startswith("Layer")
        s.write(axes, (LEFT, top), title)
        s.write(axes, (RIGHT, top), f"{sent[-1].end:.0f} ms", s.GREEN if planned else s.FAINT, side="right")
        for i, ready in enumerate(READY):
            start = READY[i - 1] if i else 0
            s.block(axes, (LEFT + scale * start, top + 12), (scale * (ready - start), 20), s.GREY, str(i + 1))
        for group in sent:
            name = f"{group.layers[0] + 1}" + (f"-{group.layers[-1] + 1}" if len(group.layers) > 1 else "")
            x, width = LEFT + scale * group.start, scale * (group.end - group.start)
            s.block(axes, (x, top + 38), (width, 22), s.GREEN if planned else s.ORANGE, name)
            axes.plot([x + scale * MESSAGE] * 2, [top + 38, top + 60], color=s.LINE, linewidth=0.8, linestyle=":")
        axes.plot([LEFT + scale * sent[-1].end] * 2, [top + 8, top + 66], color=s.RED, linewidth=1.2)
    s.write(axes, (LEFT, 10 + ROW * len(shown)), "grey: backward, layer by layer; below: the link", s.FAINT, s.SMALL)
    s.store(figure, "layer-fusion-timeline", folder)


if __name__ == "__main__":
    draw()

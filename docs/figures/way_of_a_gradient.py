"""Draw the way of a gradient through the package, as way-of-a-gradient.svg beside this file.

Run: python docs/figures/way_of_a_gradient.py
"""

from collections.abc import Iterator
from pathlib import Path

WIDTH, HEIGHT = 980, 470
BOX = 210, 74  # pixels
COLOURS = {
    "DDP": "#e8e8e8",
    "engine": "#d7e8fa",
    "compressors": "#d9f2dc",
    "network": "#fde6c8",
    "fusion": "#efe0f7",
    "checkpoint": "#f7dede",
}

# column, row, the folder it lies in, what happens there in two lines
BOXES = {
    "backward": (0, 0, "DDP", "backward()", "fills DDP's buckets"),
    "hook": (1, 0, "engine", "Exchange.hook", "takes each bucket as it is ready"),
    "add": (2, 0, "compressors", "accumulate", "group.unsent += gradient"),
    "lane": (3, 0, "engine", "Lane", "groups one by one, in order"),
    "plan": (2, 1, "fusion", "LayerFusion", "which parameters make a group"),
    "reduce": (3, 1, "compressors", "Compressor.reduce", "selects, packs, takes out"),
    "comm": (3, 2, "network", "Comm", "messages, counted"),
    "total": (2, 2, "compressors", "total over the ranks", "Sparse, or [n] float32"),
    "back": (1, 2, "engine", "hand back", "mean = total / P, into the bucket"),
    "optimizer": (0, 2, "DDP", "optimizer.step()", "sees ordinary averaged gradients"),
    "state": (1, 1, "checkpoint", "checkpoint", "unsent, by parameter name"),
}
ARROWS = [
    ("backward", "hook"), ("hook", "add"), ("add", "lane"), ("lane", "reduce"), ("reduce", "comm"), ("comm", "total"),
    ("total", "back"), ("back", "optimizer"), ("plan", "add"), ("add", "state"),
]  # fmt: skip


def place(name: str) -> tuple[float, float]:
    """The upper left corner of a box, in pixels."""
    column, row, *_ = BOXES[name]
    return 20 + column * (BOX[0] + 33), 60 + row * (BOX[1] + 68)


def box(name: str) -> Iterator[str]:
    """A rounded box with a title and a line of text."""
    (x, y), (_, _, folder, title, text) = place(name), BOXES[name]
    yield f'<rect x="{x}" y="{y}" width="{BOX[0]}" height="{BOX[1]}" rx="8" fill="{COLOURS[folder]}" stroke="#555"/>'
    yield f'<text x="{x + BOX[0] / 2}" y="{y + 32}" font-size="15" font-weight="bold">{title}</text>'
    yield f'<text x="{x + BOX[0] / 2}" y="{y + 54}" font-size="11.5">{text}</text>'


def arrow(start: str, end: str) -> str:
    """A line from the edge of one box to the facing edge of another."""
    (ax, ay), (bx, by) = ((x + BOX[0] / 2, y + BOX[1] / 2) for x, y in (place(start), place(end)))
    if abs(ay - by) < 1:  # in one row
        turn = BOX[0] / 2 if bx > ax else -BOX[0] / 2
        ax, bx = ax + turn, bx - turn
    else:
        turn = BOX[1] / 2 if by > ay else -BOX[1] / 2
        ay, by = ay + turn, by - turn
    return f'<line x1="{ax}" y1="{ay}" x2="{bx}" y2="{by}" stroke="#333" stroke-width="1.6" marker-end="url(#head)"/>'


def legend() -> Iterator[str]:
    """The folder each colour stands for."""
    for i, (folder, colour) in enumerate(COLOURS.items()):
        x = 20 + 150 * i
        yield f'<rect x="{x}" y="20" width="18" height="18" fill="{colour}" stroke="#555"/>'
        yield f'<text x="{x + 26}" y="34" font-size="13" style="text-anchor:start">{folder}</text>'


def picture() -> str:
    """The whole drawing, an SVG document."""
    parts = [*legend(), *(line for name in BOXES for line in box(name)), *(arrow(*ends) for ends in ARROWS)]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'text-anchor="middle">',
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto"><path d="M0 0L10 5L0 10z" fill="#333"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    Path(__file__).with_name("way-of-a-gradient.svg").write_text(picture())

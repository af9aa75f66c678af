"""What all figures have in common: size, colours, boxes and arrows, and how they are stored.

Lengths are points. A figure is 360 points wide, as a phone shows it, so that 10 points of text stay 10 pixels there.
The background is opaque, so that a figure reads the same on a light page and on a dark one.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from lightning_sparse.bench.output import save

FOLDER = Path(__file__).parent
WIDTH = 360
POINTS_PER_INCH = 72

INK, FAINT, LINE, PAPER = "#1f2328", "#59636e", "#8c959f", "#fdfdfb"
BLUE, GREEN, ORANGE, PURPLE, RED, GREY = "#2f6fb3", "#2e8b57", "#d9822b", "#8250a8", "#c0392b", "#a3abb4"
PALE = {
    BLUE: "#dbe9f8", GREEN: "#dcf1e3", ORANGE: "#fdebd3", PURPLE: "#eee2f6", RED: "#f8dedb", GREY: "#eceef0",
}  # fmt: skip
TEXT, SMALL = 10.5, 9.5

Point = tuple[float, float]


def settings() -> None:
    """Choose fonts and colours."""
    plt.rcParams.update(
        {
            "svg.fonttype": "none",  # text stays text
            "font.family": "sans-serif",  # DejaVu comes first; it is the widest, so others fit too
            "font.size": TEXT,
            "text.color": INK,
            "axes.edgecolor": LINE,
            "axes.labelcolor": INK,
            "xtick.color": FAINT,
            "ytick.color": INK,
            "figure.facecolor": PAPER,
            "axes.facecolor": PAPER,
        }
    )


def canvas(height: float) -> tuple[Figure, Axes]:
    """A drawing of ``height`` points; x goes to the right, y downwards."""
    settings()
    figure = plt.figure(figsize=(WIDTH / POINTS_PER_INCH, height / POINTS_PER_INCH))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, WIDTH), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def store(figure: Figure, name: str, folder: Path = FOLDER) -> None:
    """Write it as an SVG file."""
    save(figure, folder / f"{name}.svg")
    plt.close(figure)


def write(axes: Axes, at: Point, text: str, colour: str = INK, size: float = TEXT, side: str = "left") -> None:
    """Write lines of text, the first of them at a point's height."""
    for i, line in enumerate(text.split("\n")):
        axes.text(at[0], at[1] + 1.3 * size * i, line, color=colour, fontsize=size, ha=side, va="center_baseline")


def box(axes: Axes, corner: Point, size: Point, text: str, colour: str = GREY, bold: bool = True) -> None:
    """A rounded box whose first line stands out; ``corner`` is the upper left one."""
    (x, y), (width, height) = corner, size
    style = "round,pad=0,rounding_size=5"
    axes.add_patch(
        FancyBboxPatch(corner, width, height, style, facecolor=PALE[colour], edgecolor=colour, linewidth=1.2)
    )
    lines = text.split("\n")
    for i, line in enumerate(lines):
        first = i == 0
        axes.text(
            x + width / 2, y + height / 2 + 13.5 * (i - (len(lines) - 1) / 2), line, ha="center", va="center",
            fontsize=TEXT if first else SMALL, fontweight="bold" if first and bold else "normal",
        )  # fmt: skip


def block(axes: Axes, corner: Point, size: Point, colour: str, text: str = "", pale: bool = True) -> None:
    """A plain block of a timeline."""
    face = PALE[colour] if pale else colour
    axes.add_patch(Rectangle(corner, *size, facecolor=face, edgecolor=colour, linewidth=1))
    if text:
        middle = corner[0] + size[0] / 2, corner[1] + size[1] / 2
        axes.text(*middle, text, ha="center", va="center", fontsize=SMALL, color=INK if pale else "white")


def arrow(axes: Axes, start: Point, end: Point, colour: str = INK, bend: float = 0, dashed: bool = False) -> None:
    """An arrow, bent to one side by a part of its length."""
    axes.add_patch(
        FancyArrowPatch(
            start,
            end,
            arrowstyle="-|>",
            mutation_scale=9,
            color=colour,
            linewidth=1.3,
            shrinkA=0,
            shrinkB=0,
            connectionstyle=f"arc3,rad={bend}",
            linestyle=(0, (3, 2)) if dashed else "-",
        )
    )


def path(axes: Axes, points: Sequence[Point], colour: str = INK, dashed: bool = False) -> None:
    """A line with corners that ends in an arrow."""
    xs, ys = zip(*points[:-1], strict=True)
    axes.plot(xs, ys, color=colour, linewidth=1.3, linestyle=(0, (3, 2)) if dashed else "-", solid_capstyle="butt")
    arrow(axes, points[-2], points[-1], colour, dashed=dashed)

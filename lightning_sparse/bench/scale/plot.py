"""A picture of how traffic and time of communication grow with the number of ranks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_sparse.bench.compare.plots import new_figure, save
from lightning_sparse.bench.scale.model import Measurement
from lightning_sparse.monitor.tables import human_bytes

MARKERS = "os^Dv<>Phd"


def draw(
    modelled: Sequence[Measurement], measured: Sequence[Measurement], elements: int, path: Path, title: str
) -> None:
    """Draw bytes and seconds over ranks: what was measured filled, what was counted or modelled hollow.

    Args:
        modelled: of every strategy, each number of ranks; bytes are counted, seconds modelled.
        measured: by the bench; may be empty.
        elements: of the gradient.
        path: of the SVG file.
        title: of the picture.
    """
    from matplotlib.lines import Line2D  # an extra, and slow to import

    figure = new_figure(11, 4.8)
    panels = figure.subplots(1, 2)
    hollow: dict[str, Any] = {"fillstyle": "none", "linewidth": 0.8}
    filled = {"linestyle": "none", "label": "_measured"}
    for i, strategy in enumerate(dict.fromkeys(each.strategy for each in (*modelled, *measured))):
        look = {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "markersize": 5, "label": strategy}
        for points, style in ((modelled, hollow), (measured, filled)):
            own = [each for each in points if each.strategy == strategy]
            ranks = [each.ranks for each in own]
            panels[0].plot(ranks, [each.sent_bytes for each in own], **{**look, **style})
            panels[1].plot(ranks, [1e3 * each.seconds for each in own], **{**look, **style})
    sizes = sorted({each.ranks for each in (*modelled, *measured)})
    _label(panels[0], sizes, f"bytes a rank sends in a step\n(gradient of {human_bytes(4 * elements)})")
    _label(panels[1], sizes, "ms of communication in a step")
    handles, labels = panels[0].get_legend_handles_labels()
    black: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 5}
    kinds = [Line2D([], [], **black, **hollow), Line2D([], [], **black, linestyle="none")]
    figure.legend([*handles, *kinds], [*labels, "counted, modelled", "measured"], loc="outside right upper")
    figure.suptitle(title)
    save(figure, path)


def _label(axes: Any, sizes: Sequence[int], what: str) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="ranks", ylabel=what)
    axes.grid(which="both", lw=0.3)

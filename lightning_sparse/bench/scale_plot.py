"""A picture of how traffic and time of communication grow with the number of ranks."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_sparse.bench.scale_model import Measured, model_s, scaled_bytes
from lightning_sparse.bench.scale_ranks import Traffic
from lightning_sparse.pictures import human_bytes
from lightning_sparse.rehearsal import Link

MARKERS = "os^Dv<>Phd"


def require_matplotlib() -> None:
    """Say what to install if it is missing.

    Raises:
        ValueError: it is.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("the plot needs matplotlib, which is not installed: pip install lightning-sparse[bench]")


def draw(
    counts: Sequence[Traffic], measured: Sequence[Measured], link: Link, elements: int, path: Path, title: str = ""
) -> None:
    """Draw bytes and seconds over ranks: what was measured filled, what was counted or modelled hollow.

    Args:
        counts: of every strategy, each number of ranks.
        measured: by the bench; may be empty.
        link: of the model.
        elements: of the gradient that was measured, to which counts are scaled.
        path: of the picture; its suffix is its format.
        title: of the picture.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure  # without pyplot: no display, no state

    with rc_context({"svg.hashsalt": path.stem, "font.size": 9}):
        figure = Figure(figsize=(11, 4.8), layout="constrained")
        of_bytes, of_time = figure.subplots(1, 2)
        for i, strategy in enumerate(_strategies(counts, measured)):
            style = {"color": f"C{i % 10}", "marker": MARKERS[i % len(MARKERS)], "markersize": 5}
            own = [each for each in counts if each.strategy == strategy]
            seen = [each for each in measured if each.strategy == strategy]
            hollow = {**style, "fillstyle": "none", "linewidth": 0.8, "label": strategy}
            filled = {**style, "linestyle": "none", "label": "_measured"}
            ranks, sent = [each.ranks for each in own], [scaled_bytes(each, elements) for each in own]
            seconds = [model_s(c.hops, b, c.ranks, link) for c, b in zip(own, sent, strict=True)]
            of_bytes.plot(ranks, sent, **hollow)
            of_time.plot(ranks, [1e3 * each for each in seconds], **hollow)
            of_bytes.plot([each.ranks for each in seen], [each.sent_bytes for each in seen], **filled)
            of_time.plot([each.ranks for each in seen], [1e3 * each.seconds for each in seen], **filled)
        _label(of_bytes, counts, measured, f"bytes a rank sends in a step\n(gradient of {human_bytes(4 * elements)})")
        _label(of_time, counts, measured, "ms of communication in a step")
        handles, labels = of_bytes.get_legend_handles_labels()
        figure.legend([*handles, *_kinds()], [*labels, "counted, modelled", "measured"], loc="outside right upper")
        if title:
            figure.suptitle(title)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _strategies(counts: Sequence[Traffic], measured: Sequence[Measured]) -> list[str]:
    return list(dict.fromkeys([*(each.strategy for each in counts), *(each.strategy for each in measured)]))


def _label(axes: Any, counts: Sequence[Traffic], measured: Sequence[Measured], what: str) -> None:
    sizes = sorted({each.ranks for each in counts} | {each.ranks for each in measured})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("ranks")
    axes.set_ylabel(what)
    axes.grid(which="both", lw=0.3)


def _kinds() -> list[Any]:
    """What stands for the two kinds of points in the legend."""
    from matplotlib.lines import Line2D

    style: dict[str, Any] = {"color": "black", "marker": "o", "markersize": 5}
    return [Line2D([], [], **style, fillstyle="none", linewidth=0.8), Line2D([], [], **style, linestyle="none")]

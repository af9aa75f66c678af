"""Draw how long a step takes and seconds to a loss as bars, from the newest stored runs, for the site's pages.

Run: python docs/figures/bars.py
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import style as s
from matplotlib.axes import Axes
from runs import NO_COMMUNICATION, Run, is_peer, label, link, newest, stored

SHOWN = ("gpt_3m", "4x1gbit")  # on the first page
ROW, BAR, HEAD = 19, 12, 40  # points: from bar to bar, height of a bar, heading of a link
NAMES, STEP, LOSS = 12, 128, 244  # points from the left: names, the two columns of bars
LONGEST = 66  # points
MOST = 12  # strategies of a link


def target(run: Run, cluster: str) -> float | None:
    """The lowest loss that every strategy reached, else half of them; None where they reached none."""
    rows = [row for strategy, row in run.reached[cluster].items() if strategy != NO_COMMUNICATION]
    counts = [sum(row.to_each[i].seconds < math.inf for row in rows) for i in range(len(run.losses))]
    for wanted in (len(rows), len(rows) / 2):
        if reached := [loss for loss, n in zip(run.losses, counts, strict=True) if n >= wanted]:
            return min(reached)
    return None


def to_loss(run: Run, cluster: str, strategy: str, loss: float | None) -> float:
    """Seconds to a loss."""
    if loss is None:
        return math.inf
    return run.reached[cluster][strategy].to_each[run.losses.index(loss)].seconds


def best(run: Run, cluster: str, strategies: Iterable[str]) -> list[str]:
    """Sort strategies by the seconds to the loss, those that never got there by their last loss."""
    loss, rows = target(run, cluster), run.reached[cluster]
    return sorted(strategies, key=lambda name: (to_loss(run, cluster, name, loss), rows[name].last))


def short_list(run: Run, cluster: str) -> list[str]:
    """What the first page shows: DDP, its hook, the best PowerSGD, sparse_auto, the best other of ours, no network."""
    known = run.strategies(cluster)
    ours = [name for name in known if not is_peer(name) and not name.startswith("sparse_auto")]
    chosen = {"ddp", "bf16_hook", "sparse_auto", NO_COMMUNICATION}
    chosen.update(best(run, cluster, [name for name in known if name.startswith("powersgd")])[:1])
    chosen.update(best(run, cluster, ours)[:1])
    return [name for name in known if name in chosen or name.partition(":lr=")[0] in chosen]


def long_list(run: Run, cluster: str) -> list[str]:
    """What the page of results shows: all, or of too many those above and the soonest."""
    known = run.strategies(cluster)
    chosen = [*short_list(run, cluster), *best(run, cluster, known)]
    return [name for name in known if name in list(dict.fromkeys(chosen))[:MOST]]


def colour_of(strategy: str) -> str:
    """Green for ours, blue for those of others, grey for the floor."""
    if strategy == NO_COMMUNICATION:
        return s.GREY
    return s.BLUE if is_peer(strategy) else s.GREEN


def bar(axes: Axes, left: float, top: float, value: float, longest: float, strategy: str, text: str) -> None:
    """One bar and its ``text``; an outline where the value is infinite."""
    length = LONGEST * min(value / longest, 1)
    s.block(axes, (left, top), (length, BAR), colour_of(strategy), pale=value == math.inf)
    s.write(axes, (left + length + 5, top + BAR / 2), text, s.INK, s.SMALL)


def panel(axes: Axes, top: float, run: Run, cluster: str, strategies: Sequence[str]) -> None:
    """The bars of one link."""
    loss = target(run, cluster)
    steps = {name: run.step_s(cluster, name) for name in strategies}
    losses = {name: to_loss(run, cluster, name, loss) for name in strategies}
    given = run.environment.get("seconds") or max(row.in_all.seconds for row in run.reached[cluster].values())
    title = f"{run.workload}, {link(cluster)}"
    axes.text(NAMES, top, title, fontweight="bold", va="center_baseline")
    s.write(axes, (STEP, top + 18), "ms a step", s.FAINT, s.SMALL)
    s.write(axes, (LOSS, top + 18), "" if loss is None else f"seconds to loss {loss:g}", s.FAINT, s.SMALL)
    longest = max((value for value in losses.values() if value < math.inf), default=given)
    longest = max(longest, given) if math.inf in losses.values() else longest
    for i, name in enumerate(strategies):
        y = top + HEAD - 10 + ROW * i
        s.write(axes, (NAMES, y + BAR / 2), label(name), size=s.SMALL)
        bar(axes, STEP, y, steps[name], max(steps.values()), name, f"{1e3 * steps[name]:.0f}")
        if loss is not None:
            text = f"{losses[name]:.1f}" if losses[name] < math.inf else f"> {given:.0f}"
            bar(axes, LOSS, y, losses[name], longest, name, text)


def draw(name: str, shown: Sequence[tuple[Run, str, Sequence[str]]], folder: Path = s.FOLDER) -> None:
    """Draw runs on links with strategies, below each other."""
    heights = [HEAD + ROW * len(strategies) + 12 for _, _, strategies in shown]
    figure, axes = s.canvas(sum(heights) + 26)
    top = 16.0
    for (run, cluster, strategies), height in zip(shown, heights, strict=True):
        panel(axes, top, run, cluster, strategies)
        top += height
    s.write(axes, (NAMES, top), "green: ours; outlined: not reached; no network: one rank", s.FAINT, s.SMALL)
    s.store(figure, name, folder)


def main(folder: Path = s.FOLDER) -> None:
    """Draw the figure of the first page."""
    run, cluster = newest(stored())[SHOWN], SHOWN[1]
    draw("speed", [(run, cluster, short_list(run, cluster))], folder)


if __name__ == "__main__":
    main()

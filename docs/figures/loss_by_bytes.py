"""Draw the loss of strategies and peers on three tasks, the most bytes first, and write tables of it.

Run: python docs/figures/loss_by_bytes.py; it reads the stored results of docs/benchmarks/simulate.py, takes each
strategy at its best learning rate, and writes docs/benchmarks/2026-11-22-accuracy.svg and the tables between the marks
in docs/benchmarks/2026-11-22-accuracy.md and docs/accuracy.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

import style
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from pages import BENCHMARKS, with_lines
from simulate import TASKS, Result, read

from lightning_sparse.bench.output import save

LOCAL = "2026-11-24-local-steps-loss.jsonl"  # with local steps as they are now; in the others they are as they were
RESULTS = [*(f"2026-11-22-{name}.jsonl" for name in ("loss", "local-steps-loss", "accuracy")), LOCAL]
FIGURE, PAGE = BENCHMARKS / "2026-11-22-accuracy.svg", BENCHMARKS / "2026-11-22-accuracy.md"
SUMMARY = BENCHMARKS.parent / "accuracy.md"
RANKS = 4

#: Task -> what it is called, its colour and its mark.
LOOKS = {
    "byte_lm": ("byte LM: GPT, AdamW", style.BLUE, "o"),
    "digits": ("digits: CNN, SGD", style.ORANGE, "s"),
    "modules": ("modules: embeddings, AdamW", style.GREEN, "D"),
}
#: Strategy -> what it is called in the figure.
NAMES = {
    "sparse_dense:wire_dtype=int8": "all, int8",
    "sparse_dense:wire_dtype=int4": "all, int4",
    "sparse_dense:wire_dtype=sign": "all, sign",
    "skip_reduce:wire_dtype=int4": "half skipped, int4",
    "ok_topk:density=0.3:wire_dtype=int4": "Ok-Topk 30 %, int4",
    "micro:density=0.3:wire_dtype=int4": "MiCRO 30 %, int4",
    "micro:density=0.1:wire_dtype=int4": "MiCRO 10 %, int4",
    "micro:density=0.05:wire_dtype=int4": "MiCRO 5 %, int4",
    "micro:density=0.01:wire_dtype=float32": "MiCRO 1 %, float32",
    "low_rank:rank=16": "PowerSGD, rank 16",
    "low_rank:rank=4": "PowerSGD, rank 4",
    "low_rank:rank=1": "PowerSGD, rank 1",
    "sparse_dense:local_steps=1:wire_dtype=int2": "1 local step, int2",
    "sparse_dense:local_steps=2:wire_dtype=int4": "2 local steps, int4",
    "sparse_dense:local_steps=4:wire_dtype=int4": "4 local steps, int4",
    "sparse_dense:local_steps=3:wire_dtype=sign": "3 local steps, sign",
    "sparse_dense:local_steps=16:wire_dtype=int4": "16 local steps, int4",
    "diloco:steps=16": "DiLoCo, 16 steps",
    "diloco:steps=16:outer_rate=0.7:outer_momentum=0.5:start=60": "DiLoCo, tuned",
}
IN_FULL_ONLY = {  # what the short table leaves out
    "ok_topk:density=0.3:wire_dtype=int4",
    "micro:density=0.1:wire_dtype=int4",
    "micro:density=0.01:wire_dtype=float32",
    "low_rank:rank=1",
    "sparse_dense:local_steps=16:wire_dtype=int4",
    "diloco:steps=16",
}
ALONE = "one rank alone"
LOWEST, HIGHEST = -6, 112  # what is shown, of 100 that three ranks more gain; beyond it numbers stand
ROW = 15  # points


@dataclass(frozen=True)
class Point:
    """A strategy at its best learning rate."""

    strategy: str
    results: dict[int, Result]  # by seed

    @property
    def rate(self) -> float:
        """The learning rate."""
        return next(iter(self.results.values())).run.learning_rate

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends in a step, for each parameter."""
        return fmean(result.sent_bytes for result in self.results.values())

    def above(self, dense: "Point") -> float:
        """By how much the loss is above that of dense training with the same seeds: a mean of ratios, less 1."""
        return fmean(self._ratios(dense)) - 1

    def spread(self, dense: "Point") -> float:
        """The standard deviation of these ratios over seeds; 0 of one seed."""
        ratios = self._ratios(dense)
        return stdev(ratios) if len(ratios) > 1 else 0.0

    def lost(self, dense: "Point", alone: "Point") -> float:
        """The part that is lost of what three more ranks gain: 0 as dense training, 1 as one rank alone."""
        return self.above(dense) / alone.above(dense)

    def _ratios(self, dense: "Point") -> list[float]:
        seeds = self.results.keys() & dense.results.keys()
        return [self.results[seed].loss / dense.results[seed].loss for seed in seeds]


Tasks = dict[str, tuple[dict[str, Point], Point]]  # for each, all strategies on four ranks, and one rank alone


def points(results: Iterable[Result]) -> dict[str, Point]:
    """Each strategy at its best learning rate."""
    found: dict[str, list[Result]] = {}
    for each in results:
        name = "micro:density=0.01:wire_dtype=float32" if each.run.strategy == "micro" else each.run.strategy
        found.setdefault(name, []).append(each)
    return {name: Point(name, at_best_rate(own)) for name, own in found.items()}


def at_best_rate(results: Iterable[Result]) -> dict[int, Result]:
    """Those with the best learning rate, by seed, judged by the seeds that all of the rates have."""
    rates: dict[float, dict[int, Result]] = {}
    for each in results:
        rates.setdefault(each.run.learning_rate, {})[each.run.seed] = each
    seeds = set.intersection(*(set(of_rate) for of_rate in rates.values()))
    return min(rates.values(), key=lambda of_rate: fmean(of_rate[seed].loss for seed in seeds))


def draw(axes: Axes, y: int, strategy: str, tasks: Tasks) -> None:
    """Draw in a row how much of what three ranks more gain a strategy loses on each task."""
    beyond = []
    for task, (found, alone) in tasks.items():
        if (point := found.get(strategy)) is None:
            continue
        _, colour, mark = LOOKS[task]
        dense = found["ddp"]
        x, spread = 100 * point.lost(dense, alone), 100 * point.spread(dense) / alone.above(dense)
        if x > HIGHEST:
            beyond.append(f"{x:.0f}")
        else:
            axes.plot(x, y, mark, color=colour, markersize=5, zorder=3)
            axes.errorbar(x, y, xerr=spread, color=colour, linewidth=0.8, zorder=2)
    if beyond:
        blank = {"facecolor": style.PAPER, "edgecolor": "none", "pad": 1}
        axes.text(HIGHEST, y, ", ".join(beyond), fontsize=style.SMALL, ha="right", va="center", bbox=blank)


def table(found: dict[str, Point], alone: Point) -> list[str]:
    """A row for each strategy, the least loss first."""
    dense = found["ddp"]
    lines = [
        "| strategy | bytes | learning rate | seeds | loss | above `ddp` | lost of what three ranks more gain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for point in [*sorted(found.values(), key=lambda point: point.above(dense)), alone]:
        above, loss = point.above(dense), fmean(result.loss for result in point.results.values())
        name = ALONE if point is alone else f"`{point.strategy}`"
        lines.append(
            f"| {name} | {point.sent_bytes:.3f} | {point.rate:g} | {len(point.results)} | {loss:.3f} | "
            f"{_percent(above, 1)} | {_percent(point.lost(dense, alone), 0)} |"
        )
    return lines


def _percent(part: float, digits: int) -> str:
    return f"{round(100 * part, digits) + 0.0:.{digits}f} %"  # never -0.0


def of_tasks() -> Tasks:
    """For each task all strategies on four ranks, and one rank alone; local steps as they are now."""
    results = [
        result
        for name in RESULTS
        for result in read(BENCHMARKS / name).values()
        if "lead=" not in result.run.strategy and (name == LOCAL or "local_steps" not in result.run.strategy)
    ]
    found = {}
    for task in LOOKS:
        kind = TASKS[task]
        usual = (task, kind.optimizer, kind.steps)
        own = [each for each in results if (each.run.task, each.run.optimizer, each.run.steps) == usual]
        alone = points(each for each in own if each.run.ranks == 1)["ddp"]
        found[task] = points(each for each in own if each.run.ranks == RANKS), alone
    return found


def summary(tasks: Tasks, rows: list[str]) -> list[str]:
    """A row for each named strategy: bytes on the byte LM, and for each task the loss above dense training."""
    lines = ["| strategy | bytes | byte LM | digits | modules |", "| --- | ---: | ---: | ---: | ---: |"]
    for strategy in [*rows, ALONE]:
        cells = []
        for found, alone in tasks.values():
            dense, point = found["ddp"], alone if strategy == ALONE else found.get(strategy)
            cell = f"{_percent(point.above(dense), 1)} ({round(100 * point.lost(dense, alone))})" if point else ""
            cells.append(cell)
        sent = f"{tasks['byte_lm'][0][strategy].sent_bytes:.2f}" if strategy != ALONE else "0"
        lines.append(f"| {NAMES.get(strategy, strategy)} | {sent} | {' | '.join(cells)} |")
    return lines


def main() -> None:
    """Draw the figure and write the tables."""
    style.settings()
    tasks = of_tasks()
    byte_lm = tasks["byte_lm"][0]
    rows = sorted(NAMES, key=lambda strategy: -byte_lm[strategy].sent_bytes)
    height = ROW * len(rows) + 112
    figure, axes = plt.subplots(figsize=(style.WIDTH / style.POINTS_PER_INCH, height / style.POINTS_PER_INCH))
    for y, strategy in enumerate(rows):
        draw(axes, y, strategy, tasks)
    for title, colour, mark in LOOKS.values():
        axes.plot([], [], mark, color=colour, markersize=5, label=title)
    axes.set(xlim=(LOWEST, HIGHEST), ylim=(len(rows) - 0.4, -0.6))
    axes.set_yticks(range(len(rows)), [f"{NAMES[each]}  {byte_lm[each].sent_bytes:.2f}" for each in rows])
    axes.set_xticks([0, 25, 50, 75, 100], ["0\nas dense", "25", "50", "75", "100\none rank alone"])
    axes.tick_params(labelsize=style.SMALL, length=0)
    axes.grid(color=style.GREY, linewidth=0.4)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title("bytes a step, for each parameter", fontsize=style.SMALL, x=-0.02, ha="right", color=style.FAINT)
    axes.set_xlabel("lost of what three more ranks gain, in percent", fontsize=style.SMALL, x=0.25, labelpad=6)
    figure.legend(loc="lower center", fontsize=style.SMALL, frameon=False)
    figure.subplots_adjust(left=0.455, right=0.95, top=1 - 20 / height, bottom=92 / height)
    save(figure, FIGURE)
    text = [line for task, found in tasks.items() for line in (f"## {task}", "", *table(*found), "")]
    PAGE.write_text(with_lines(PAGE, __file__, text))
    short = [row for row in rows if row not in IN_FULL_ONLY]
    SUMMARY.write_text(with_lines(SUMMARY, __file__, summary(tasks, short)))


if __name__ == "__main__":
    main()

"""Draw loss against bytes for every strategy and peer on three tasks, and write the table of it.

Run: python docs/figures/loss_by_bytes.py; it reads the stored results of lightning-sparse simulate, takes each strategy
at its best learning rate, and writes docs/benchmarks/2026-11-22-accuracy.svg and the table between the marks in
docs/benchmarks/2026-11-22-accuracy.md.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, stdev

import style
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from pages import BENCHMARKS, with_lines

from lightning_sparse.bench.output import save
from lightning_sparse.bench.simulate.results import Result, read
from lightning_sparse.bench.simulate.task import TASKS

LOCAL = "2026-11-24-local-steps-loss.jsonl"  # with local steps as they are now; in the others they are as they were
RESULTS = [*(f"2026-11-22-{name}.jsonl" for name in ("loss", "local-steps-loss", "accuracy")), LOCAL]
FIGURE, PAGE = BENCHMARKS / "2026-11-22-accuracy.svg", BENCHMARKS / "2026-11-22-accuracy.md"
RANKS = 4

TITLES = {
    "byte_lm": "byte LM: GPT, AdamW",
    "digits": "digits: CNN, SGD",
    "modules": "modules: embeddings, AdamW",
}
#: Start of a strategy's name -> colour and what it is called in the legend.
FAMILIES = {
    "local": ("#c0392b", "local steps"),
    "diloco": ("#7f8c8d", "DiLoCo"),
    "powersgd": ("#8e44ad", "PowerSGD, low rank"),
    "low_rank": ("#8e44ad", "PowerSGD, low rank"),
    "sparse_dense": ("#2471a3", "all of the gradient"),
    "ddp": ("#2471a3", "all of the gradient"),
    "": ("#d68910", "a part of the gradient"),
}
#: Strategy -> label.
LABELS = {
    "ddp": "DDP",
    "sparse_dense:wire_dtype=int4": "int4",
    "sparse_dense:wire_dtype=sign": "sign",
    "skip_reduce": "half skipped",
    "micro:density=0.3:wire_dtype=int4": "30 % int4",
    "micro:density=0.05:wire_dtype=int4": "5 % int4",
    "micro:density=0.01:wire_dtype=float32": "1 % float32",
    "low_rank:rank=4": "rank 4",
    "low_rank:rank=1": "rank 1",
    "sparse_dense:local_steps=2:wire_dtype=int4": "1/2 int4",
    "sparse_dense:local_steps=3:wire_dtype=sign": "1/3 sign",
    "sparse_dense:local_steps=1:wire_dtype=sign": "1/1 sign",
    "sparse_dense:local_steps=16:wire_dtype=int4": "1/16 int4",
}
#: Task -> where labels stand beside their points, in points to the right and above; none where they would overlap.
BESIDE = {
    "byte_lm": {
        "DDP": (-8, 5),
        "int4": (-8, -16),
        "sign": (6, -3),
        "half skipped": (-42, 6),
        "30 % int4": (6, 1),
        "5 % int4": (-42, 5),
        "1 % float32": (-10, 6),
        "rank 4": (7, -9),
        "rank 1": (9, -3),
        "1/2 int4": (-44, -13),
        "1/3 sign": (-40, -8),
        "1/1 sign": (-40, 4),
        "1/16 int4": (-18, 6),
    },
    "digits": {
        "DDP": (-10, 5),
        "int4": (-2, -13),
        "sign": (6, -3),
        "half skipped": (-42, 6),
        "5 % int4": (-10, 7),
        "1 % float32": (6, -3),
        "rank 1": (6, -3),
        "1/2 int4": (-6, 12),
        "1/3 sign": (-34, -18),
        "1/16 int4": (-20, 8),
    },
    "modules": {
        "DDP": (-8, -12),
        "int4": (-2, -12),
        "sign": (6, 0),
        "half skipped": (-42, 6),
        "5 % int4": (-30, -12),
        "1 % float32": (-10, 6),
        "rank 4": (5, 3),
        "rank 1": (-22, -11),
        "1/2 int4": (-10, 7),
        "1/3 sign": (-14, -13),
        "1/16 int4": (-20, 7),
    },
}
#: Task -> limits of its vertical axis.
LIMITS = {
    "byte_lm": (-12, 160),
    "digits": (-9, 80),
    "modules": (-3, 30),
}  # of the vertical axis, which has its own scale


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

    def _ratios(self, dense: "Point") -> list[float]:
        seeds = self.results.keys() & dense.results.keys()
        return [self.results[seed].loss / dense.results[seed].loss for seed in seeds]


def frontier(found: Iterable[Point], dense: Point) -> list[Point]:
    """Those of which no other one loses less for as few bytes, the fewest bytes first."""
    kept: list[Point] = []
    for point in sorted(found, key=lambda point: point.sent_bytes):
        if not kept or point.above(dense) < kept[-1].above(dense):
            kept.append(point)
    return kept


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


def family(strategy: str) -> tuple[str, str]:
    """The colour and the name of what a strategy does."""
    kind = "local" if "local_steps" in strategy else strategy
    return next(value for start, value in FAMILIES.items() if kind.startswith(start))


def draw(axes: Axes, task: str, found: dict[str, Point], alone: Point) -> None:
    """Draw a task: 0 is dense training, 100 one rank alone."""
    dense, worst = found["ddp"], alone.above(found["ddp"])
    for point in found.values():
        x, y = point.sent_bytes, 100 * point.above(dense) / worst
        colour, name = family(point.strategy)
        top = LIMITS[task][1]
        axes.plot(
            x, min(y, top), "o" if y <= top else "^", color=colour, markersize=4.5, label=name, clip_on=False, zorder=3
        )
        if y <= top and (spread := 100 * point.spread(dense) / worst):
            axes.errorbar(x, y, spread, color=colour, linewidth=0.8, zorder=2)
        if y > top:
            axes.annotate(f"{y:.0f}", (x, top), (5, -3), textcoords="offset points", color=colour, fontsize=style.SMALL)
        label = LABELS.get(point.strategy, "")
        if label in BESIDE[task]:
            axes.annotate(
                label, (x, y), BESIDE[task][label], textcoords="offset points", color=colour, fontsize=style.SMALL
            )
    best = frontier(found.values(), dense)
    heights = [100 * point.above(dense) / worst for point in best]
    axes.plot([point.sent_bytes for point in best], heights, color=style.GREY, linewidth=0.9, zorder=1)
    axes.axhline(0, color="black", linewidth=0.6)
    if LIMITS[task][1] > 100:
        axes.axhline(100, color="black", linewidth=0.6, linestyle=":")
    axes.set_title(TITLES[task], fontsize=style.TEXT, fontweight="bold", loc="left")
    axes.set_xscale("log")
    axes.set_xlim(0.006, 8)
    axes.set_ylim(*LIMITS[task])
    axes.set_xticks([0.01, 0.1, 1], ["0.01", "0.1", "1"])
    axes.tick_params(labelsize=style.SMALL)
    axes.spines[["top", "right"]].set_visible(False)


def table(found: dict[str, Point], alone: Point) -> list[str]:
    """A row for each strategy, the least loss first."""
    dense = found["ddp"]
    lines = [
        "| strategy | bytes | learning rate | seeds | loss | above `ddp` | lost of what three ranks more gain |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for point in [*sorted(found.values(), key=lambda point: point.above(dense)), alone]:
        above, loss = point.above(dense), fmean(result.loss for result in point.results.values())
        name = "one rank alone" if point is alone else f"`{point.strategy}`"
        lines.append(
            f"| {name} | {point.sent_bytes:.3f} | {point.rate:g} | {len(point.results)} | {loss:.3f} | "
            f"{_percent(above, 1)} | {_percent(above / alone.above(dense), 0)} |"
        )
    return lines


def _percent(part: float, digits: int) -> str:
    return f"{round(100 * part, digits) + 0.0:.{digits}f} %"  # never -0.0


def of_tasks() -> dict[str, tuple[dict[str, Point], Point]]:
    """For each task all strategies on four ranks, and one rank alone; local steps as they are now."""
    results = [
        result
        for name in RESULTS
        for result in read(BENCHMARKS / name).values()
        if "lead=" not in result.run.strategy and (name == LOCAL or "local_steps" not in result.run.strategy)
    ]
    found = {}
    for task, kind in TASKS.items():
        usual = (task, kind.optimizer, kind.steps)
        own = [each for each in results if (each.run.task, each.run.optimizer, each.run.steps) == usual]
        alone = points(each for each in own if each.run.ranks == 1)["ddp"]
        found[task] = points(each for each in own if each.run.ranks == RANKS), alone
    return found


def main() -> None:
    """Draw the figure and write the table."""
    style.settings()
    figure, panels = plt.subplots(len(TASKS), 1, figsize=(style.WIDTH / style.POINTS_PER_INCH, 10.4))
    text: list[str] = []
    for axes, (task, (found, alone)) in zip(panels, of_tasks().items(), strict=True):
        draw(axes, task, found, alone)
        text += [f"## {task}", "", *table(found, alone), ""]
    panels[1].set_ylabel("loss: 0 is dense training, 100 one rank alone")
    panels[-1].set_xlabel("bytes a step, for each parameter (float32: 6)")
    handles = dict(zip(*reversed(panels[0].get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=2, fontsize=style.SMALL, frameon=False)
    figure.subplots_adjust(left=0.13, right=0.94, top=0.97, bottom=0.135, hspace=0.24)
    save(figure, FIGURE)
    PAGE.write_text(with_lines(PAGE, __file__, text))


if __name__ == "__main__":
    main()

"""Fit how many more steps than dense training strategies need to the same loss, by what they deliver and when.

Run: python docs/figures/more_steps.py; it reads the stored results of docs/benchmarks/simulate.py and writes tables
between the marks in docs/benchmarks/2026-11-24-more-steps.md.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import correlation, fmean, geometric_mean

from loss_by_bytes import at_best_rate
from pages import BENCHMARKS, with_lines
from simulate import Result, read

from lightning_sparse.auto.forecast import AS_DENSE, OF_LOCAL, OF_UNSENT, more_steps

PAGE = BENCHMARKS / "2026-11-24-more-steps.md"
GRADIENTS = BENCHMARKS / "2026-11-22-accuracy.jsonl", BENCHMARKS / "2026-11-22-loss.jsonl"
LOCAL = BENCHMARKS / "2026-11-24-local-steps-loss.jsonl", BENCHMARKS / "2026-11-27-more-ranks.jsonl"
SHORT = BENCHMARKS / "2026-11-22-faithfulness.jsonl"  # what strategies of gradients deliver, in 40 steps
LEFT_OUT = ("ddp", "diloco", "lead=", "lr_factor", "second_moments", "fragments", "no_communication")


@dataclass(frozen=True)
class Point:
    """A strategy on a task: what it delivers and when, and how many times as many steps it needs."""

    task: str
    name: str
    ranks: int
    steps: int
    delivered: float
    staleness: float
    more: float

    @property
    def local_steps(self) -> int:
        """H; 0 where gradients are averaged."""
        found = re.search(r"local_steps=(\d+)", self.name)
        return int(found[1]) if found else 0

    @property
    def cause(self) -> float:
        """What the logarithm of ``more`` is proportional to."""
        if not self.local_steps:
            return 1 - self.delivered
        return math.log(max(1.0, self.ranks * max(self.local_steps, self.staleness) / AS_DENSE))

    @property
    def expected(self) -> float:
        """What ``more`` is expected to be."""
        return more_steps(self.delivered, self.staleness, self.ranks, self.local_steps)


def steps_to(result: Result, loss: float) -> float:
    """Steps of a training to a loss, between two evaluations as if the loss fell with the logarithm of the steps."""
    for (before, high), (after, low) in pairwise(result.curve):
        if high >= loss >= low and high > low:
            return math.exp(math.log(before) + math.log(after / before) * (high - loss) / (high - low))
    return math.inf if result.curve[0][1] > loss else result.curve[0][0]


def ratio(result: Result, dense: Result) -> float:
    """Times as many steps as dense training to what its loss was after a third of the steps, and after a half.

    Where the loss is not reached, as many as there were.
    """
    return fmean(min(steps_to(result, loss), result.run.steps) / step for step, loss in dense.curve[1:3])


def points() -> list[Point]:
    """Every strategy at its best learning rate, the mean over seeds that dense training was tried with too."""
    trained: dict[tuple[str, int, int], dict[str, list[Result]]] = defaultdict(lambda: defaultdict(list))
    for file in (*GRADIENTS, *LOCAL):
        for result in read(file).values():
            run, local = result.run, "local_steps" in result.run.strategy
            if run.ranks > 1 and (run.strategy == "ddp" or local == (file in LOCAL)):
                trained[run.task, run.ranks, run.steps][run.strategy].append(result)
    short = {(each.run.task, each.run.strategy): each for each in read(SHORT).values()}
    found = []
    for (task, ranks, steps), strategies in trained.items():
        dense = at_best_rate(strategies["ddp"]) if "ddp" in strategies else {}
        for name, results in strategies.items():
            known = [each for seed, each in at_best_rate(results).items() if seed in dense]
            if not known or any(word in name for word in LEFT_OUT):
                continue
            judged = known if "local_steps" in name else [short.get((task, name), known[0])]
            if any(each.delivered is None for each in judged):
                continue
            delivered, staleness = (fmean(getattr(each, of) for each in judged) for of in ("delivered", "age"))
            more = fmean(ratio(each, dense[each.run.seed]) for each in known)
            found.append(Point(task, name, ranks, steps, delivered, staleness, more))
    return found


def slope(rows: Sequence[Point]) -> float:
    """The factor from the cause to the logarithm of ``more``, by least squares."""
    return sum(row.cause * math.log(row.more) for row in rows) / sum(row.cause**2 for row in rows)


def rank_correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's: the correlation of their ranks; equal values share the mean of theirs."""
    ranks = ([fmean(i for i, other in enumerate(sorted(each)) if other == value) for value in each] for each in (x, y))
    return correlation(*ranks)


def tables(every: Sequence[Point]) -> list[str]:
    """What was fitted, how it orders a task that it was not fitted on, and every strategy."""
    tasks = sorted({row.task for row in every})
    slopes = {
        (task, local): slope([row for row in every if row.task == task and bool(row.local_steps) == local])
        for task in tasks
        for local in (False, True)
    }
    lines = ["| | " + " | ".join(tasks) + " | taken |", "| --- " * (2 + len(tasks)) + "|"]
    for local, taken in ((False, OF_UNSENT), (True, OF_LOCAL)):
        of_local = f"local steps: for the logarithm of ranks x max(H, staleness) / {AS_DENSE}"
        what = of_local if local else "gradients: for 1 - `delivered`"
        lines.append(f"| {what} | {' | '.join(f'{slopes[task, local]:.4g}' for task in tasks)} | {taken:g} |")
    lines += ["", "| held out | strategies | rank correlation | as taken |", "| --- | --- | --- | --- |"]
    for task in tasks:
        rows = [row for row in every if row.task == task]
        of_others = {
            local: geometric_mean(slopes[other, local] for other in tasks if other != task) for local in (False, True)
        }
        fitted = [row.cause * of_others[bool(row.local_steps)] for row in rows]
        taken = [row.expected for row in rows]
        actual = [row.more for row in rows]
        cells = (f"{rank_correlation(each, actual):.2f}" for each in (fitted, taken))
        lines.append(f"| {task} | {len(rows)} | {' | '.join(cells)} |")
    header = "| strategy | ranks | steps | `delivered` | staleness | times as many steps | expected |"
    for task in tasks:
        lines += ["", f"## {task}", "", header, "| --- " * 7 + "|"]
        for row in sorted((row for row in every if row.task == task), key=lambda row: row.more):
            cells = f"{row.delivered:.3f} | {row.staleness:.2f} | {row.more:.2f} | {row.expected:.2f}"
            lines.append(f"| `{row.name}` | {row.ranks} | {row.steps} | {cells} |")
    return lines


def main() -> None:
    """Write the tables."""
    PAGE.write_text(with_lines(PAGE, __file__, tables(points())))


if __name__ == "__main__":
    main()

"""Compare what strategies deliver in a short training with what they cost in loss in a whole one.

Run: python docs/figures/faithfulness.py; it reads the stored results of lightning-sparse simulate and writes tables
between the marks in docs/benchmarks/2026-11-22-faithfulness.md.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from statistics import fmean

from loss_by_bytes import BENCHMARKS, of_tasks
from scipy.stats import spearmanr

from lightning_sparse.bench.simulate.results import read

SHORT, PAGE = BENCHMARKS / "2026-11-22-faithfulness.jsonl", BENCHMARKS / "2026-11-22-faithfulness.md"
START, END = "<!-- written by docs/figures/faithfulness.py -->\n", "<!-- end of what is written -->"
WEIGHTS = (0.1, 0.2, 0.5, 1.0)  # of what local steps leave: tried


@dataclass(frozen=True)
class Judged:
    """A strategy on a task: its compression error, and its loss above that of dense training.

    Args:
        lost: that loss, as a part of how much one rank alone is above dense training.
    """

    name: str
    delivered: float
    age: float
    above: float
    lost: float

    @property
    def local(self) -> bool:
        """Whether it takes local steps."""
        return "local_steps" in self.name

    def undelivered(self, weight: float) -> float:
        """What is not delivered, of which that of local steps counts so much."""
        return (1 - self.delivered) * (weight if self.local else 1)


def judged() -> dict[str, list[Judged]]:
    """Each task's strategies whose compression error and loss are known, the least loss first."""
    short = {(result.run.task, result.run.strategy): result for result in read(SHORT).values()}
    found = {}
    for task, (points, alone) in of_tasks(local_as_now=False).items():
        rows = []
        for name, point in points.items():
            if own := short.get((task, name)):
                above, worst = point.above(points["ddp"]), alone.above(points["ddp"])
                rows.append(Judged(name, own.delivered or 0.0, own.age or 0.0, above, above / worst))
        found[task] = sorted(rows, key=lambda row: row.above)
    return found


def correlation(rows: Sequence[Judged], score: Callable[[Judged], float]) -> str:
    """Spearman's rank correlation between a score and the loss."""
    return f"{spearmanr([score(row) for row in rows], [row.above for row in rows]).statistic:.2f}"


def regret(rows: Sequence[Judged], weight: float) -> str:
    """What the worse of two costs if it is taken for the better, where one takes local steps: the mean and the most."""
    costs = [
        max(0.0, one.lost - other.lost)
        for one, other in permutations(rows, 2)
        if one.local != other.local and one.undelivered(weight) < other.undelivered(weight)
    ]
    return f"{100 * fmean(costs):.1f}, {100 * max(costs):.0f}" if costs else "-"


def tables(found: dict[str, list[Judged]]) -> list[str]:
    """What predicts the loss, what a weight is good for, and every strategy."""
    rule = "| --- " * (1 + len(found)) + "|"
    scores: dict[str, Callable[[Judged], float]] = {
        "1 - `delivered`": lambda row: 1 - row.delivered,
        "`age`": lambda row: row.age,
    }
    kinds: dict[str, Callable[[Judged], bool]] = {
        "gradients that wait": lambda row: not row.local,
        "local steps": lambda row: row.local,
        "all": lambda row: True,
    }
    lines = [f"| rank correlation with loss | {' | '.join(found)} |", rule]
    for kind, wanted in kinds.items():
        chosen = {task: [row for row in rows if wanted(row)] for task, rows in found.items()}
        lines.append(f"| {kind}: strategies | {' | '.join(str(len(rows)) for rows in chosen.values())} |")
        for name, score in scores.items():
            lines.append(f"| {kind}: {name} | {' | '.join(correlation(rows, score) for rows in chosen.values())} |")
    for weight in WEIGHTS:
        score = partial(Judged.undelivered, weight=weight)
        cells = [correlation(rows, score) for rows in found.values()]
        lines.append(f"| all: 1 - `delivered`, local steps' times {weight:g} | {' | '.join(cells)} |")
    lines += ["", f"| cost of a wrong order, %: mean, most | {' | '.join(found)} |", rule]
    for weight in WEIGHTS:
        lines.append(
            f"| local steps' times {weight:g} | {' | '.join(regret(rows, weight) for rows in found.values())} |"
        )
    for task, rows in found.items():
        lines += ["", f"## {task}", "", "| strategy | delivered | age | above `ddp` |", "| --- | --- | --- | --- |"]
        lines += [f"| `{row.name}` | {row.delivered:.3f} | {row.age:.2f} | {100 * row.above:.1f} % |" for row in rows]
    return lines


def main() -> None:
    """Write the tables."""
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + "\n" + "\n".join(tables(judged())) + "\n\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    main()

"""Write docs/results.md and docs/benchmarks/every-run.md, and draw their figures, from the stored summaries of runs.

Run: make results
     python docs/figures/results.py bench-results/....jsonl     # stores the summary of a new run first
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import bars
import style as s
from pages import BENCHMARKS, with_lines
from runs import NO_COMMUNICATION, Run, label, link, newest, speed, store, stored

from lightning_sparse.monitor.tables import human_bytes

PAGE = Path(__file__).parents[1] / "results.md"
EVERY_RUN = BENCHMARKS / "every-run.md"
LOSSES = 3  # of a table
WORKLOADS = {
    "byte_lm": "a byte language model, 279,168 parameters, AdamW",
    "gpt_3m": "a GPT over bytes, 2.8 million parameters, AdamW",
    "gpt_10m": "a GPT over bytes, 10.9 million parameters, AdamW",
    "gpt_124m": "GPT-2 small over words of source code, 124.4 million parameters, bfloat16 autocast, AdamW",
    "mlp_25m": "25.3 million parameters",
    "mlp_1m": "1.1 million parameters",
}
EVERY = 12  # Rows of a table, or more, that has every strategy.
SHOWN = {  # The columns of the short table: of strategies whose names begin so, the soonest.
    "ddp": "plain DDP",
    "bf16_hook": "bfloat16 hook",
    "powersgd": "PowerSGD",
    "diloco": "DiLoCo",
    "sparse_auto": "sparse_auto",
    NO_COMMUNICATION: "one rank alone",
}
IN_FULL = (bars.SHOWN, ("gpt_10m", "4x1gbit"))  # on the short page
SLOWER = (
    "Seconds to a loss on two cores of another machine. Trainings went one after the other, with other programs beside "
    "some, and `sparse_auto` began by other rules then, but for `gpt_10m` with 50 ms."
)


def machine(run: Run) -> str:
    """What a run was measured with."""
    e = run.environment
    return f"{run.name[:10]}, {e['cpu']}, {e['cores']} cores, torch {e['torch']}, lightning {e['lightning']}"


def command(run: Run) -> str:
    """What was typed."""
    return str(run.environment["command"].partition(" --output")[0])


def details(run: Run) -> Iterator[str]:
    """What ran, folded away."""
    rounds = f"{run.round_count} {'round' if run.round_count == 1 else 'rounds'}"
    yield from ["<details><summary>Machine and command</summary>", ""]
    yield f"{machine(run)}; {rounds}. {run.environment['note']}".strip()
    yield from ["", "```text", command(run), "```", "", f"[Summary]({run.name}.jsonl)", "", "</details>", ""]


def columns(run: Run) -> list[int]:
    """Which of the losses a table shows: the first, the last, and one between."""
    n = len(run.losses)
    return sorted({0, n // 2, n - 1}) if n > LOSSES else list(range(n))


def seconds(value: float) -> str:
    """Seconds, or a dash for never."""
    return f"{value:.1f}" if value < math.inf else "-"


def table(run: Run, cluster: str) -> Iterator[str]:
    """A row for each strategy, in short cells."""
    shown = columns(run)
    heads = ["ms a step", "sent a step", *(f"s to {run.losses[i]:g}" for i in shown)]
    heads += [] if run.losses else ["of DDP's"]
    yield "| | " + " | ".join(heads) + " |"
    yield "| --- |" + " ---: |" * len(heads)
    for strategy in run.strategies(cluster):
        row = run.summaries[cluster][strategy]
        cells = [f"{1e3 * run.step_s(cluster, strategy):.0f}", human_bytes(row.counted_bytes)]
        if run.losses:
            cells += [seconds(run.reached[cluster][strategy].to_each[i].seconds) for i in shown]
        else:
            cells.append(f"{row.ratio.value:.2f}" if row.ratio else "1")
        yield f"| {label(strategy)} | " + " | ".join(cells) + " |"
    yield ""


def in_order(runs: dict[tuple[str, str], Run]) -> list[tuple[str, str]]:
    """Workloads by name, those with losses first; fast links first."""
    return sorted(runs, key=lambda at: (not runs[at].losses, at[0], -speed(at[1])))


def results(runs: dict[tuple[str, str], Run], folder: Path = s.FOLDER) -> Iterator[str]:
    """The newest run of each workload on each link; figures go into ``folder``."""
    places = in_order(runs)
    for workload in dict.fromkeys(workload for workload, _ in places):
        yield from [f"## {workload}", "", f"Trained: {WORKLOADS.get(workload, workload)}.", ""]
        here = [(runs[at], at[1]) for at in places if at[0] == workload]
        drawn = [(run, cluster) for run, cluster in here if run.losses]
        if drawn:
            name = f"results-{workload}"
            bars.draw(name, [(run, cluster, bars.long_list(run, cluster)) for run, cluster in drawn], folder)
            yield from [f"![{workload}: ms a step and seconds to a loss](../figures/{name}.svg)", ""]
        for i, (run, cluster) in enumerate(here):
            yield from [f"### {workload}: {link(cluster)}", "", *table(run, cluster)]
            if all(run is not later for later, _ in here[i + 1 :]):
                yield from details(run)


def elsewhere(runs: Sequence[Run]) -> Iterator[str]:
    """The newest runs of all strategies to losses on another processor than usual."""
    slower = newest(run for run in runs if run.losses and not run.is_usual and run.strategy_count >= EVERY)
    if slower:
        yield from ["## On a slower processor", "", SLOWER, "", *summary(slower)]
        names = dict.fromkeys(slower[at].name for at in in_order(slower))
        yield from ["Summaries: " + ", ".join(f"[{name}]({name}.jsonl)" for name in names) + ".", ""]


def soonest(run: Run, cluster: str, kind: str, loss: float) -> str:
    """Seconds to the loss of the soonest strategy whose name begins with ``kind``; empty where none ran."""
    # Members of several ranks have rows of their own; all of a kind compete for one cell.
    names = [name for name in run.strategies(cluster) if name.partition(":")[0].startswith(kind)]
    at = [bars.to_loss(run, cluster, name, loss) for name in names]
    return seconds(min(at)) if at else ""


def summary(runs: dict[tuple[str, str], Run]) -> Iterator[str]:
    """Seconds to the lowest loss that all reached, a row for each model and link."""
    yield "| | loss | " + " | ".join(SHOWN.values()) + " |"
    yield "| --- |" + " ---: |" * (1 + len(SHOWN))
    for workload, cluster in in_order(runs):
        run = runs[workload, cluster]
        if run.losses and (loss := bars.target(run, cluster)) is not None:
            cells = [soonest(run, cluster, kind, loss) for kind in SHOWN]
            yield f"| {workload}, {link(cluster)} | {loss:g} | " + " | ".join(cells) + " |"
    yield ""


def short(runs: dict[tuple[str, str], Run]) -> Iterator[str]:
    """The short table, and some links in full."""
    yield from summary(runs)
    for workload, cluster in IN_FULL:
        yield from [f"{workload}, {link(cluster)}:", "", *table(runs[workload, cluster], cluster)]


def pages(runs: Sequence[Run], folder: Path = s.FOLDER) -> dict[Path, str]:
    """What each page is to say; figures go into ``folder``."""
    bars.main(folder)
    shown = newest(runs)
    every = with_lines(EVERY_RUN, __file__, [*results(shown, folder), *elsewhere(runs)])
    return {PAGE: with_lines(PAGE, __file__, short(shown)), EVERY_RUN: every}


def main(new: Sequence[str]) -> None:
    """Store what is new, draw, and write the pages."""
    for file in new:
        print(f"stored {store(Path(file))}")
    runs = stored()
    for page, text in pages(runs).items():
        page.write_text(text)
    shown = newest(runs)
    print(
        "\n".join(f"{workload} on {cluster}: {shown[workload, cluster].name}" for workload, cluster in in_order(shown))
    )


if __name__ == "__main__":
    main(sys.argv[1:])

"""Write docs/results.md, and draw its figures, from the stored summaries of runs.

Run: make results
     python docs/figures/results.py bench-results/....jsonl     # stores the summary of a new run first
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import bars
import style as s
from pages import with_lines
from runs import LONGER, Run, label, link, newest, speed, store, stored

from lightning_sparse.monitor.tables import human_bytes

PAGE = Path(__file__).parents[1] / "results.md"
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
TWO_MINUTES = (
    "`sparse_auto` and what was nearest to it above, by turns, to losses that take some two minutes. What chance adds "
    "is in the number of steps: of trainings that average the same gradients it differs by 5 %."
)
SLOWER = (
    "On two cores that took longer over everything, and unevenly, with every strategy. The more of a step is "
    "computing, the less a shorter message saves. The rows of `sparse_auto`, but for `gpt_10m` with 50 ms, are of "
    "before its first steps went by the link; those are below."
)
NEAREST = (
    "On the same two cores, to lower losses: `sparse_auto` as it begins now, and those that were nearest to it above, "
    "in one call each. One run differs from another by some 5 %, and the machine's speed by 10 % from one minute to "
    "the next, so that only those with `--interleave` in their command, which ran by turns, are compared on equal "
    "terms; what chance adds there is in the number of steps. In all of them the exchange of local steps that was "
    "under way at an evaluation did not count, which with 50 ms was some 7 % of their time; now it does. Of plain "
    "sums, [by turns](benchmarks/2026-11-27-short-messages.md) tells more."
)


def machine(run: Run) -> str:
    """What a run was measured with."""
    e = run.environment
    programs = ", ".join(f"{name} {e[name]}" for name in ("torch", "lightning"))
    memory = human_bytes(e["memory_bytes"])
    return f"{run.name[:10]}, {e['cpu']}, {e['cores']} cores, {memory}, {e['system']}, Python {e['python']}, {programs}"


def command(run: Run) -> str:
    """The command, an option a line."""
    return run.environment["command"].partition(" --output")[0].replace(" --", " \\\n    --")


def details(run: Run) -> Iterator[str]:
    """What ran, folded away."""
    rounds = f"{run.round_count} {'round' if run.round_count == 1 else 'rounds'}"
    yield from ["<details><summary>Machine and command</summary>", ""]
    yield f"{machine(run)}; {rounds}. {run.environment['note']}".strip()
    yield from ["", "```text", command(run), "```", "", f"[Summary](benchmarks/{run.name}.jsonl)", "", "</details>", ""]


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
            yield from [f"![{workload}: ms a step and seconds to a loss](figures/{name}.svg)", ""]
        for i, (run, cluster) in enumerate(here):
            yield from [f"### {workload}: {link(cluster)}", "", *table(run, cluster)]
            if all(run is not later for later, _ in here[i + 1 :]):
                yield from details(run)


def elsewhere(runs: Sequence[Run]) -> Iterator[str]:
    """The newest runs to losses of some strategies for longer, and on another processor than usual."""
    slower = [run for run in runs if run.losses and not run.is_usual]
    for title, text, shown in (
        ("For two minutes", TWO_MINUTES, newest(run for run in runs if run.name in LONGER)),
        ("On a slower processor", SLOWER, newest(run for run in slower if run.strategy_count >= EVERY)),
        ("The nearest for longer", NEAREST, newest(run for run in slower if run.strategy_count < EVERY)),
    ):
        if shown:
            yield from [f"## {title}", "", text, ""]
        for workload, cluster in in_order(shown):
            run = shown[workload, cluster]
            yield from [f"### {workload}: {link(cluster)}, {run.environment['cpu']}", "", *table(run, cluster)]
            yield from details(run)


def page(runs: Sequence[Run], folder: Path = s.FOLDER) -> str:
    """What the page is to say; figures go into ``folder``."""
    bars.main(folder)
    return with_lines(PAGE, __file__, [*results(newest(runs), folder), *elsewhere(runs)])


def main(new: Sequence[str]) -> None:
    """Store what is new, draw, and write the page."""
    for file in new:
        print(f"stored {store(Path(file))}")
    runs = stored()
    PAGE.write_text(page(runs))
    shown = newest(runs)
    print(
        "\n".join(f"{workload} on {cluster}: {shown[workload, cluster].name}" for workload, cluster in in_order(shown))
    )


if __name__ == "__main__":
    main(sys.argv[1:])

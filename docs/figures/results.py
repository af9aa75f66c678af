"""Write docs/results.md and docs/benchmarks/runs.md, and draw their figures, from the stored runs.

Run: make results
     python docs/figures/results.py bench-results/....jsonl     # stores a new run first
"""

import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import bars
import style as s
from pages import BENCHMARKS, with_lines
from runs import LONGER, Run, label, link, mean_bytes, newest, speed, store, stored

from lightning_sparse.monitor.tables import human_bytes

DOCS = Path(__file__).parents[1]
LOSSES = 3  # of a table
WORKLOADS = {
    "byte_lm": "a byte language model, 279,168 parameters, AdamW",
    "gpt_3m": "a GPT over bytes, 2.8 million parameters, AdamW",
    "gpt_10m": "a GPT over bytes, 10.9 million parameters, AdamW",
    "mlp_25m": "25.3 million parameters",
    "mlp_1m": "1.1 million parameters",
}
BEST_RATES = "Learning rates are the best of simulated trainings."
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
ONE_RATE = "One learning rate for all, {}."
BEFORE = " `sparse_auto` still measured each of its finalists for 40 steps, and ended no trial of sums early."
BESIDE = " Other programs ran beside it at a low priority."
#: What must be known to read a run.
NOTES = {
    "2026-11-21-050057-mlp_25m": "For Skip-Reduce on 2, 4 and 8 hosts.",
    "2026-11-21-074704-mlp_25m": "Sparse strategies at 1 % in float32, the default then.",
    "2026-11-21-075200-mlp_25m": "Sparse strategies at 1 % in float32, the default then.",
    "2026-11-21-163301-mlp_25m": "Sparse strategies at 1 % in float32, the default then.",
    "2026-11-21-164254-mlp_25m": "Two nodes of two ranks; such groups of hosts are emulated no more. Sparse strategies "
    "at 1 % in float32, the default then.",
    "2026-11-21-192825-mlp_25m": "For memory and the compressor's own time, on a quiet machine. 1 % in float32.",
    "2026-11-22-145844-mlp_1m": "What a step adds to one without a network is 100 ms for each hop after another.",
    "2026-11-25-220915-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-25-230003-byte_lm": BEST_RATES,
    "2026-11-25-230802-byte_lm": BEST_RATES,
    "2026-11-25-231600-byte_lm": BEST_RATES,
    "2026-11-25-235556-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-012810-gpt_3m": ONE_RATE.format("2e-3") + " Tests ran beside it at the lowest priority.",
    "2026-11-26-014934-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-024233-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-080059-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-083258-byte_lm": BEST_RATES,
    "2026-11-26-085414-gpt_3m": ONE_RATE.format("2e-3")
    + " After as many steps the losses of all but the host alone lie within 0.03 of each other, so that chance decides "
    "when 2.4 is reached.",
    "2026-11-26-090246-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-26-140411-gpt_10m": ONE_RATE.format("5e-4") + BESIDE,
    "2026-11-26-142525-gpt_3m": ONE_RATE.format("2e-3") + BESIDE,
    "2026-11-26-144018-gpt_10m": ONE_RATE.format("5e-4") + BESIDE,
    "2026-11-26-150402-gpt_3m": ONE_RATE.format("2e-3") + BESIDE,
    "2026-11-26-151733-gpt_3m": ONE_RATE.format("2e-3") + BESIDE,
    "2026-11-26-153229-gpt_10m": ONE_RATE.format("5e-4")
    + " Tests ran beside its first three rows, those of a host alone, `sparse_auto` and DDP, which took longer for it.",
    "2026-11-26-155046-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-26-204426-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-211148-byte_lm": BEST_RATES,
    "2026-11-26-212040-byte_lm": BEST_RATES,
    "2026-11-26-213017-byte_lm": BEST_RATES,
    "2026-11-26-215304-byte_lm": BEST_RATES,
    "2026-11-26-215932-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-220605-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-221923-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-223422-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-005604-byte_lm": BEST_RATES + BEFORE,
    "2026-11-27-014556-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-015145-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-015646-byte_lm": BEST_RATES + " The machine slowed down while it ran: one rank alone took 47 ms a step "
    "at first and 77 at last. By turns the same step takes 1.02 of plain DDP's (docs/benchmarks/plain_sums.py).",
    "2026-11-27-040631-byte_lm": BEST_RATES,
    "2026-11-27-041255-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-042545-gpt_3m": ONE_RATE.format("2e-3") + BESIDE,
    "2026-11-27-053546-gpt_3m": ONE_RATE.format("2e-3") + " In ten messages; it sends fewer since.",
    "2026-11-27-043120-byte_lm": BEST_RATES + " Plain DDP happened to need fewer steps than in other runs.",
    "2026-11-27-043833-gpt_3m": ONE_RATE.format("2e-3")
    + " `sparse_auto` takes the hook's step, and happened to need more of them for 2.6.",
    "2026-11-27-044358-gpt_3m": ONE_RATE.format("2e-3")
    + " Another program ran for some seconds in the second half of `sparse_auto`'s training, which then took the steps "
    "of the row below it.",
    "2026-11-27-045012-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-045648-byte_lm": BEST_RATES + " The machine was a quarter slower than for its older rows.",
    "2026-11-27-075251-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-075829-byte_lm": BEST_RATES,
    "2026-11-27-080611-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-081116-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-081649-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-082300-gpt_10m": ONE_RATE.format("5e-4")
    + " `sparse_auto` ran while the machine was slower: by turns its step is 0.99 to 1.00 of plain DDP's.",
    "2026-11-27-082748-gpt_3m": ONE_RATE.format("2e-3")
    + " Of `sparse_auto` one step took 5.7 s: from 4 local steps back to sums, to try int4, which seemed 10 % sooner.",
    "2026-11-27-083226-byte_lm": BEST_RATES,
    "2026-11-27-101618-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-102443-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-103341-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-111620-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-112044-byte_lm": BEST_RATES,
    "2026-11-27-112658-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-113336-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-113715-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-121302-gpt_3m": ONE_RATE.format("2e-3")
    + " Here the exchange under way at an evaluation counts. `sparse_auto` took the 4 local steps of the row beside it "
    "after 42 steps; its processes were then 10 % slower over everything, computing included, which is not explained.",
    "2026-11-27-134559-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-134934-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-135333-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-135743-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-140055-byte_lm": BEST_RATES,
    "2026-11-27-141836-byte_lm": BEST_RATES,
    "2026-11-27-143528-byte_lm": BEST_RATES,
    "2026-11-27-144015-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-144618-gpt_10m": ONE_RATE.format("5e-4")
    + " The training is short: what `sparse_auto` is later was lost in its first two steps, of which the first sums "
    "all gradients and the second waits for the link to be measured.",
    "2026-11-27-144846-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-145244-byte_lm": BEST_RATES,
    "2026-11-27-145716-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-150248-byte_lm": BEST_RATES,
    "2026-11-27-151021-byte_lm": BEST_RATES,
    "2026-11-27-151421-gpt_10m": ONE_RATE.format("5e-4")
    + " After 35 steps `sparse_auto` went back from 4 local steps to sums in int4, which was a fault.",
    "2026-11-27-152337-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-26-111941-byte_lm": BEST_RATES,
    "2026-11-26-113916-byte_lm": BEST_RATES,
    "2026-11-26-115213-byte_lm": BEST_RATES,
    "2026-11-26-120503-byte_lm": BEST_RATES,
    "2026-11-27-170614-byte_lm": BEST_RATES,
    "2026-11-27-171647-gpt_10m": ONE_RATE.format("5e-4"),
    "2026-11-27-172114-byte_lm": BEST_RATES,
    "2026-11-27-173306-byte_lm": BEST_RATES,
    "2026-11-27-174503-gpt_3m": ONE_RATE.format("2e-3"),
    "2026-11-27-175019-byte_lm": BEST_RATES,
    "2026-11-27-181529-byte_lm": BEST_RATES,
    "2026-11-27-184250-byte_lm": BEST_RATES,
}


def machine(run: Run) -> str:
    """What a run was measured with."""
    e = run.environment
    programs = ", ".join(f"{name} {e[name]}" for name in ("torch", "lightning"))
    memory = human_bytes(e["memory_bytes"])
    return f"{run.name[:10]}, {e['cpu']}, {e['cores']} cores, {memory}, {e['system']}, Python {e['python']}, {programs}"


def command(run: Run) -> str:
    """The command, an option a line."""
    return run.environment["command"].partition(" --output")[0].replace(" --", " \\\n    --")


def details(run: Run, folder: str = "") -> Iterator[str]:
    """What ran, folded away; the run lies in ``folder``, seen from the page."""
    rounds = max(r.number for r in run.rounds) + 1
    yield from ["<details><summary>Machine and command</summary>", ""]
    yield f"{machine(run)}; {rounds} {'round' if rounds == 1 else 'rounds'}. {NOTES.get(run.name, '')}".strip()
    yield from ["", "```text", command(run), "```", "", f"[Every step]({folder}{run.name}.jsonl)", "", "</details>", ""]


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
        cells = [f"{1e3 * run.step_s(cluster, strategy):.0f}", human_bytes(mean_bytes(run, cluster, strategy))]
        if run.losses:
            cells += [seconds(run.reached[cluster][strategy].to_each[i].seconds) for i in shown]
        else:
            cells.append(f"{row.ratio.value:.2f}" if row.ratio else "1")
        yield f"| {label(strategy)} | " + " | ".join(cells) + " |"
    yield ""


def full_table(run: Run, cluster: str) -> Iterator[str]:
    """A row for each strategy, with its range."""
    if run.losses:
        yield from table(run, cluster)
        return
    yield "| | step, ms | of the first's (middle half) | sent | compress, ms |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for strategy, row in run.summaries[cluster].items():
        ratio = f"{row.ratio.value:.3f} ({row.ratio.low:.2f} to {row.ratio.high:.2f})" if row.ratio else "1"
        compress = "-" if row.ms_compress is None else f"{row.ms_compress:.0f}"
        cells = [f"{1e3 * row.s.value:.0f}", ratio, human_bytes(row.counted_bytes), compress]
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
                yield from details(run, "benchmarks/")


def elsewhere(runs: Sequence[Run]) -> Iterator[str]:
    """The newest runs to losses of some strategies for longer, and on another processor than usual."""
    slower = [run for run in runs if run.losses and not run.is_usual]
    for title, text, shown in (
        ("For two minutes", TWO_MINUTES, newest(run for run in runs if run.name in LONGER)),
        ("On a slower processor", SLOWER, newest(run for run in slower if len(run.rounds) >= EVERY)),
        ("The nearest for longer", NEAREST, newest(run for run in slower if len(run.rounds) < EVERY)),
    ):
        if shown:
            yield from [f"## {title}", "", text, ""]
        for workload, cluster in in_order(shown):
            run = shown[workload, cluster]
            yield from [f"### {workload}: {link(cluster)}, {run.environment['cpu']}", "", *table(run, cluster)]
            yield from details(run, "benchmarks/")


def every_run(runs: Sequence[Run]) -> Iterator[str]:
    """Every stored run, the newest first."""
    for run in sorted(runs, key=lambda run: run.name, reverse=True):
        yield from [f"## {run.name}", ""]
        for cluster in run.clusters:
            yield from [f"{link(cluster)}:", "", *full_table(run, cluster)]
        yield from details(run)


def pages(runs: Sequence[Run], folder: Path = s.FOLDER) -> dict[Path, str]:
    """What both pages are to say; figures go into ``folder``."""
    bars.main(folder)
    shown = [*results(newest(runs), folder), *elsewhere(runs)]
    lines = {DOCS / "results.md": shown, BENCHMARKS / "runs.md": every_run(runs)}
    return {page: with_lines(page, __file__, text) for page, text in lines.items()}


def main(new: Sequence[str]) -> None:
    """Store what is new, draw, and write both pages."""
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

"""Advice: what to expect of every strategy, and which to use.  Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Column, Table

from lightning_sparse.compressors import COMPRESSORS, Auto, Compressor
from lightning_sparse.fusion.model import Plan
from lightning_sparse.fusion.planner import LEAST_SPEEDUP

MOST_UNCERTAINTY = 0.25  # of a step: beyond, something else kept the machines or the network busy
LEAST_UNCERTAINTY = 0.1  # of a step: what repeated runs of the benchmark differ by


@dataclass(frozen=True)
class Advice:
    """The expected step of one strategy."""

    strategy: str  # its name
    step_s: float  # seconds of a step
    low_s: float  # it may be as short as this ...
    high_s: float  # ... or as long
    limit: str  # what the step waits for at its end: "backward", "compression" or "network"
    groups: int  # that LayerFusion would make
    sums: str = ""  # which way sums of which size take


def advice(compressor: Compressor, plan: Plan) -> Advice:
    """Read off a plan for ``compressor`` what it promises."""
    correction = abs(plan.span_s - plan.model.span(plan.ends))  # of the model by the steps as they were
    uncertain = max(correction, LEAST_UNCERTAINTY * plan.step_s)
    return Advice(
        strategy=next((name for name, kind in COMPRESSORS.items() if type(compressor) is kind), repr(compressor)),
        step_s=plan.step_s,
        low_s=max(plan.step_s - uncertain, plan.rest_s),
        high_s=plan.step_s + uncertain,
        limit=_limit(plan),
        groups=len(plan.ends),
        sums=plan.sums,
    )


def _limit(plan: Plan) -> str:
    """Name what is under way between the last gradient and the last mean."""
    last = plan.times[-1]
    after_backward = last.end_s - plan.model.ready_s[-1]
    if after_backward < LEAST_UNCERTAINTY * plan.step_s:
        return "backward"
    busy = sum(time.busy_s for time in plan.times if time.end_s > plan.model.ready_s[-1])
    return "compression" if busy > after_backward / 2 else "network"


def recommend(advices: Sequence[Advice]) -> Advice:
    """Choose, of those hardly slower than the fastest, the first of ``Auto``'s candidates; dense where none gains 5 %.

    Baselines (top-k, random-k) are shown but not recommended.
    """
    ranked = [type(candidate) for candidate in Auto().candidates]
    known = {a.strategy: a for a in advices}
    named = [known[name] for kind in ranked for name, k in COMPRESSORS.items() if k is kind and name in known]
    shortest = min(a.step_s for a in named)
    return next(a for a in named if a.step_s * (1 - LEAST_SPEEDUP) <= shortest)


def table(advices: Sequence[Advice], title: str) -> Table:
    """Show what to expect of each, the fastest first; the recommended one in bold."""
    numbers = (Column(heading, justify="right") for heading in ("step", "between", "of dense", "groups"))
    result = Table("strategy", *numbers, "limited by", title=title, box=box.SIMPLE_HEAD)
    dense = next(a for a in advices if a.strategy == "sparse_dense")
    best = recommend(advices)
    for a in sorted(advices, key=lambda a: a.step_s):
        between = f"{1e3 * a.low_s:.0f}..{1e3 * a.high_s:.0f}"
        of_dense = f"{a.step_s / dense.step_s:.2f}"
        name = f"[bold]{a.strategy}[/bold]" if a is best else a.strategy
        result.add_row(name, f"{1e3 * a.step_s:.0f} ms", between, of_dense, str(a.groups), a.limit)
    return result


_TO_PASTE = """
    import lightning_sparse
    Trainer(strategy='{name}')

or in a config file:

    trainer:
      strategy:
        class_path: lightning_sparse.SparseDDPStrategy
        init_args:
          compressor: {{class_path: lightning_sparse.{kind}}}
          warmup_steps: 100"""


def words(advices: Sequence[Advice]) -> list[str]:
    """Write the recommendation and the configuration to paste; before them, whether to trust what was measured."""
    dense, best = next(a for a in advices if a.strategy == "sparse_dense"), recommend(advices)
    doubt = []
    if best.high_s - best.step_s > MOST_UNCERTAINTY * best.step_s:
        doubt = [
            f"Measured steps differ from each other too much to rely on this: {best.strategy}'s may take "
            f"{1e3 * best.low_s:.0f} to {1e3 * best.high_s:.0f} ms. Ask again when nothing else runs on these "
            "machines.",
            "",
        ]
    if best is dense:
        return [
            *doubt,
            f"Do not compress: no strategy is expected to gain {LEAST_SPEEDUP:.0%} of a dense step of "
            f"{1e3 * dense.step_s:.0f} ms, which is limited by its {dense.limit}. Use plain DDP:",
            "",
            "    Trainer(strategy='ddp')",
        ]
    return [
        *doubt,
        f"Use {best.strategy}: a step of about {1e3 * best.step_s:.0f} ms instead of {1e3 * dense.step_s:.0f} ms "
        f"({dense.step_s / best.step_s:.1f} times faster), limited by its {best.limit}. What is kept back costs "
        "accuracy: compare the validation loss on your own task, with a dense phase first (warmup_steps).",
        *_TO_PASTE.format(name=best.strategy, kind=COMPRESSORS[best.strategy].__name__).split("\n"),
    ]

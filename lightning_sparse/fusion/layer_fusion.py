"""LayerFusion at work: measures the first steps of a training, plans the groups, and plans anew when times change."""

import math
import time
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.groups import Piece, carry_over, cut_apart, make_groups, pieces_of
from lightning_sparse.fusion.model import Plan
from lightning_sparse.fusion.planner import (
    Layout,
    Measured,
    best_plan,
    calibrate,
    choose,
    saved_layout,
    share_allowed,
    with_small_dense,
)
from lightning_sparse.fusion.rehearsal import Costs, NoClock, median_known, median_over_ranks, rehearse_all
from lightning_sparse.settings import as_text, same

SETTLING = 4  # passes (one before each forward) until any is measured: buckets are rebuilt, thresholds settle
BESIDE = 5  # passes measured as they are
APART = 3  # passes measured that send nothing before backward has ended, so that neither slows the other
STEPS_MEASURED = SETTLING + BESIDE + APART
EVERY = 10  # passes from one look at the time to the next once a plan is followed: looking waits for the device
WINDOW = 5  # looks after which LayerFusion checks whether times have changed
LONGEST_WINDOW = 320  # looks, where times have kept changing
CHANGED = 1.5  # factor between two medians from which times have changed
TRIAL = 7  # passes after which new groups must not be slower than the old; the first two do not count
SMALL_BUFFERS = 0.4  # bytes of messages' buffers for each element of the largest group: a tenth of a gradient
WORTH_PLANNING = 2**18  # elements; a smaller gradient is one group

T = TypeVar("T")
Passes = Generator[None, None, T]  # resumed between two steps, once in each pass


class LayerFusion:
    """Groups that follow a measured plan.

    Args:
        exchange: whose groups they are.
        compressor: what averages them.
        parameters: by name, in the order of definition.

    Attributes:
        plan: the plan that is followed, on rank 0; None before there is one.
        plans: the plans of every candidate, on rank 0.
        phase: "measure", "try" or "watch".
    """

    def __init__(self, exchange: Exchange, compressor: Compressor, parameters: Mapping[str, Tensor]) -> None:
        self.plan: Plan | None = None
        self.plans: list[tuple[Compressor, Plan]] = []
        self.phase = "measure"
        self._exchange = exchange
        self._compressor = compressor
        self._parameters = parameters
        self._names = list(reversed(list(parameters)))  # in backward order
        self._dense_up_to = 0  # elements of a group: smaller ones are summed densely
        self._worthwhile = exchange.size > 1 and sum(p.numel() for p in parameters.values()) >= WORTH_PLANNING
        self._seen = exchange.steps
        self._start(compressor.active(exchange.groups[0].step if exchange.groups else 0))

    def between_steps(self) -> None:
        """Look at the last step; do what is due before the next.  To be called before each forward, on every rank."""
        exchange = self._exchange
        if not self._worthwhile or exchange.steps == self._seen:  # gradients are being accumulated
            return
        self._seen = exchange.steps
        at_work = self._compressor.active(exchange.groups[0].step)
        if same(at_work, self._at_work):
            next(self._course)
        else:
            self._start(at_work)

    def measured(self) -> list[GroupTime]:
        """Times of the plan's groups in this rank's last step; none before it was followed.  Waits for the device."""
        if self.plan is None:
            return []
        group_of = self.plan.group_of()
        times: list[list[GroupTime]] = [[] for _ in self.plan.ends]
        for group in self._exchange.groups:
            times[group_of[group.names[-1]]] += self._exchange.timeline.group_times([group])
        return [GroupTime.joined(each) for each in times] if all(times) else []

    def state(self) -> dict[str, Any]:
        """The groups that were planned, and for what; empty before they were."""
        if self.phase == "measure":
            return {}
        return {
            "groups": [list(group.names) for group in self._exchange.groups],
            "compressor": as_text(self._at_work),
            "size": self._exchange.size,
            "dense_up_to": self._dense_up_to,
            "latencies": list(self._exchange.latencies),
        }

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Follow a plan saved after ``step``, if it was made for these parameters, this compressor and these ranks."""
        at_work = self._compressor.active(step)
        chosen = next((c for c in at_work.candidates if as_text(c) == state.get("compressor")), None)
        at_work = chosen or at_work
        layout = saved_layout(state, self._names, at_work, self._exchange.size)
        if layout is not None:
            self._exchange.set_latencies(*state.get("latencies", self._exchange.latencies))
            self._follow(replace(layout, compressor=chosen or self._compressor))
            self._start(at_work, planned=True)
            rank_zero_info(f"LayerFusion: {len(self._exchange.groups)} groups, as in the checkpoint.")

    def regroup(self, groups: Sequence[Sequence[Piece]], compressor: Compressor | None = None) -> None:
        """Average in ``groups`` from now on, with another ``compressor`` if one is given; nothing unsent is lost."""
        exchange, before = self._exchange, self._compressor
        self._compressor = compressor or before
        new = make_groups(self._parameters, self._compressor, groups)
        old = zip(exchange.groups, exchange.compressors, strict=True)
        if [(group.names, as_text(c)) for group, c in old] != [(group.names, as_text(c)) for group, c in new]:
            carry_over(exchange.groups, new, memories=same(before, self._compressor))
            exchange.lay_out(new)

    def _start(self, at_work: Compressor, planned: bool = False) -> None:
        """Begin with the next pass: measure, or only watch if there is a plan."""
        self._at_work = at_work
        self._exchange.deferred = False
        # A generator that held this object strongly would keep all that is unsent until the garbage collector runs.
        self._course = LayerFusion._passes(weakref.proxy(self), planned)
        next(self._course)

    # - the passes of a training: each yield ends one; ``self`` is a weak reference, see `_start`

    def _passes(self, planned: bool) -> Passes[None]:
        window = WINDOW
        while True:
            if not planned:
                yield from LayerFusion._measure_and_plan(self)
            self.phase = "watch"
            yield from LayerFusion._watch(self, window)
            planned, window = False, min(2 * window, LONGEST_WINDOW)  # where times keep changing, ask less often

    def _measure_and_plan(self) -> Passes[None]:
        self.phase = "measure"
        measured = yield from LayerFusion._measure(self)
        decision = self._decide(measured)
        if decision is None:
            return
        layout, then_one_group = decision
        if layout.plan is not None:
            rank_zero_info(f"LayerFusion: {layout.plan}")
            self.plan = layout.plan.rejected()
        span_s = yield from LayerFusion._try(self, layout, measured.span_s)
        if then_one_group and same(self._compressor, layout.compressor):
            plan = self.plan.one_group() if self.plan else None
            one_group = Layout([self._names], self._compressor, self._dense_up_to, plan)
            yield from LayerFusion._try(self, one_group, span_s)

    def _measure(self) -> Passes[Measured]:
        """Look at steps as they are, then at backward alone; return the medians over steps and ranks."""
        exchange, timeline = self._exchange, self._exchange.timeline
        for _ in range(SETTLING):
            yield
        rank_zero_info(f"LayerFusion: measuring {BESIDE + APART} steps, then what messages cost.")
        spans, rests, arrivals = [], [], []
        now_s = time.perf_counter()
        for _ in range(BESIDE):
            before_s, steps = now_s, exchange.steps
            yield
            now_s = time.perf_counter()
            spans.append(timeline.span_s())
            rests.append((now_s - before_s) / (exchange.steps - steps) - spans[-1])
        exchange.deferred = True
        for _ in range(APART):
            yield
            arrivals.append([timeline.arrival_s(self._parameters[name]) for name in self._names])
        exchange.deferred = False
        own = [median_known(each) for each in (spans, rests, *zip(*arrivals, strict=True))]
        span_s, rest_s, *arrivals_s = median_over_ranks(exchange, own).tolist()
        groups = [group.names for group in exchange.groups]
        return Measured(arrivals_s, span_s, rest_s if math.isfinite(rest_s) else 0.0, groups)

    def _try(self, layout: Layout, span_s: float) -> Passes[float]:
        """Change to ``layout``, and back if it is slower than the ``span_s`` there was; return the span there is."""
        exchange = self._exchange
        before = Layout([group.names for group in exchange.groups], self._compressor, self._dense_up_to, self.plan)
        self._follow(layout)
        now = [group.names for group in exchange.groups]
        if now == before.groups and same(layout.compressor, before.compressor):
            return span_s
        self.phase = "try"
        spans = []
        for _ in range(TRIAL):
            yield
            spans.append(exchange.timeline.span_s())
        allowed = share_allowed(before, self._compressor, exchange.groups)
        now_s, allowed = map(float, median_over_ranks(exchange, [median(spans[2:]), allowed]))
        if not now_s > allowed * span_s:  # also where a time is not known
            return now_s
        self._follow(before)
        rank_zero_info(
            f"LayerFusion: back to the groups before: backward and communication took {1e3 * span_s:.1f} ms "
            f"in {len(before.groups)}, {1e3 * now_s:.1f} ms in {len(now)}, which is above {allowed:.0%} of it."
        )
        return span_s

    def _watch(self, window: int) -> Passes[None]:
        """Return when steps take much longer or shorter than in the first ``window``."""
        usual_s = 0.0  # until known
        while True:
            spans = []
            for _ in range(window):
                for _ in range(EVERY):
                    yield
                spans.append(self._exchange.timeline.span_s())
            now_s = float(median_over_ranks(self._exchange, [median(spans)])[0])
            if not usual_s:
                usual_s = now_s if math.isfinite(now_s) else 0.0
            elif abs(math.log(now_s / usual_s)) > math.log(CHANGED):  # False for NaN
                rank_zero_info(
                    f"LayerFusion: backward and communication take {1e3 * now_s:.1f} ms, no longer "
                    f"{1e3 * usual_s:.1f} ms; measuring anew."
                )
                return

    # - planning

    def _decide(self, measured: Measured) -> tuple[Layout, bool] | None:
        """Return what rank 0 decided to try, and whether to try one group after it; None to change nothing."""
        exchange, candidates = self._exchange, self._at_work.candidates
        try:
            if not (math.isfinite(measured.span_s) and np.isfinite(measured.arrivals_s).any()):
                raise NoClock
            costs = rehearse_all(exchange, self._parameters, [self._at_work, *candidates])
        except NoClock:  # on every rank
            rank_zero_warn("LayerFusion: no rank could tell the time; the groups stay as they are.")
            return None
        decision = torch.zeros(4 + len(self._names), dtype=torch.int64, device=exchange.device)
        if exchange.rank == 0:
            try:
                decision.copy_(torch.tensor(self._make_plan(costs, measured)))
            except Exception as error:  # a plan is a gain, not a need; and the others wait for this rank
                rank_zero_warn(f"LayerFusion: no plan could be made; the groups stay as they are. {error!r}")
        decided = exchange.ask(lambda comm: comm.broadcast(decision, 0)).tolist()
        planned, chosen, dense_up_to, then_one_group, *group_of_name = decided
        if not planned:
            return None
        groups: list[list[str]] = [[] for _ in range(max(group_of_name) + 1)]
        for name, index in zip(self._names, group_of_name, strict=True):
            groups[index].append(name)
        compressor = candidates[chosen] if candidates else self._compressor
        plan = self.plans[chosen][1] if exchange.rank == 0 else None
        return Layout([tuple(names) for names in groups], compressor, dense_up_to, plan), bool(then_one_group)

    def _make_plan(self, costs: Sequence[Costs], measured: Measured) -> list[int]:
        """Return 1, the candidate chosen, its ``dense_up_to``, whether to try one group, and each parameter's group."""
        at_work, *costs_of_candidates = costs
        calibration = calibrate(pieces_of(self._parameters, self._at_work), at_work.kinds, measured)
        candidates = self._at_work.candidates or (self._at_work,)
        mixed = [with_small_dense(each.kinds, each.small_dense) for each in costs_of_candidates or [at_work]]
        self.plans = [
            (c, best_plan(pieces_of(self._parameters, c), kinds, measured, calibration, self._exchange.ways_of_sums))
            for c, (kinds, _) in zip(candidates, mixed, strict=True)
        ]
        chosen = choose([plan for _, plan in self.plans])
        plan, group_of = self.plans[chosen][1], self.plans[chosen][1].group_of()
        then_one_group = plan.one_group() is not None and self._buffers_are_small()
        return [1, chosen, mixed[chosen][1], then_one_group, *(group_of[name] for name in self._names)]

    def _buffers_are_small(self) -> bool:
        """Whether larger groups would hardly take more memory."""
        held_bytes = max(self._exchange.on_lanes(lambda lane: lane.comm.buffer_bytes))
        return held_bytes <= SMALL_BUFFERS * max(2**20, *(group.n for group in self._exchange.groups))

    def _follow(self, layout: Layout) -> None:
        pieces = {piece.name: piece for piece in pieces_of(self._parameters, layout.compressor)}
        groups = [[pieces[name] for name in names] for names in layout.groups]
        self.regroup(cut_apart(groups, layout.dense_up_to), layout.compressor)
        self._dense_up_to, self.plan = layout.dense_up_to, layout.plan
        self._at_work = layout.compressor.active(self._exchange.groups[0].step)

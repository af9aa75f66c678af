"""LayerFusion at work: measures the first steps of a training, plans the groups, and plans anew when times change."""

import math
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.compressors import Candidate, Compressor, Dense
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.groups import Piece, carry_over, cut_apart, make_groups, pieces_of
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.chooser import Chooser
from lightning_sparse.fusion.decision import decide
from lightning_sparse.fusion.measuring import Passes, measure
from lightning_sparse.fusion.model import Plan
from lightning_sparse.fusion.planner import Layout, Measured, saved_layout, share_allowed
from lightning_sparse.fusion.rehearsal import Link, NoClock, measure_link, median_over_ranks
from lightning_sparse.settings import as_text, same

EVERY = 10  # passes from one look at the time to the next once a plan is followed: looking waits for the device
WINDOW = 5  # looks after which LayerFusion checks whether times have changed
LONGEST_WINDOW = 320  # looks, where times have kept changing
CHANGED = 1.5  # factor between two medians from which times have changed
TRIAL = 7  # passes after which new groups must not be slower than the old; the first two do not count
WORTH_PLANNING = 2**18  # elements; a smaller gradient is one group


class LayerFusion:
    """Groups that follow a measured plan.

    Args:
        exchange: whose groups they are.
        compressor: what averages them.
        parameters: by name, in the order of definition.
        chooser: of another compressor after the first steps, if one is to be chosen.

    Attributes:
        plan: the plan that is followed, on rank 0; None before there is one.
        chooser: of the compressor, where one is to be chosen.
        chosen: the candidate that it chose last.  Local steps are for others to begin, once nothing is unsent.
        phase: "measure", "try" or "watch".
    """

    def __init__(
        self,
        exchange: Exchange,
        compressor: Compressor,
        parameters: Mapping[str, Tensor],
        chooser: Chooser | None = None,
    ) -> None:
        self.plan: Plan | None = None
        self.chooser = chooser
        self.chosen: Candidate | None = None
        self.phase = "measure"
        self._known: tuple[Measured, Link] | None = None  # of steps that need not be measured
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
            "chosen": str(self.chosen or ""),
        }

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Follow a plan saved after ``step``, if it was made for these parameters, this compressor and these ranks."""
        at_work = self._compressor.active(step)
        chosen = self.chooser.candidate(state.get("chosen", "")) if self.chooser else None
        at_work = chosen.averaging if chosen else at_work
        layout = saved_layout(state, self._names, at_work, self._exchange.size)
        if layout is not None:
            self._exchange.set_latencies(*state.get("latencies", self._exchange.latencies))
            self._follow(replace(layout, compressor=at_work if chosen else self._compressor))
            self.chosen = chosen
            self._start(at_work, planned=True)
            rank_zero_info(f"LayerFusion: {len(self._exchange.groups)} groups, as in the checkpoint.")

    def go_on_with(self, chosen: Candidate, measured: tuple[Measured, Link]) -> None:
        """Plan for ``chosen`` from what was measured before.  To be called on every rank, between two steps."""
        self.chosen, self._known = chosen, measured
        self._start(self._at_work)

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
        self._exchange.deferred, self._exchange.record = False, None
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
        known, self._known = self._known, None
        chooser = self.chooser if self._is_to_choose else None
        measured = known[0] if known else (yield from measure(self._exchange, self._parameters, self._names, chooser))
        try:
            if not (math.isfinite(measured.span_s) and np.isfinite(measured.arrivals_s).any()):
                raise NoClock
            link = known[1] if known else measure_link(self._exchange)
            if chooser:
                self.chosen = self.chosen if known else chooser.choose(self._exchange, measured, link, self._at_work)
                settled = yield from LayerFusion._try_chosen(self, measured, link)
            else:
                settled = yield from LayerFusion._try_plan(self, measured, link)
        except NoClock:  # on every rank
            rank_zero_warn("LayerFusion: no rank could tell the time; the groups stay as they are.")
            return
        if settled is not None:  # and one group may be better
            plan = self.plan.one_group() if self.plan else None
            one_group = Layout([self._names], self._compressor, self._dense_up_to, plan)
            yield from LayerFusion._try(self, one_group, settled)

    def _try_plan(self, measured: Measured, link: Link) -> Passes[float | None]:
        """Try the best groups; return the span there is if one group is to be tried too."""
        decision = self._decide(measured, link, self._compressor)
        if decision is None:
            return None
        layout, then_one_group = self._announced(decision)
        span_s = yield from LayerFusion._try(self, layout, measured.span_s)
        return span_s if then_one_group and same(self._compressor, layout.compressor) else None

    def _try_chosen(self, measured: Measured, link: Link) -> Passes[float | None]:
        """Follow the choice, and others while steps show that they are better; likewise."""
        while True:
            assert self.chosen is not None
            assert self.chooser is not None
            if self.chosen.local_steps:  # before which everything is sent
                self._follow(Layout([group.names for group in self._exchange.groups], Dense(), 0))
                return None
            decision = self._decide(measured, link, self.chosen.averaging)
            if decision is None:
                return None
            layout, then_one_group = self._announced(decision)
            span_s = yield from LayerFusion._span_in(self, layout)
            again = self.chooser.note(self._exchange, measured.rest_s + (span_s or measured.span_s))
            if again == self.chosen:
                return span_s if then_one_group and span_s else None
            self.chosen = again

    def _announced(self, decision: tuple[Layout, bool]) -> tuple[Layout, bool]:
        plan = decision[0].plan
        if plan is not None:
            rank_zero_info(f"LayerFusion: {plan.in_short}")
            self.plan = plan.rejected()
        return decision

    def _span_in(self, layout: Layout) -> Passes[float]:
        """Change to ``layout`` and return the span of this rank's steps; 0 if it is what there was."""
        exchange = self._exchange
        groups, compressor = [group.names for group in exchange.groups], self._compressor
        self._follow(layout)
        if [group.names for group in exchange.groups] == groups and same(layout.compressor, compressor):
            return 0.0
        self.phase = "try"
        spans = []
        for _ in range(TRIAL):
            yield
            spans.append(exchange.timeline.span_s())
        return float(median_over_ranks(exchange, [median(spans[2:])])[0])

    def _try(self, layout: Layout, span_s: float) -> Passes[float]:
        """Change to ``layout``, and back if it is slower than the ``span_s`` there was; return the span there is."""
        exchange = self._exchange
        before = Layout([group.names for group in exchange.groups], self._compressor, self._dense_up_to, self.plan)
        now_s = yield from LayerFusion._span_in(self, layout)
        if not now_s:
            return span_s
        allowed = share_allowed(before, self._compressor, exchange.groups)
        allowed = float(median_over_ranks(exchange, [allowed])[0])
        if not now_s > allowed * span_s:  # also where a time is not known
            return now_s
        tried = exchange.groups
        self._follow(before)
        rank_zero_info(
            f"LayerFusion: back to the groups before: backward and communication took {1e3 * span_s:.1f} ms "
            f"in {len(before.groups)}, {1e3 * now_s:.1f} ms in {len(tried)}, which is above {allowed:.0%} of it."
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

    @property
    def _is_to_choose(self) -> bool:
        """Whether a compressor is to be chosen, once steps have been measured: not in a phase of warm-up."""
        return self.chooser is not None and (bool(self._at_work.candidates) or self.chosen is not None)

    def _decide(self, measured: Measured, link: Link, compressor: Compressor) -> tuple[Layout, bool] | None:
        groups = [group.names for group in self._exchange.groups]
        if self._exchange.sums_in_place(compressor) or (self.chosen and len(groups) == 1):  # too short to gain by cuts
            return Layout(groups, compressor, 0), False
        return decide(self._exchange, self._parameters, self._names, measured, link, self._at_work, compressor)

    def _follow(self, layout: Layout) -> None:
        pieces = {piece.name: piece for piece in pieces_of(self._parameters, layout.compressor)}
        groups = [[pieces[name] for name in names] for names in layout.groups]
        self.regroup(cut_apart(groups, layout.dense_up_to), layout.compressor)
        self._dense_up_to, self.plan = layout.dense_up_to, layout.plan
        self._at_work = layout.compressor.active(self._exchange.groups[0].step)

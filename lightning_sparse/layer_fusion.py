"""LayerFusion at work: measures the first steps of a training, plans the groups, and plans anew when times change."""

import math
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.compressors import Auto, Compressor
from lightning_sparse.exchange import Exchange
from lightning_sparse.fusion import Piece, carry_over, cut_apart, make_groups, pieces_of
from lightning_sparse.plan import Cost, GroupTime, Plan
from lightning_sparse.planner import Kinds, Measured, best_plan, calibrate, choose, kinds_of, with_small_dense
from lightning_sparse.rehearsal import measure_link, median_over_ranks, rehearse

SETTLING = 4  # steps before any is measured: DDP rebuilds its buckets, memory is taken, thresholds settle
BESIDE = 5  # steps measured as they are
APART = 3  # steps measured that send nothing before backward has ended, so that neither slows the other
STEPS_MEASURED = SETTLING + BESIDE + APART
EVERY = 10  # of how many steps one is looked at once a plan is followed: looking waits for the device
WINDOW = 5  # steps looked at, after which it is asked whether times have changed
CHANGED = 1.5  # they have when the median moved by this factor
TRIAL = 7  # steps after which new groups must not be slower than the old; the first two do not count
SMALL = 2**16  # elements at most of groups that are summed densely where that is sooner
WORTH_PLANNING = 2**18  # elements; a smaller gradient is one group


class LayerFusion:
    """Groups that follow a measured plan.

    Args:
        exchange: whose groups they are.
        compressor: what averages them.
        parameters: by name, in the order of definition.
    """

    def __init__(self, exchange: Exchange, compressor: Compressor, parameters: Mapping[str, Tensor]) -> None:
        self.plan: Plan | None = None  # on rank 0
        self.plans: list[tuple[Compressor, Plan]] = []  # of every candidate, on rank 0
        self._exchange = exchange
        self._compressor = compressor
        self._parameters = parameters
        self._pieces = pieces_of(parameters, compressor)
        self._laid_out_for = repr(compressor)
        self._dense_up_to = 0  # elements of a group: smaller ones are summed densely
        self._worthwhile = exchange.size > 1 and sum(piece.elements for piece in self._pieces) >= WORTH_PLANNING
        self._seen = exchange.steps
        self._window = WINDOW
        self._start()

    def between_steps(self) -> None:
        """Look at the step just taken, and do what is due before the next.  To be called on every rank."""
        exchange = self._exchange
        if not self._worthwhile:
            return
        if exchange.steps == self._seen:  # gradients are being accumulated
            return
        now = time.perf_counter()
        self._note(now)
        self._seen, self._last_s = exchange.steps, now
        at_work = self._compressor.at(exchange.groups[0].step)
        if at_work != self._at_work:
            self._start()
        elif self._measuring:
            self._go_on_measuring(at_work)
        elif self._on_trial and len(self._spans) == TRIAL:
            self._end_trial()
        elif len(self._spans) >= self._window:
            self._compare()

    def measured(self) -> list[GroupTime]:
        """Of the plan's groups in this rank's last step; none before it was followed.  Waits for the device."""
        if self.plan is None:
            return []
        exchange = self._exchange
        place = dict(zip(self.plan.names, self.plan.group_of(), strict=True))
        times: dict[int, list[GroupTime]] = {}
        for group in exchange.groups:
            for time_ in exchange.timeline.group_times([group]):
                times.setdefault(place[group.names[-1]], []).append(time_)
        if len(times) < len(self.plan.ends):
            return []
        return [GroupTime.joined(times[i]) for i in range(len(self.plan.ends))]

    # - checkpoints

    def state(self) -> dict[str, Any]:
        """The groups that were planned, and for what; empty before they were."""
        if self._measuring:
            return {}
        names = [list(group.names) for group in self._exchange.groups]
        return {
            "groups": names,
            "compressor": repr(self._at_work),
            "size": self._exchange.size,
            "dense_up_to": self._dense_up_to,
        }

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Follow a plan saved after ``step``, if it was made for these parameters, this compressor and these ranks."""
        at_work = self._compressor.at(step)
        groups = state.get("groups", [])
        if isinstance(at_work, Auto):  # and what it had chosen
            at_work = next((c for c in at_work.candidates if repr(c) == state.get("compressor")), at_work)
        pieces = {piece.name: piece for piece in pieces_of(self._parameters, at_work)}
        dense_up_to = state.get("dense_up_to", 0)
        if (
            (state.get("compressor"), state.get("size")) != (repr(at_work), self._exchange.size)
            or sorted(name for names in groups for name in names) != sorted(pieces)
            or not isinstance(dense_up_to, int)
        ):
            return
        planned = cut_apart([[pieces[name] for name in names] for names in groups], dense_up_to)
        if len(planned) > len(groups):
            return
        if isinstance(self._compressor.at(step), Auto):
            self._compressor, self._pieces = at_work, list(pieces.values())
        self.regroup(planned)
        self._at_work, self._dense_up_to = at_work, dense_up_to
        self._measuring = False
        rank_zero_info(f"LayerFusion: {len(groups)} groups, as in the checkpoint.")

    # - measuring

    def _start(self) -> None:
        """Measure from the next step on."""
        self._measuring = True
        self._at_work = self._compressor.at(self._exchange.groups[0].step if self._exchange.groups else 0)
        self._since = self._exchange.steps
        self._exchange.deferred = False
        self._on_trial: tuple[list[tuple[str, ...]], Compressor, float] | None = None  # before the plan, and its span
        self._usual_s = 0.0  # span of steps after the plan was made; 0 until known
        self._last_s = math.nan
        self._rests: list[float] = []
        self._spans: list[float] = []
        self._arrivals: list[list[float]] = []  # of each piece

    def _note(self, now: float) -> None:
        step = self._exchange.steps - self._since
        timeline = self._exchange.timeline
        if not self._measuring:
            if not self._on_trial and self._exchange.steps % EVERY:
                return
            self._spans.append(timeline.span_s())
        elif SETTLING < step <= SETTLING + BESIDE:
            self._spans.append(timeline.span_s())
            self._rests.append(now - self._last_s - self._spans[-1])
        elif step > SETTLING + BESIDE:
            self._arrivals.append([timeline.arrival_s(self._parameters[piece.name]) for piece in self._pieces])

    def _go_on_measuring(self, at_work: Compressor) -> None:
        step = self._exchange.steps - self._since
        if step == SETTLING:
            rank_zero_info(f"LayerFusion: measuring {BESIDE + APART} steps, then what messages cost.")
        self._exchange.deferred = SETTLING + BESIDE <= step < STEPS_MEASURED
        if step == STEPS_MEASURED:
            self._make_plan(at_work)
            self._measuring = False
            self._spans = []
            if self.plan is not None:
                rank_zero_info(f"LayerFusion: {self.plan}")

    def _make_plan(self, at_work: Compressor) -> None:
        exchange = self._exchange
        candidates = at_work.candidates if isinstance(at_work, Auto) else (at_work,)
        start = at_work.start if isinstance(at_work, Auto) else at_work
        own = [_median(each) for each in (self._spans, self._rests, *zip(*self._arrivals, strict=True))]
        span_s, rest_s, *arrivals_s = median_over_ranks(exchange, own).tolist()
        kinds = self._rehearse([start, *candidates])
        # Rank 0 decides: which candidate, which groups are dense, and the group of each parameter; -1 for all as it is.
        decision = torch.full((2 + len(self._pieces),), -1, dtype=torch.int64, device=exchange.device)
        if exchange.rank == 0:
            try:
                rest_s = rest_s if math.isfinite(rest_s) else 0.0
                measured = Measured(arrivals_s, span_s, rest_s, [group.names for group in exchange.groups])
                decision.copy_(torch.tensor(self._decide(start, candidates, kinds, measured)))
            except Exception as error:  # a plan is a gain, not a need; and the others wait for this rank
                rank_zero_warn(f"LayerFusion: no plan could be made; the groups stay as they are. {error!r}")
        chosen, dense_up_to, *group_of_piece = exchange.ask(lambda comm: comm.broadcast(decision, 0)).tolist()
        if chosen >= 0:
            self._dense_up_to = dense_up_to
            self._follow(candidates[chosen] if isinstance(at_work, Auto) else None, group_of_piece, span_s)

    def _decide(
        self,
        start: Compressor,
        candidates: Sequence[Compressor],
        kinds: Sequence[tuple[Kinds, Cost]],
        measured: Measured,
    ) -> list[int]:
        """Which candidate, up to how many elements groups are dense, the group of each piece; -1 for all as it is."""
        if not (kinds and math.isfinite(measured.span_s) and np.isfinite(measured.arrivals_s).any()):
            rank_zero_warn("LayerFusion: no rank could tell the time; the groups stay as they are.")
            return [-1] * (2 + len(self._pieces))
        calibration = calibrate(pieces_of(self._parameters, start), kinds[0][0], measured)
        mixed = [with_small_dense(*each) for each in kinds[1:]]
        self.plans = [
            (c, best_plan(pieces_of(self._parameters, c), own_kinds, measured, calibration))
            for c, (own_kinds, _) in zip(candidates, mixed, strict=True)
        ]
        chosen = choose([plan for _, plan in self.plans])
        self.plan = self.plans[chosen][1]
        group_of = dict(zip(self.plan.names, self.plan.group_of(), strict=True))
        return [chosen, mixed[chosen][1], *(group_of[piece.name] for piece in self._pieces)]

    def _rehearse(self, compressors: Sequence[Compressor]) -> list[tuple[Kinds, Cost]]:
        """What each costs here, its dense part, and small dense groups; nothing if no rank could tell the time."""
        link = measure_link(self._exchange)
        if link is None:
            return []
        found: list[tuple[Kinds, Cost]] = []
        dense: dict[str, Cost | None] = {}  # most compressors have the same in their place
        for number, compressor in enumerate(compressors):
            if compressor in compressors[:number]:
                found.append(found[compressors.index(compressor)])
                continue
            if len(compressors) > 2:
                rank_zero_info(f"LayerFusion: measuring {compressor}.")
            kinds = kinds_of(
                pieces_of(self._parameters, compressor), compressor, lambda c, n: rehearse(self._exchange, c, n, link)
            )
            densely = compressor.densely()
            if repr(densely) not in dense:
                dense[repr(densely)] = rehearse(self._exchange, densely, SMALL, link)
            small = dense[repr(densely)]
            if kinds is None or small is None:
                return []
            found.append((kinds, small))
        return found

    def _follow(self, chosen: Compressor | None, group_of_piece: Sequence[int], span_s: float) -> None:
        """Change to the groups of a plan, on trial; and to a compressor if one was chosen."""
        before = [group.names for group in self._exchange.groups], self._compressor
        if chosen is not None:
            self._compressor, self._at_work = chosen, chosen
            self._pieces = pieces_of(self._parameters, chosen)
        groups: list[list[Piece]] = [[] for _ in range(max(group_of_piece, default=-1) + 1)]
        for piece, index in zip(self._pieces, group_of_piece, strict=True):
            groups[index].append(piece)
        self.regroup(cut_apart(groups, self._dense_up_to))
        if before != ([group.names for group in self._exchange.groups], self._compressor):
            self._on_trial = (*before, span_s)

    def _end_trial(self) -> None:
        """Go back to what there was before the plan if that was faster."""
        assert self._on_trial is not None
        before, compressor, before_s = self._on_trial
        now_s = float(median_over_ranks(self._exchange, [median(self._spans[2:])])[0])
        self._on_trial, self._spans = None, []
        if now_s > before_s:
            rank_zero_info(
                f"LayerFusion: back to what there was before: backward and communication took {1e3 * before_s:.1f} ms "
                f"and take {1e3 * now_s:.1f} ms with the plan."
            )
            self._compressor, self._dense_up_to = compressor, 0
            self._at_work = compressor.at(self._exchange.groups[0].step)
            self._pieces = pieces_of(self._parameters, compressor)
            pieces = {piece.name: piece for piece in self._pieces}
            self.regroup([[pieces[name] for name in names] for names in before])
            if self.plan is not None:
                self.plan = self.plan.rejected()

    def regroup(self, groups: Sequence[Sequence[Piece]]) -> None:
        """Average in ``groups`` from now on; nothing that is unsent is lost."""
        exchange = self._exchange
        new = make_groups(self._parameters, self._compressor, groups)
        same = repr(self._compressor) == self._laid_out_for
        was = zip(exchange.groups, exchange.compressors, strict=True)
        if [(group.names, repr(c)) for group, c in was] != [(group.names, repr(c)) for group, c in new]:
            carry_over(exchange.groups, new, memories=same)
            exchange.lay_out(new)
            self._laid_out_for = repr(self._compressor)

    # - after the plan was made

    def _compare(self) -> None:
        """Measure anew if steps take much longer or shorter than after the plan was made."""
        usual_s = float(median_over_ranks(self._exchange, [median(self._spans)])[0])
        self._spans = []
        if not self._usual_s:
            self._usual_s = usual_s if math.isfinite(usual_s) else 0.0
        elif abs(math.log(usual_s / self._usual_s)) > math.log(CHANGED):  # False for NaN
            rank_zero_info(
                f"LayerFusion: backward and communication take {1e3 * usual_s:.1f} ms, no longer "
                f"{1e3 * self._usual_s:.1f} ms; measuring anew."
            )
            self._window *= 2  # where times keep changing, ask less often
            self._start()


def _median(seconds: Sequence[float]) -> float:
    """Of those that are known; NaN if none is."""
    known = [s for s in seconds if math.isfinite(s)]
    return median(known) if known else math.nan

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
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.groups import Piece, carry_over, cut_apart, make_groups, pieces_of
from lightning_sparse.fusion.model import Cost, Plan
from lightning_sparse.fusion.planner import (
    Before,
    Kinds,
    Measured,
    best_plan,
    calibrate,
    choose,
    saved_groups,
    with_small_dense,
)
from lightning_sparse.fusion.rehearsal import median_known, median_over_ranks, rehearse_all
from lightning_sparse.settings import as_text, same

SETTLING = 4  # passes (one before each forward) until any is measured: buckets are rebuilt, thresholds settle
BESIDE = 5  # passes measured as they are
APART = 3  # passes measured that send nothing before backward has ended, so that neither slows the other
STEPS_MEASURED = SETTLING + BESIDE + APART
EVERY = 10  # of how many passes one is looked at once a plan is followed: looking waits for the device
WINDOW = 5  # passes looked at, after which it is asked whether times have changed
LONGEST_WINDOW = 320  # the same, where times have kept changing
CHANGED = 1.5  # they have when the median moved by this factor
TRIAL = 7  # passes after which new groups must not be slower than the old; the first two do not count
SMALL_BUFFERS = 0.4  # bytes for each element of the largest group, that messages' buffers take: a tenth of a gradient
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
        self._laid_out_for = as_text(compressor)
        self._dense_up_to = 0  # elements of a group: smaller ones are summed densely
        self._worthwhile = exchange.size > 1 and sum(piece.elements for piece in self._pieces) >= WORTH_PLANNING
        self._seen = exchange.steps
        self._window = WINDOW
        self._start()

    def between_steps(self) -> None:
        """Look at the last step; do what is due before the next.  To be called before each forward, on every rank."""
        exchange = self._exchange
        if not self._worthwhile or exchange.steps == self._seen:  # gradients are being accumulated
            return
        self._passes += 1
        self._note(now := time.perf_counter())
        self._seen, self._last_s = exchange.steps, now
        at_work = self._compressor.active(exchange.groups[0].step)
        if not same(at_work, self._at_work):
            self._start()
        elif self._measuring:
            self._go_on_measuring(at_work)
        elif self._on_trial:
            if len(self._spans) >= TRIAL:
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
        return {
            "groups": [list(group.names) for group in self._exchange.groups],
            "compressor": as_text(self._at_work),
            "size": self._exchange.size,
            "dense_up_to": self._dense_up_to,
        }

    def resume(self, state: Mapping[str, Any], step: int) -> None:
        """Follow a plan saved after ``step``, if it was made for these parameters, this compressor and these ranks."""
        at_work = self._compressor.active(step)
        if isinstance(at_work, Auto):  # and what it had chosen
            at_work = next((c for c in at_work.candidates if as_text(c) == state.get("compressor")), at_work)
        pieces = pieces_of(self._parameters, at_work)
        planned = saved_groups(state, pieces, at_work, self._exchange.size)
        if planned is None:
            return
        if isinstance(self._compressor.active(step), Auto):
            self._compressor, self._pieces = at_work, pieces
        self.regroup(planned)
        self._at_work, self._dense_up_to = at_work, state.get("dense_up_to", 0)
        self._measuring = False
        rank_zero_info(f"LayerFusion: {len(planned)} groups, as in the checkpoint.")

    # - measuring

    def _start(self) -> None:
        """Measure from the next pass on."""
        self._measuring = True
        self._at_work = self._compressor.active(self._exchange.groups[0].step if self._exchange.groups else 0)
        self._passes = 0  # since then
        self._exchange.deferred = False
        self._on_trial: Before | None = None
        self._try_one_group = False
        self._usual_s = 0.0  # span of steps after the plan was made; 0 until known
        self._last_s = math.nan
        self._rests: list[float] = []
        self._spans: list[float] = []
        self._arrivals: list[list[float]] = []  # of each piece

    def _note(self, now: float) -> None:
        timeline = self._exchange.timeline
        if not self._measuring:
            if not self._on_trial and self._passes % EVERY:
                return
            self._spans.append(timeline.span_s())
        elif SETTLING < self._passes <= SETTLING + BESIDE:
            self._spans.append(timeline.span_s())
            self._rests.append((now - self._last_s) / (self._exchange.steps - self._seen) - self._spans[-1])
        elif self._passes > SETTLING + BESIDE:
            self._arrivals.append([timeline.arrival_s(self._parameters[piece.name]) for piece in self._pieces])

    def _go_on_measuring(self, at_work: Compressor) -> None:
        if self._passes == SETTLING:
            rank_zero_info(f"LayerFusion: measuring {BESIDE + APART} steps, then what messages cost.")
        self._exchange.deferred = SETTLING + BESIDE <= self._passes < STEPS_MEASURED
        if self._passes == STEPS_MEASURED:
            self._make_plan(at_work)
            self._measuring = False
            self._spans = []
            if self.plan is not None:
                rank_zero_info(f"LayerFusion: {self.plan}")

    def _make_plan(self, at_work: Compressor) -> None:
        exchange = self._exchange
        candidates = at_work.candidates if isinstance(at_work, Auto) else (at_work,)
        start = at_work.start if isinstance(at_work, Auto) else at_work
        own = [median_known(each) for each in (self._spans, self._rests, *zip(*self._arrivals, strict=True))]
        span_s, rest_s, *arrivals_s = median_over_ranks(exchange, own).tolist()
        kinds = rehearse_all(exchange, self._parameters, [start, *candidates])
        # Rank 0 decides, and tells the others; see `_decide`.
        decision = torch.full((3 + len(self._pieces),), -1, dtype=torch.int64, device=exchange.device)
        if exchange.rank == 0:
            try:
                rest_s = rest_s if math.isfinite(rest_s) else 0.0
                measured = Measured(arrivals_s, span_s, rest_s, [group.names for group in exchange.groups])
                decision.copy_(torch.tensor(self._decide(start, candidates, kinds, measured)))
            except Exception as error:  # a plan is a gain, not a need; and the others wait for this rank
                rank_zero_warn(f"LayerFusion: no plan could be made; the groups stay as they are. {error!r}")
        decided = exchange.ask(lambda comm: comm.broadcast(decision, 0)).tolist()
        chosen, dense_up_to, try_one_group, *group_of_piece = decided
        if chosen >= 0:
            self._try_one_group = bool(try_one_group)
            compressor = candidates[chosen] if isinstance(at_work, Auto) else self._compressor
            otherwise = self.plan.rejected() if self.plan else None
            self._follow(compressor, group_of_piece, dense_up_to, span_s, otherwise)
            if not self._on_trial:
                self._follow_one_group(span_s)

    def _decide(
        self,
        start: Compressor,
        candidates: Sequence[Compressor],
        kinds: Sequence[tuple[Kinds, Cost]],
        measured: Measured,
    ) -> list[int]:
        """Which candidate, up to how many elements groups are dense, whether to try one group, the group of each piece.

        -1 for all as it is.
        """
        if not (kinds and math.isfinite(measured.span_s) and np.isfinite(measured.arrivals_s).any()):
            rank_zero_warn("LayerFusion: no rank could tell the time; the groups stay as they are.")
            return [-1] * (3 + len(self._pieces))
        calibration = calibrate(pieces_of(self._parameters, start), kinds[0][0], measured)
        mixed = [with_small_dense(*each) for each in kinds[1:]]
        self.plans = [
            (c, best_plan(pieces_of(self._parameters, c), own_kinds, measured, calibration))
            for c, (own_kinds, _) in zip(candidates, mixed, strict=True)
        ]
        chosen = choose([plan for _, plan in self.plans])
        self.plan = self.plans[chosen][1]
        group_of = dict(zip(self.plan.names, self.plan.group_of(), strict=True))
        try_one_group = self.plan.one_group() is not None and self._buffers_are_small()
        return [chosen, mixed[chosen][1], try_one_group, *(group_of[piece.name] for piece in self._pieces)]

    def _buffers_are_small(self) -> bool:
        """Whether larger groups would hardly take more memory."""
        held_bytes = max(self._exchange.on_lanes(lambda lane: lane.comm.buffer_bytes))
        return held_bytes <= SMALL_BUFFERS * max(2**20, *(group.n for group in self._exchange.groups))

    def _follow(
        self,
        compressor: Compressor,
        group_of_piece: Sequence[int],
        dense_up_to: int,
        span_s: float,
        otherwise: Plan | None,
    ) -> None:
        """Change to the groups of a plan, and to a compressor, on trial: those there are took ``span_s``."""
        names = [group.names for group in self._exchange.groups]
        before = Before(names, self._compressor, self._dense_up_to, span_s, otherwise)
        if not same(compressor, self._compressor):
            self._compressor, self._at_work = compressor, compressor
            self._pieces = pieces_of(self._parameters, compressor)
        groups: list[list[Piece]] = [[] for _ in range(max(group_of_piece, default=-1) + 1)]
        for piece, index in zip(self._pieces, group_of_piece, strict=True):
            groups[index].append(piece)
        self._dense_up_to = dense_up_to
        self.regroup(cut_apart(groups, dense_up_to))
        if names != [group.names for group in self._exchange.groups] or not same(before.compressor, self._compressor):
            self._on_trial = before

    def _follow_one_group(self, span_s: float) -> None:
        """The same with one group, if that is to be tried."""
        if self._try_one_group:
            before, self._try_one_group = self.plan, False
            self.plan = before.one_group() if before else None
            self._follow(self._compressor, [0] * len(self._pieces), self._dense_up_to, span_s, before)

    def _end_trial(self) -> None:
        """Go back to what there was before if that was faster; then try one group if the model cannot tell."""
        assert self._on_trial is not None
        before, now = self._on_trial, len(self._exchange.groups)
        allowed = before.allowed(self._exchange.groups, self._compressor)
        now_s, allowed = median_over_ranks(self._exchange, [median(self._spans[2:]), allowed]).tolist()
        self._on_trial, self._spans = None, []
        if goes_back := now_s > allowed * before.span_s:
            self._try_one_group &= same(self._compressor, before.compressor)  # else the pieces are others
            self._compressor, self._dense_up_to, self.plan = before.compressor, before.dense_up_to, before.plan
            self._at_work = self._compressor.active(self._exchange.groups[0].step)
            self._pieces = pieces_of(self._parameters, self._compressor)
            pieces = {piece.name: piece for piece in self._pieces}
            self.regroup([[pieces[name] for name in names] for names in before.groups])
            rank_zero_info(
                f"LayerFusion: back to the groups before: backward and communication took {1e3 * before.span_s:.1f} ms "
                f"in {len(before.groups)}, {1e3 * now_s:.1f} ms in {now}, which is above {allowed:.0%} of it."
            )
        self._follow_one_group(before.span_s if goes_back else now_s)

    def regroup(self, groups: Sequence[Sequence[Piece]]) -> None:
        """Average in ``groups`` from now on; nothing that is unsent is lost."""
        exchange = self._exchange
        new = make_groups(self._parameters, self._compressor, groups)
        text = as_text(self._compressor)
        was = zip(exchange.groups, exchange.compressors, strict=True)
        if [(group.names, as_text(c)) for group, c in was] != [(group.names, as_text(c)) for group, c in new]:
            carry_over(exchange.groups, new, memories=text == self._laid_out_for)
            exchange.lay_out(new)
            self._laid_out_for = text

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
            self._window = min(2 * self._window, LONGEST_WINDOW)  # where times keep changing, ask less often
            self._start()

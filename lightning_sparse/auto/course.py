"""What is due between two steps of a training: measuring, planning, choosing, and changing the engine."""

import gc
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_sparse.auto.chooser import Chooser
from lightning_sparse.auto.policy import Auto, Candidate
from lightning_sparse.auto.switch import Switch
from lightning_sparse.auto.trial import ELEMENTS
from lightning_sparse.compressors import Compressor
from lightning_sparse.engine.build import Way
from lightning_sparse.engine.exchange import Exchange
from lightning_sparse.engine.link import NoClock, measure_link
from lightning_sparse.engine.optimizers import why_not_ahead, why_not_alone
from lightning_sparse.fusion.layer_fusion import check_clock
from lightning_sparse.fusion.planner import Layout, Measured
from lightning_sparse.fusion.steps import PassCounts, Passes, typical_s, until_changed
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.costs import Link
from lightning_sparse.network.process_groups import ProcessGroups
from lightning_sparse.settings import same

MEASURED_AFTER = 3  # Local steps after which the link is measured, where local steps were given.
GLANCE = 5  # First local steps whose mean shows whether they are far too long.
SETTLING = 5  # Local steps until any is timed, once ranks compare second moments no longer in each of them.
TIMED = 10  # Local steps whose mean is what a step takes: they differ, as fragments do.
WATCHED = 50  # Local steps after which it is checked whether their times have changed.
CHOOSING = PassCounts(1, 3, 2)  # Few, since steps of what is chosen are measured too.
FIRST_CHOICE = 1 + sum(CHOOSING)  # Steps until a candidate is chosen.


class Course:
    """What is due between two steps of a training, as a generator that is resumed once in each of them.

    The generator never refers to this object: a cycle would keep all that is unsent until garbage is collected.

    Args:
        switch: the engine, and the way to another.
        chooser: with ``sparse_auto``.
        warmup_steps: in which nothing is chosen.
    """

    def __init__(self, switch: Switch, chooser: Chooser | None, warmup_steps: int = 0) -> None:
        self.switch, self.chooser = switch, chooser
        self._warmup_steps = warmup_steps
        self._seen = switch.exchange.steps
        self._at_work: Compressor | None = None  # in the last pass
        self._is_choosing = False
        self._passes: Passes[None]
        self._start()

    def between_steps(self) -> None:
        """Do what is due before a forward that trains: send, measure, change groups or the engine."""
        switch = self.switch
        if not switch.exchange.is_half_made:
            switch.exchange.settle()
            if switch.exchange.steps != self._seen:  # else gradients are being accumulated
                self._seen = switch.exchange.steps
                self._pass()
                switch.exchange.end_pass()
        switch.exchange.between_steps()

    def _pass(self) -> None:
        if self.chooser and any(why_not_alone(each) or why_not_ahead(each) for each in self.switch.optimizers.seen):
            self.chooser.forbid_local_steps()
        if self._is_choosing != self._is_to_choose or not same(self._at_work, self._at_work_now):
            self._start()  # a warm-up has ended, or a rung of it
            return
        next(self._passes)
        self._at_work = self._at_work_now

    @property
    def _at_work_now(self) -> Compressor | None:
        return self.switch.layer_fusion.at_work if self.switch.layer_fusion else None

    @property
    def _is_to_choose(self) -> bool:
        is_warm = self.switch.chosen is not None or self.switch.exchange.group_step >= self._warmup_steps
        return self.chooser is not None and is_warm

    def _start(self, planned: bool = False) -> None:
        """Begin: measure, or if there is a plan already, only watch."""
        switch, fusion = self.switch, self.switch.layer_fusion
        switch.exchange.defer(False)
        switch.exchange.take_record()
        self._seen = switch.exchange.steps
        self._at_work, self._is_choosing = self._at_work_now, self._is_to_choose
        if fusion is not None and not fusion.is_worthwhile:
            self._passes = _nothing()
        elif self.chooser is not None and self._is_choosing:
            self._passes = _choose_and_watch(switch, self.chooser, planned)
        elif fusion is not None:
            self._passes = fusion.course(planned)
        else:
            self._passes = _measure_link_once(switch) if switch.way.fusion == "layer" else _nothing()
        next(self._passes)

    def check_join(self, options: Mapping[str, Any]) -> None:
        """Raise a ValueError if ranks cannot have uneven inputs, with these ``options`` of DDP's ``join``."""
        self.switch.exchange.check_join(options)
        if self.switch.layer_fusion is not None:
            raise ValueError(
                "fusion='layer' cannot be combined with join(): LayerFusion sends messages of its own before a "
                "forward, which a joined rank no longer runs, so the others would wait for it. Give SparseHook "
                "fusion='bucket' or 'none'."
            )

    # - checkpoints

    def state(self) -> dict[str, Any]:
        """What was planned or chosen, for :meth:`resume`."""
        switch = self.switch
        if switch.layer_fusion is not None:
            state = switch.layer_fusion.state()
            return state | {"chosen": str(switch.chosen or "")} if state else {}
        state = {"chosen": str(switch.chosen)} if switch.chosen else {}
        if switch.chosen or switch.knows_link:
            state["latencies"] = list(switch.exchange.latencies)
        return state

    def resume(self, state: Mapping[str, Any], steps: int) -> None:
        """Go on as what returned ``state`` after so many ``steps``, if it was chosen from the same candidates."""
        switch = self.switch
        chosen = self.chooser.candidate(state.get("chosen", "")) if self.chooser else None
        if chosen is not None and chosen.local_steps:
            switch.to_local_steps(chosen)
        elif switch.chosen is not None and switch.chosen.local_steps:
            switch.to_gradients()
        planned, exchange, fusion = chosen is not None, switch.exchange, switch.layer_fusion
        if fusion is None:
            switch.knows_link = "latencies" in state
            exchange.set_latencies(*state.get("latencies", exchange.latencies))
        else:
            planned = fusion.resume(state, chosen.averaging if chosen else fusion.compressor, steps)
            switch.chosen = chosen if planned else None
        self._start(planned)

    def follow(self, before: "Course") -> None:
        """Take local steps as ``before`` did at last, if they were chosen from the same candidates."""
        if before.switch.chosen is not None and before.switch.chosen.local_steps:
            self.resume(before.state(), before.switch.exchange.steps)


def course_of(
    ddp: DistributedDataParallel,
    parameters: Mapping[str, Tensor],
    way: Way,
    policy: Auto | None,
    groups: ProcessGroups,
    scaler: torch.amp.GradScaler | None,
    ranks: Comm,
    may_choose_local: bool,
) -> Course:
    """Return the course of a training of ``ddp``; arguments as of :class:`Switch`.

    ``policy`` is what chooses, if anything does, among local steps too if it ``may_choose_local``: only where somebody
    shows their average.
    """
    watch_optimizers = way.local is not None or (policy is not None and may_choose_local)
    switch = Switch(ddp, parameters, way, groups, scaler, ranks, watch_optimizers)
    alone = switch.exchange.size == 1  # with nobody to send to
    chooser = None if policy is None or alone else Chooser(policy, parameters, may_choose_local)
    if chooser:
        gc.collect()  # of all that was imported: choosing would set it off, on one rank after the other, 0.3 s each
    return Course(switch, chooser, way.warmup_steps)


# - the passes of a training, from one step to the next


def _nothing() -> Passes[None]:
    while True:
        yield


def _measure_link_once(switch: Switch) -> Passes[None]:
    """Have sums of local steps go by the link's latencies too; LayerFusion measures them for gradients."""
    while True:
        yield
        if switch.exchange.steps == MEASURED_AFTER and switch.exchange.size > 1 and not switch.knows_link:
            switch.knows_link = True
            with suppress(NoClock):
                measure_link(switch.exchange)


def _choose_and_watch(switch: Switch, chooser: Chooser, chosen: bool) -> Passes[None]:
    """Choose, and watch until steps take another time than they did; over and over."""
    while True:
        usual_s = math.nan
        if not chosen:
            try:
                usual_s = yield from _choose(switch, chooser)
            except NoClock:  # on every rank
                rank_zero_warn("sparse_auto: no rank could tell the time; training goes on as it began.")
        if switch.layer_fusion is not None:
            yield from switch.layer_fusion.watch()
        else:
            yield from _watch_local_steps(switch, usual_s)
            switch.to_gradients()
        chosen = False


def _choose(switch: Switch, chooser: Chooser) -> Passes[float]:
    """Measure, choose, and try what was chosen, until nothing better is expected; returns the seconds of its step."""
    fusion, exchange = switch.layer_fusion, switch.exchange
    assert fusion is not None
    yield  # what a checkpoint holds is in its place now
    exchange.record_gradients(ELEMENTS)
    measured, at_work = (yield from fusion.measure(CHOOSING)), fusion.at_work
    record = exchange.take_record()
    assert record is not None  # of the steps that were measured
    check_clock(measured)
    link = measure_link(exchange)
    candidate = chooser.choose(exchange, measured, link, at_work, record)
    while True:
        if candidate.local_steps:
            step_s = yield from _take_local_steps(switch, candidate, chooser.longest_s)
        else:
            step_s = yield from _average_gradients(switch, candidate, at_work, measured, link)
        again = chooser.note(switch.exchange, step_s)
        if again == candidate:
            return step_s
        candidate = again


def _average_gradients(
    switch: Switch, candidate: Candidate, at_work: Compressor, measured: Measured, link: Link
) -> Passes[float]:
    """Go on with a candidate that averages gradients, in the groups that are best for it; returns seconds of a step."""
    if switch.layer_fusion is None:
        switch.to_gradients()
    fusion = switch.layer_fusion
    assert fusion is not None
    layouts = [Layout(fusion.layout.groups, candidate.averaging)]
    if len(layouts[0].groups) > 1:  # else it is too short to gain by cuts
        layouts = fusion.decide(candidate.averaging, at_work, measured, link)
    switch.chosen = candidate
    return measured.rest_s + (yield from fusion.try_each(layouts, measured.span_s))


def _take_local_steps(switch: Switch, candidate: Candidate, longest_s: float) -> Passes[float]:
    """Go on with local steps; returns the seconds of one, soon if the first ones take longer than ``longest_s``."""
    if switch.layer_fusion is not None and not switch.may_add_unsent:
        switch.layer_fusion.send_all()
        switch.chosen = None
        while not switch.exchange.ask_for_unsent():
            yield
    switch.to_local_steps(candidate)
    if switch.exchange.is_starting:
        step_s = yield from typical_s(switch.exchange, StepClock(switch.exchange), GLANCE)
        if step_s > longest_s:
            return step_s
    yield from _settle(switch)
    return (yield from typical_s(switch.exchange, StepClock(switch.exchange), TIMED))


def _settle(switch: Switch) -> Passes[None]:
    while switch.exchange.is_starting:
        yield
    for _ in range(SETTLING):
        yield


def _watch_local_steps(switch: Switch, usual_s: float) -> Passes[None]:
    yield from _settle(switch)
    clock = StepClock(switch.exchange)
    usual_s, now_s = yield from until_changed(switch.exchange, clock, WATCHED, usual_s=usual_s)
    rank_zero_info(
        f"sparse_auto: local steps take {1e3 * now_s:.0f} ms, no longer {1e3 * usual_s:.0f} ms; choosing anew."
    )


class StepClock:
    """Returns the seconds since it was asked last; NaN where somebody evaluated or saved meanwhile."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange, self._last_s = exchange, time.perf_counter()

    def __call__(self) -> float:
        """Return the seconds of the last step."""
        before_s, self._last_s = self._last_s, time.perf_counter()
        return math.nan if self._exchange.was_shown else self._last_s - before_s

"""LayerFusion at work: measures the first steps of a training, plans the groups, and plans anew when times change."""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np
from lightning_utilities.core.rank_zero import rank_zero_debug, rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_sparse.compressors import Compressor, Dense
from lightning_sparse.compressors.wrappers import without_format
from lightning_sparse.engine.groups import apart, make_groups, pieces_of
from lightning_sparse.engine.timeline import GroupTime
from lightning_sparse.fusion.costs import GroupCosts
from lightning_sparse.fusion.link import NoClock, least_over_ranks, measure_inside, measure_link, median_over_ranks
from lightning_sparse.fusion.model import Plan
from lightning_sparse.fusion.planner import Layout, Measured, best_plan, calibrate
from lightning_sparse.fusion.steps import PLANNING, BetweenSteps, PassCounts, Times, measure_steps, until_changed
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.network.costs import Link
from lightning_sparse.settings import as_text, counted, same

WINDOW = 50  # Steps after which it is checked whether messages take another time.
TRIAL = 7  # Passes after which new groups must not be slower than the old; the first two do not count.
WORTH_PLANNING = 2**18  # Elements; a smaller gradient is one group.
MERGING_GAIN = 0.1  # Part of the time that fewer groups must gain where more parameters then compete to be sent.


class LayerFusion:
    """Groups that follow a measured plan.

    Args:
        averager: whose groups they are.
        compressor: what averages them.
        parameters: by name, in the order of definition.
        among_formats: a plan in a checkpoint is of one wire format; else of any, since a user names another at will.

    Attributes:
        plan: the plan that is followed, on rank 0; None before there is one.
        phase: "measure", "try" or "watch".
    """

    def __init__(
        self,
        averager: GradientAverager,
        compressor: Compressor,
        parameters: Mapping[str, Tensor],
        among_formats: bool = False,
    ) -> None:
        self.plan: Plan | None = None
        self.phase = "measure"
        self.compressor = compressor
        self.averager, self._parameters, self._among_formats = averager, parameters, among_formats
        self._names = tuple(reversed(list(parameters)))  # in backward order
        self._groups = [group.names for group in averager.groups]  # that are followed
        self._optimizers: Mapping[str, int] = {}

    @property
    def is_worthwhile(self) -> bool:
        """Whether there is enough to send, and somebody to send it to."""
        return self.averager.size > 1 and is_worth_planning(self._parameters)

    @property
    def at_work(self) -> Compressor:
        """What averages in the next step; it is measured anew where this changes."""
        return self.compressor.active(self.averager.group_step)

    @property
    def layout(self) -> Layout:
        """What is followed."""
        return Layout(self._groups, self.compressor, self.plan)

    def measured(self) -> list[GroupTime]:
        """Times of the plan's groups in this rank's last step; none before it was followed.  Waits for the device."""
        if self.plan is None:
            return []
        group_of = self.plan.group_of()
        times: list[list[GroupTime]] = [[] for _ in self.plan.ends]
        for group in self.averager.groups:
            times[group_of[group.names[-1]]] += self.averager.timeline.group_times([group])
        return [GroupTime.joined(each) for each in times] if all(times) else []

    # - checkpoints

    def state(self) -> dict[str, Any]:
        """The groups that were planned, and for what; empty before they were."""
        if self.phase == "measure":
            return {}
        return {
            "groups": [list(names) for names in self._groups],
            "compressor": self._named(self.at_work),
            "size": self.averager.size,
            "latencies": list(self.averager.lanes.latencies),
        }

    def resume(self, state: Mapping[str, Any], compressor: Compressor, step: int) -> bool:
        """Average with ``compressor`` in the groups of a plan saved after ``step``; returns whether it fits.

        It does if it was made for these parameters, this compressor and these ranks.
        """
        groups, averager = state.get("groups", []), self.averager
        made_for = [x if isinstance(x, str | int) else None for x in (state.get("compressor"), state.get("size"))]
        fits = made_for == [self._named(compressor.active(step)), averager.size]
        if not fits or sorted(name for group in groups for name in group) != sorted(self._names):
            return False
        averager.lanes.set_latencies(*state.get("latencies", averager.lanes.latencies))
        self.follow(Layout(groups, compressor))
        rank_zero_debug(f"lightning_sparse: {counted(len(averager.groups), 'group')}, as in the checkpoint.")
        return True

    def _named(self, compressor: Compressor) -> str:
        return as_text(compressor if self._among_formats else without_format(compressor))

    # - groups

    def follow(self, layout: Layout) -> None:
        """Average as ``layout`` says from now on, see :func:`apart`; nothing unsent is lost."""
        averager, before, self.compressor = self.averager, self.compressor, layout.compressor
        self._groups = [tuple(names) for names in layout.groups]
        pieces = pieces_of(self._parameters, self.compressor, self._optimizers)
        new = make_groups(self._parameters, self.compressor, apart(self._groups, pieces), averager.cut)
        averager.regroup(new, memories=same(before, self.compressor))
        self.plan, self.phase = layout.plan, "try"

    def group_by(self, optimizers: Mapping[str, int]) -> None:
        """Have no group with parameters of several ``optimizers`` from now on."""
        self._optimizers, phase = optimizers, self.phase
        self.follow(self.layout)
        self.phase = phase

    def send_all(self) -> None:
        """Sum in float32 from now on, so that nothing is unsent after a step; a checkpoint keeps nothing of it."""
        self.follow(Layout(self.layout.groups, Dense()))
        self.phase = "measure"

    # - the passes of a training

    def course(self, planned: bool = False) -> BetweenSteps[None]:
        """Measure, plan and watch, over and over; ``planned``: there is a plan, so that it begins with watching."""
        while True:
            usual = None
            if not planned:
                measured, at_work = (yield from self.measure(PLANNING)), self.at_work
                try:
                    check_clock(measured)
                    costs = self.costs_on(measure_link(self.averager))
                    usual = yield from self.try_on(self.decide(self.compressor, at_work, measured, costs), measured)
                except NoClock:  # on every rank
                    rank_zero_warn("lightning_sparse: no rank could tell the time; the groups stay as they are.")
            yield from self.watch(WINDOW, usual)
            planned = False

    def measure(self, counts: PassCounts) -> BetweenSteps[Measured]:
        """Measure steps as they are, with what is at work."""
        self.phase = "measure"
        return (yield from measure_steps(self.averager, self._parameters, counts))

    def watch(self, steps: int, usual: Times | None, link: Link | None = None) -> BetweenSteps[None]:
        """Look at what steps take, so many at a time, until messages take another time; see :func:`until_changed`."""
        self.phase = "watch"
        before, now = yield from until_changed(self.averager, steps, usual, link)
        rank_zero_info(
            f"lightning_sparse: messages take {1e3 * now.messages_s:.1f} ms in a step, no longer "
            f"{1e3 * before.messages_s:.1f} ms; measuring anew."
        )

    def try_on(self, layout: Layout, measured: Measured) -> BetweenSteps[Times]:
        """Change to ``layout``, whose compressor is at work, and back where it is slower than what was ``measured``.

        Returns what a step takes then.
        """
        averager, before, span_s = self.averager, self.layout, measured.span_s
        self.follow(layout)
        usual = Times(span_s + measured.rest_s, measured.messages_s, averager.sees_hidden_messages)
        if self.layout.groups == before.groups:
            return usual
        spans, messages = [], []
        for _ in range(TRIAL):
            yield
            spans.append(averager.timeline.span_s())
            messages.append(averager.messages()())
        # In fewer groups parameters with small gradients compete with more others, so that they are sent less often.
        merged = len(averager.groups) < len(before.groups) and any(group.target < group.n for group in averager.groups)
        now_s, allowed = median_over_ranks(averager, [median(spans[2:]), 1 - MERGING_GAIN if merged else 1.0]).tolist()
        if not now_s > allowed * span_s:  # also where a time is not known
            messages_s = median(least_over_ranks(averager, messages[2:]).tolist())
            return Times(usual.step_s + now_s - span_s, messages_s, usual.sees_hidden)
        rank_zero_debug(
            f"lightning_sparse: back to the groups before: backward and communication took {1e3 * span_s:.1f} ms "
            f"in {len(before.groups)}, {1e3 * now_s:.1f} ms in {len(averager.groups)}, which is above {allowed:.0%} of "
            "it."
        )
        self.follow(replace(before, plan=layout.plan and layout.plan.rejected()))
        return usual

    # - planning

    def costs_on(self, link: Link) -> GroupCosts:
        """What groups cost on ``link``, on this machine; to be called on every rank."""
        averager = self.averager
        inside = measure_inside(averager)
        return GroupCosts(self._parameters, link, averager.size, averager.in_place.can, inside=inside)

    def decide(self, compressor: Compressor, at_work: Compressor, measured: Measured, costs: GroupCosts) -> Layout:
        """Return the groups that rank 0 plans for ``compressor``, on every rank; those there are if it cannot.

        Args:
            compressor: what is to average from now on.
            at_work: what averaged when steps were measured.
            measured: these steps.
            costs: of groups on the link.
        """
        averager, plan, planned = self.averager, None, ""
        try:  # on every rank, so that compressing takes as long as in a step, in which all do it at once
            pieces, kinds, _ = costs.of_model(at_work)
            _, kinds_from_now_on, _ = costs.of_model(compressor.active(averager.group_step))
            if averager.lanes.everyone.rank == 0:
                calibration = calibrate(pieces, kinds, measured)
                plan = best_plan(pieces_of(self._parameters, compressor), kinds_from_now_on, measured, calibration)
                rank_zero_debug(f"lightning_sparse: {plan}")
                group_of = plan.group_of()
                of_each = [[name for name in self._names if group_of[name] == i] for i in range(len(plan.ends))]
                planned = json.dumps(of_each) if plan.ends != plan.before else ""
        except Exception as error:  # a plan is a gain, not a need; and the others wait for this rank
            rank_zero_warn(f"lightning_sparse: no plan could be made; the groups stay as they are. {error!r}")
        planned = averager.lanes.gather_text(planned)[0]
        groups = json.loads(planned) if planned else self.layout.groups
        return Layout(groups, compressor, plan)


def is_worth_planning(parameters: Mapping[str, Tensor]) -> bool:
    """Whether a gradient of ``parameters`` is large enough for several groups."""
    return sum(parameter.numel() for parameter in parameters.values()) >= WORTH_PLANNING


def check_clock(measured: Measured) -> None:
    """Raise NoClock where no rank could tell the times of steps."""
    if not (math.isfinite(measured.span_s) and np.isfinite(measured.arrivals_s).any()):
        raise NoClock

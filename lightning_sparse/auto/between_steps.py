"""What is done in the passes of a training, from one step to the next: measuring, choosing, watching.

Generators that are resumed once before each forward, between two steps, on every rank.
"""

from contextlib import suppress

from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_sparse.auto.active_averager import ActiveAverager
from lightning_sparse.auto.chooser import Chooser
from lightning_sparse.auto.policy import Candidate
from lightning_sparse.auto.trial import ELEMENTS
from lightning_sparse.auto.trials import SETTLING, TAKING_OVER, TIMED
from lightning_sparse.compressors import Compressor
from lightning_sparse.fusion.costs import GroupCosts
from lightning_sparse.fusion.layer_fusion import LayerFusion, check_clock
from lightning_sparse.fusion.link import NoClock, is_far, measure_latency, measure_link
from lightning_sparse.fusion.planner import Layout, Measured
from lightning_sparse.fusion.steps import BetweenSteps, PassCounts, Times, in_rounds, typical_times, until_changed
from lightning_sparse.settings import same

MEASURED_AFTER = 3  # Local steps after which the link is measured, where local steps were given.
WATCHED, MOST_WATCHED = 50, 800  # Steps after which it is checked whether messages take another time; at most.
GLIMPSE = PassCounts(0, 0, 1)  # The first step: enough where it shows that messages take longer than all the rest.
GLIMPSE_OF_DEVICE = PassCounts(2, 0, 1)  # Before it kernels are compiled, which no later step waits for.
CHOOSING = PassCounts(0, 3, 2)  # Few, since steps of what is chosen are measured too.
FIRST_CHOICE = sum(GLIMPSE) + sum(CHOOSING)  # Steps until a candidate is chosen, at most, on a CPU.


def nothing() -> BetweenSteps[None]:
    """Leave the training as it is."""
    while True:
        yield


def measure_link_once(active: ActiveAverager) -> BetweenSteps[None]:
    """Have sums of local steps go by the link's latencies too; LayerFusion measures them for gradients."""
    while True:
        yield
        if active.averager.steps == MEASURED_AFTER and active.averager.size > 1 and not active.knows_link:
            active.knows_link = True
            with suppress(NoClock):
                measure_link(active.averager)


def choose_and_watch(active: ActiveAverager, chooser: Chooser, chosen: bool) -> BetweenSteps[None]:
    """Choose, and watch until messages take another time than they did when it was chosen; over and over.

    Where the same is chosen anew, and messages take what they did, nothing had changed for long: the next change must
    last for twice as long.
    """
    steps = WATCHED
    while True:
        if not chosen:
            before, was = active.chosen, active.usual
            active.usual = active.link = None
            try:
                active.usual = yield from _choose(active, chooser)
            except NoClock:  # on every rank
                if active.layer_fusion is not None:
                    active.layer_fusion.averager.take_record()  # which nobody reads now
                rank_zero_warn("lightning_sparse: no rank could tell the time; training goes on as it began.")
            same_as_before = before == active.chosen and was and active.usual and not was.have_changed(active.usual)
            steps = min(2 * steps, MOST_WATCHED) if same_as_before else WATCHED
        if active.layer_fusion is not None:
            yield from active.layer_fusion.watch(steps, active.usual, active.link)
        else:
            yield from _watch_local_steps(active, steps)
            active.to_gradients()
        chosen = False


def _choose(active: ActiveAverager, chooser: Chooser) -> BetweenSteps[Times]:
    """Measure, choose, and try what was chosen, until nothing better is expected; returns what its step takes."""
    fusion = active.layer_fusion
    assert fusion is not None
    averager = fusion.averager
    yield  # what a checkpoint holds is in its place now
    latency_s, at_work = measure_latency(averager), fusion.at_work
    far = is_far(latency_s)
    if not far:
        costs = fusion.costs_on(measure_link(averager, latency_s))
        at_work, sums_s = chooser.start(averager, costs, fusion.at_work)
        fusion.follow(Layout(fusion.layout.groups, at_work))
        active.link = costs.link
    averager.record_gradients(ELEMENTS)
    measured = yield from fusion.measure(GLIMPSE_OF_DEVICE if averager.device.type == "cuda" else GLIMPSE)
    if far:  # now that connections carry what they can
        costs, sums_s = fusion.costs_on(measure_link(averager, latency_s)), measured.sums_s
        active.link = costs.link
    if not sums_s > measured.computing_s:  # the same on every rank
        measured = yield from fusion.measure(CHOOSING)
    record = averager.take_record()
    assert record is not None  # of the steps that were measured
    check_clock(measured)
    chooser.look(averager, measured, costs, record)
    layouts, known = dict[Candidate, Layout](), dict[Candidate, Times]()

    def train_with(candidate: Candidate) -> BetweenSteps[None]:
        if candidate == active.chosen:
            return
        if candidate.local_steps:
            yield from _take_local_steps(active, candidate)
            return
        if active.layer_fusion is None:
            active.to_gradients()
        fusion = active.layer_fusion
        assert fusion is not None
        active.chosen = candidate
        if candidate in layouts:
            yield from _take_over(fusion, layouts[candidate])
        else:
            yield from _average_gradients(fusion, candidate, at_work, measured, costs)
            layouts[candidate] = fusion.layout

    active.chosen = None
    while (candidate := chooser.next()) is not None:
        yield from train_with(candidate)
        known[candidate] = yield from typical_times(active.averager, in_rounds(active.averager, TIMED))
        chooser.note(candidate, known[candidate].step_s)
    assert chooser.chosen is not None
    yield from train_with(chooser.chosen.candidate)
    return known[chooser.chosen.candidate]


def _average_gradients(
    fusion: LayerFusion, candidate: Candidate, at_work: Compressor, measured: Measured, costs: GroupCosts
) -> BetweenSteps[None]:
    """Go on with a candidate that averages gradients, in the groups that are best for it."""
    layout = Layout(fusion.layout.groups, candidate.averaging)
    if len(layout.groups) > 1 and not fusion.averager.in_place.sums(candidate.averaging):  # else too short to gain
        layout = fusion.decide(candidate.averaging, at_work, measured, costs)
    if same(fusion.compressor, candidate.averaging):
        yield from fusion.try_on(layout, measured)
    else:
        yield from _take_over(fusion, layout)


def _take_over(fusion: LayerFusion, layout: Layout) -> BetweenSteps[None]:
    fusion.follow(layout)
    for _ in range(TAKING_OVER):
        yield


def _take_local_steps(active: ActiveAverager, candidate: Candidate) -> BetweenSteps[None]:
    """Go on with local steps."""
    if active.layer_fusion is not None and not active.may_add_unsent:
        active.layer_fusion.send_all()
        active.chosen = None
        while not active.layer_fusion.averager.ask_for_unsent():
            yield
    active.to_local_steps(candidate)
    yield from _settle(active)


def _settle(active: ActiveAverager) -> BetweenSteps[None]:
    while active.averager.local is not None and active.averager.local.is_starting:
        yield
    for _ in range(SETTLING):
        yield


def _watch_local_steps(active: ActiveAverager, steps: int) -> BetweenSteps[None]:
    yield from _settle(active)
    before, now = yield from until_changed(active.averager, steps, active.usual, active.link)
    rank_zero_info(
        f"lightning_sparse: messages take {1e3 * now.messages_s:.0f} ms in a step, no longer "
        f"{1e3 * before.messages_s:.0f} ms; choosing anew."
    )

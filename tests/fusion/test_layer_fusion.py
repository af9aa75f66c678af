"""LayerFusion step by step in one process: what it does between which steps, however many backwards there are."""

import gc
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.auto import between_steps, chooser
from lightning_sparse.auto.active_averager import AveragingConfig
from lightning_sparse.auto.between_steps import FIRST_CHOICE, GLIMPSE
from lightning_sparse.auto.chooser import Chooser
from lightning_sparse.auto.tuning_loop import TuningLoop
from lightning_sparse.engine.averager import Averager
from lightning_sparse.engine.groups import lay_out
from lightning_sparse.engine.timeline import Timeline
from lightning_sparse.fusion import layer_fusion, planner
from lightning_sparse.fusion.layer_fusion import TRIAL, WINDOW, LayerFusion
from lightning_sparse.fusion.link import measure_link
from lightning_sparse.fusion.model import StepModel
from lightning_sparse.fusion.planner import Layout, Measured
from lightning_sparse.fusion.steps import STEPS_MEASURED
from lightning_sparse.gradients.averager import GradientAverager
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.costs import Link
from lightning_sparse.network.torch_comm import Works
from lightning_sparse.options import Options
from tests.support.buckets import Bucket


class Mirror(Comm):
    """A second rank that does whatever this one does."""

    def __init__(self) -> None:
        super().__init__(0, 2)

    def _all_reduce(self, x: Tensor, direct: bool) -> Works:
        return Works([], x.mul_(2))

    def _all_gather(self, x: Tensor, out: Tensor) -> Works:
        return Works([], torch.stack([x, x], out=out))

    def _broadcast(self, x: Tensor, source: int) -> Works:
        return Works([], x)

    def _shift(self, x: Tensor, out: Tensor, by: int) -> Works:
        return Works([], out.copy_(x))

    def _all_to_all(self, x: Tensor, out: Tensor, by: Sequence[int]) -> Works:
        return Works([], out.copy_(x[0].expand_as(out)))


class Training:
    """A model of three layers that is trained with ``backwards`` averaged backwards to a forward."""

    def __init__(self, compressor: ls.Compressor | ls.Auto, backwards: int = 1, warmup_steps: int = 0) -> None:
        self.parameters: dict[str, Tensor] = {f"{i}.weight": nn.Parameter(torch.zeros(20 + i)) for i in range(3)}
        options = Options(compressor, "layer", warmup_steps=warmup_steps)
        self.averager = GradientAverager(
            lay_out(self.parameters, options.averaging, "layer"), [Mirror()], threaded=False
        )
        self.fusion = LayerFusion(self.averager, options.averaging, self.parameters)
        active: Any = SimpleNamespace(
            averager=self.averager,
            layer_fusion=self.fusion,
            config=AveragingConfig,
            chosen=None,
            parameters=self.parameters,
        )
        active.group_by_optimizer, active.numbers = lambda *_: None, {}
        active.optimizers, active.usual, active.link = SimpleNamespace(seen=[], unscale=lambda: None), None, None
        choosing = Chooser(options.policy, local=False) if options.policy else None
        self.course = TuningLoop(active, choosing, warmup_steps)
        self.backwards = backwards

    def passes(self, count: int) -> Iterator[int]:
        """The forwards, 0 the first, each after what is done before it and before its backwards."""
        for number in range(count):
            self.course.expect_step()
            self.course.between_steps()
            yield number
            for _ in range(self.backwards):
                self.averager.timeline.begin_backward()
                bucket = Bucket(list(reversed(self.parameters.values())), 0)
                self.averager.hook(None, bucket)  # type: ignore[arg-type]

    def longest_list(self) -> int:
        """Of all lists that the generators at work keep."""
        generator: Any = self.course._passes
        longest = 0
        while generator is not None:
            kept = [value for value in generator.gi_frame.f_locals.values() if isinstance(value, list)]
            longest, generator = max([longest, *map(len, kept)]), generator.gi_yieldfrom
        return longest


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups are planned."""
    monkeypatch.setattr(layer_fusion, "WORTH_PLANNING", 1)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups are always planned, tried, and found no slower."""
    monkeypatch.setattr(planner, "LEAST_GAIN", -float("inf"))
    monkeypatch.setattr(StepModel, "best", lambda self: [1, len(self.ready_s)])
    monkeypatch.setattr(Timeline, "span_s", lambda self: 0.01)


@pytest.mark.parametrize("backwards", [1, 2, 5, 7, 8])
def test_it_plans_after_as_many_passes_however_many_backwards_they_have(tried: None, backwards: int) -> None:
    training = Training(ls.TopK(density=0.5), backwards)
    planned, on_trial = [], []
    for number in training.passes(STEPS_MEASURED + TRIAL + 10):
        planned += [number] if training.fusion.state() else []
        on_trial += [number] if training.fusion.phase == "try" else []
        assert training.longest_list() <= max(STEPS_MEASURED, TRIAL, WINDOW)
    assert planned[0] == STEPS_MEASURED
    assert on_trial[:TRIAL] == list(range(STEPS_MEASURED, STEPS_MEASURED + TRIAL))
    assert training.averager.steps == backwards * (STEPS_MEASURED + TRIAL + 10)


def compressors_at_work(training: Training) -> set[str]:
    return {type(compressor).__name__ for compressor in training.averager.compressors}


@pytest.mark.parametrize("backwards", [1, 5])
@pytest.mark.parametrize("start", [ls.Candidate(ls.Dense(), "int4").averaging, ls.Dense()])
@pytest.mark.parametrize("warmup", [0, 3, STEPS_MEASURED + 1])
@pytest.mark.parametrize(("sums_s", "steps"), [(0.0, FIRST_CHOICE), (math.inf, sum(GLIMPSE))])
def test_auto_chooses_also_after_a_warmup(
    monkeypatch: pytest.MonkeyPatch, sums_s: float, steps: int, warmup: int, start: ls.Compressor, backwards: int
) -> None:
    begun: list[ls.Compressor] = []

    def begin(self: Chooser, averager: object, link: object, given: ls.Compressor) -> tuple[ls.Compressor, float]:
        begun.append(given)
        return given, sums_s

    monkeypatch.setattr(Chooser, "start", begin)
    monkeypatch.setattr(Timeline, "span_s", lambda self: 0.01)
    auto = ls.Auto((ls.Candidate(ls.TopK(density=0.5), "float32"),), start=start, at_most=None)
    training = Training(auto, backwards, warmup)
    chosen = [n for n in training.passes(2 * STEPS_MEASURED + 4) if compressors_at_work(training) == {"TopK"}]
    measured_from = -(-warmup // backwards)
    assert begun == [start]
    assert chosen[0] == measured_from + (warmup > 0) + steps  # the first step after a warm-up is not measured
    assert chosen[-1] == 2 * STEPS_MEASURED + 3


@pytest.mark.parametrize(("sums_s", "steps"), [(math.inf, sum(GLIMPSE)), (0.0, FIRST_CHOICE)])
def test_the_rate_of_a_far_link_is_measured_after_the_first_step(
    monkeypatch: pytest.MonkeyPatch, sums_s: float, steps: int
) -> None:
    measured_after: list[int] = []

    def measure(averager: GradientAverager, latency_s: float) -> Link:
        measured_after.append(averager.steps)
        return measure_link(averager, latency_s)

    monkeypatch.setattr(between_steps, "is_far", lambda latency_s: True)
    monkeypatch.setattr(between_steps, "measure_link", measure)
    monkeypatch.setattr(Chooser, "start", lambda *_: pytest.fail("the link alone decides with what it begins"))
    monkeypatch.setattr(Timeline, "span_s", lambda self: 0.01)
    monkeypatch.setattr(Measured, "sums_s", sums_s)
    training = Training(ls.Auto((ls.Candidate(ls.TopK(density=0.5), "float32"),)))
    chosen = [n for n in training.passes(STEPS_MEASURED) if compressors_at_work(training) == {"TopK"}]
    assert (measured_after, chosen[0]) == ([sum(GLIMPSE)], steps)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.MomentumCorrection(0.9, "sparse_auto"), "which chooses among such"),
        (lambda: ls.Warmup(3, ls.Auto()), "which chooses among such"),
        (lambda: ls.Auto((ls.Auto(),)), "in it"),
        (lambda: ls.Auto(start="micro"), "'micro' is not a compressor to choose"),  # type: ignore[arg-type]
        (lambda: ls.SparseDDPStrategy("sparse_auto", fusion="bucket"), "fusion='bucket' cannot be combined"),
        (lambda: ls.SparseHook(None, "sparse_auto", fusion="bucket"), "fusion='bucket' cannot be combined"),  # type: ignore[arg-type]
        (lambda: ls.SparseDDPStrategy("sparse_auto", local_steps=2), "local_steps cannot be combined with sparse_auto"),
    ],
)
def test_where_auto_would_never_choose_it_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_candidates_may_have_momentum_as_the_error_says(monkeypatch: pytest.MonkeyPatch) -> None:
    # A Mirror makes no forecasts, so that this rank makes all.
    monkeypatch.setattr(chooser, "_shared", lambda averager, candidates, forecast: [forecast(c) for c in candidates])
    candidates = tuple(ls.MomentumCorrection(0.9, c) for c in (ls.Dense(), ls.TopK(density=0.5)))
    training = Training(ls.Auto((ls.Candidate(candidates[1], "float32"),), start=candidates[0]))
    list(training.passes(STEPS_MEASURED + 4))
    assert training.averager.compressors == [candidates[1]]


def test_a_resumed_choice_is_watched_for_what_was_usual_when_it_was_made(tried: None) -> None:
    auto = ls.Auto([ls.Candidate(ls.TopK(density=0.5), "float32")])
    training, resumed = Training(auto), Training(auto)
    list(training.passes(STEPS_MEASURED + TRIAL + 30))
    usual = training.course.active.usual
    assert usual is not None
    assert usual.are_known
    resumed.course.resume(training.course.state(), training.averager.group_step)
    assert (resumed.course.active.usual, resumed.fusion.phase) == (usual, "watch")


def test_times_that_keep_changing_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(ls.TopK(density=0.5))
    monkeypatch.setattr(Averager, "messages", lambda self: lambda: 0.01 * 2.0**self.steps)
    for _ in training.passes(200):
        assert training.longest_list() <= WINDOW


@pytest.mark.parametrize(
    ("compressor", "span_s", "groups"),
    [
        (ls.TopK(density=0.5), {3: 0.01, 2: 0.0095}, 3),  # two groups gain 5 %
        (ls.TopK(density=0.5), {3: 0.01, 2: 0.0085}, 2),  # 15 %
        (ls.Dense(), {3: 0.01, 2: 0.0095}, 2),  # nothing competes to be sent
        (ls.Dense(), {3: 0.01, 2: 0.0105}, 3),
        (ls.SkipReduce(), {3: 0.01, 2: 0.0095}, 2),
    ],
)
def test_for_a_few_per_cent_no_groups_are_merged_in_which_parameters_compete(
    tried: None, monkeypatch: pytest.MonkeyPatch, compressor: ls.Compressor, span_s: dict[int, float], groups: int
) -> None:
    training = Training(compressor)
    training.fusion.follow(Layout([[name] for name in reversed(training.parameters)], training.fusion.compressor))
    monkeypatch.setattr(Timeline, "span_s", lambda self: span_s[len(training.averager.groups)])
    list(training.passes(STEPS_MEASURED + TRIAL + 1))
    assert training.fusion.phase == "watch"
    assert len(training.averager.groups) == groups


def laid_out(training: Training) -> list[tuple[tuple[str, ...], ls.Compressor]]:
    averager = training.averager
    return [(group.names, c) for group, c in zip(averager.groups, averager.compressors, strict=True)]


def test_a_plan_resumed_within_a_warmup_keeps_protected_parameters_apart(tried: None) -> None:
    compressor = ls.SkipReduce(protect=["0.*"])
    saved, resumed = Training(compressor, warmup_steps=100), Training(compressor, warmup_steps=100)
    list(saved.passes(STEPS_MEASURED + TRIAL + 1))
    resumed.course.resume(saved.course.state(), saved.averager.steps)
    assert laid_out(resumed) == laid_out(saved)
    assert (("0.weight",), ls.Dense()) in laid_out(resumed)
    assert resumed.fusion.phase == "watch"


def test_groups_that_stay_are_the_same_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where dense parameters lie between others."""
    monkeypatch.setattr(planner, "LEAST_GAIN", float("inf"))
    compressor = ls.SkipReduce(protect=["1.*"])
    training = Training(compressor)
    before = laid_out(training)
    for _ in training.passes(STEPS_MEASURED + 2 * TRIAL):
        assert laid_out(training) == before
    assert training.fusion.phase == "watch"


def test_what_is_always_dense_is_in_groups_of_its_own() -> None:
    training = Training(ls.SkipReduce(protect=["1.*"]))
    training.fusion.follow(Layout([("2.weight", "1.weight", "0.weight")], ls.SkipReduce(protect=["1.*"])))
    assert [names for names, _ in laid_out(training)] == [("2.weight", "0.weight"), ("1.weight",)]


@pytest.mark.parametrize("passes", [0, 5, STEPS_MEASURED + 2, STEPS_MEASURED + TRIAL + 2])
def test_what_is_dropped_is_gone_without_the_garbage_collector(tried: None, passes: int) -> None:
    """It holds a float32 copy of the gradient."""
    training = Training(ls.TopK(density=0.5))
    list(training.passes(passes))
    averager = weakref.ref(training.averager)
    gc.disable()
    try:
        del training
        assert averager() is None
    finally:
        gc.enable()

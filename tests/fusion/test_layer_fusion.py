"""LayerFusion step by step in one process: what it does between which steps, however many backwards there are."""

import gc
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lightning_sparse as ls
from lightning_sparse.engine.gradients import GradientExchange
from lightning_sparse.engine.groups import lay_out, pieces_of
from lightning_sparse.engine.timeline import Timeline
from lightning_sparse.fusion import chooser, layer_fusion, planner
from lightning_sparse.fusion import model as plan
from lightning_sparse.fusion.chooser import Chooser
from lightning_sparse.fusion.layer_fusion import EVERY, TRIAL, WINDOW, LayerFusion
from lightning_sparse.fusion.measuring import CHOOSING, STEPS_MEASURED
from lightning_sparse.fusion.model import Cost, StepModel
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.torch_comm import Works
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

    def __init__(self, compressor: ls.Compressor, backwards: int = 1) -> None:
        self.parameters: dict[str, Tensor] = {f"{i}.weight": nn.Parameter(torch.zeros(20 + i)) for i in range(3)}
        groups = lay_out(self.parameters, compressor, "layer")
        self.exchange = GradientExchange(groups, [Mirror()], threaded=False)
        auto = compressor.active(sys.maxsize)
        choosing = Chooser(auto, self.parameters, local=False) if isinstance(auto, ls.Auto) else None
        self.fusion = LayerFusion(self.exchange, compressor, self.parameters, choosing)
        self.backwards = backwards

    def passes(self, count: int) -> Iterator[int]:
        """The forwards, 0 the first, each after what is done before it and before its backwards."""
        for number in range(count):
            self.fusion.between_steps()
            yield number
            for _ in range(self.backwards):
                self.exchange.timeline.begin_backward()
                bucket = Bucket(list(reversed(self.parameters.values())), 0)
                self.exchange.hook(None, bucket)  # type: ignore[arg-type]

    def longest_list(self) -> int:
        """Of all lists that the generators at work keep."""
        generator: Any = self.fusion._course
        longest = 0
        while generator is not None:
            kept = [value for value in generator.gi_frame.f_locals.values() if isinstance(value, list)]
            longest, generator = max([longest, *map(len, kept)]), generator.gi_yieldfrom
        return longest


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small groups are planned, and not summed densely for it."""
    monkeypatch.setattr(layer_fusion, "WORTH_PLANNING", 1)
    monkeypatch.setattr(Cost, "dense_up_to", lambda self, dense: 0)


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups are always planned, tried, and found no slower."""
    monkeypatch.setattr(planner, "LEAST_GAIN", -float("inf"))
    monkeypatch.setattr(StepModel, "best", lambda self, others=(): [1, len(self.ready_s)])
    monkeypatch.setattr(Timeline, "span_s", lambda self: 0.01)


@pytest.mark.parametrize("backwards", [1, 2, 5, 7, 8])
def test_it_plans_after_as_many_passes_however_many_backwards_they_have(tried: None, backwards: int) -> None:
    training = Training(ls.TopK(density=0.5), backwards)
    planned, on_trial = [], []
    for number in training.passes(STEPS_MEASURED + TRIAL + EVERY):
        planned += [number] if training.fusion.state() else []
        on_trial += [number] if training.fusion.phase == "try" else []
        assert training.longest_list() <= max(STEPS_MEASURED, TRIAL, WINDOW)
    assert planned[0] == STEPS_MEASURED
    assert on_trial[:TRIAL] == list(range(STEPS_MEASURED, STEPS_MEASURED + TRIAL))
    assert training.exchange.steps == backwards * (STEPS_MEASURED + TRIAL + EVERY)


def compressors_at_work(training: Training) -> set[str]:
    return {type(compressor).__name__ for compressor in training.exchange.compressors}


@pytest.mark.parametrize("backwards", [1, 5])
@pytest.mark.parametrize("warmup", [0, 3, STEPS_MEASURED + 1])
def test_auto_chooses_also_after_a_warmup(monkeypatch: pytest.MonkeyPatch, warmup: int, backwards: int) -> None:
    monkeypatch.setattr(chooser, "most_faithful", lambda forecasts: forecasts[-1])
    monkeypatch.setattr(Timeline, "span_s", lambda self: 0.01)
    auto = ls.Auto((ls.SkipReduce(), ls.Candidate(ls.TopK(density=0.5), "float32")), tolerance=1e9)
    training = Training(ls.Warmup(warmup, auto) if warmup else auto, backwards)
    chosen = [n for n in training.passes(2 * STEPS_MEASURED + 4) if compressors_at_work(training) == {"TopK"}]
    measured_from = -(-warmup // backwards)
    assert chosen[0] == measured_from + sum(CHOOSING)
    assert chosen[-1] == 2 * STEPS_MEASURED + 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ls.MomentumCorrection(0.9, "sparse_auto"), "MomentumCorrection: compressor must itself select"),
        (lambda: ls.MomentumCorrection(0.9, ls.Warmup(3, "sparse_auto")), "compressor must itself select"),
        (lambda: ls.DensityLadder(3, "sparse_auto"), "has no density to change"),
        (lambda: ls.Auto((ls.Warmup(3, "sparse_auto"),)), "is not a compressor to choose"),
        (lambda: ls.SparseDDPStrategy(ls.Warmup(3, "sparse_auto"), fusion="bucket"), "fusion='bucket': sparse_auto"),
        (lambda: ls.SparseHook(None, "sparse_auto"), "fusion='bucket': sparse_auto"),  # type: ignore[arg-type]
    ],
)
def test_where_auto_would_never_choose_it_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_candidates_may_have_momentum_as_the_error_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chooser, "most_faithful", lambda forecasts: forecasts[-1])
    # A Mirror makes no forecasts, so that this rank makes all.
    monkeypatch.setattr(chooser, "_shared", lambda exchange, candidates, forecast: [forecast(c) for c in candidates])
    candidates = tuple(ls.MomentumCorrection(0.9, c) for c in (ls.Dense(), ls.TopK(density=0.5)))
    choices = [ls.Candidate(each, "float32") for each in candidates]
    training = Training(ls.Auto(choices, start=candidates[0], tolerance=1e9))
    list(training.passes(STEPS_MEASURED + 4))
    assert training.exchange.compressors == [candidates[1]]


def test_times_that_keep_changing_fill_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_fusion, "EVERY", 1)
    monkeypatch.setattr(layer_fusion, "LONGEST_WINDOW", 20)
    training = Training(ls.TopK(density=0.5))
    monkeypatch.setattr(Timeline, "span_s", lambda self: 0.01 * 2**training.exchange.steps)
    for _ in training.passes(200):
        assert training.longest_list() <= 20


@pytest.mark.parametrize(
    ("compressor", "span_s", "groups"),
    [
        (ls.TopK(density=0.5), {3: 0.02, 2: 0.01, 1: 0.0095}, 2),  # one group gains 5 %
        (ls.TopK(density=0.5), {3: 0.02, 2: 0.01, 1: 0.0085}, 1),  # 15 %
        (ls.TopK(density=0.5), {3: 0.01, 2: 0.0095, 1: 0.0092}, 3),  # nor do two gain enough, beside three
        (ls.TopK(density=0.5), {3: 0.01, 2: 0.0095, 1: 0.0088}, 1),  # one is compared with the groups there are
        (ls.Dense(), {3: 0.02, 2: 0.01, 1: 0.0095}, 1),  # nothing competes to be sent
        (ls.SkipReduce(), {3: 0.02, 2: 0.01, 1: 0.0095}, 1),
    ],
)
def test_for_a_few_per_cent_no_groups_are_merged_in_which_parameters_compete(
    tried: None, monkeypatch: pytest.MonkeyPatch, compressor: ls.Compressor, span_s: dict[int, float], groups: int
) -> None:
    monkeypatch.setattr(plan, "INEXACT", float("inf"))
    training = Training(compressor)
    training.fusion.regroup([[piece] for piece in pieces_of(training.parameters, compressor)])
    monkeypatch.setattr(Timeline, "span_s", lambda self: span_s[len(training.exchange.groups)])
    list(training.passes(STEPS_MEASURED + 2 * TRIAL + 1))
    assert training.fusion.phase == "watch"
    assert len(training.exchange.groups) == groups


def laid_out(training: Training) -> list[tuple[tuple[str, ...], ls.Compressor]]:
    exchange = training.exchange
    return [(group.names, c) for group, c in zip(exchange.groups, exchange.compressors, strict=True)]


def test_groups_that_were_dense_for_being_small_are_dense_again_after_a_trial(
    tried: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were compressed when a trial went back to them."""
    monkeypatch.setattr(plan, "INEXACT", -float("inf"))  # one group is not tried
    monkeypatch.setattr(Cost, "dense_up_to", lambda self, dense: 22)
    training = Training(ls.TopK(density=0.5))
    list(training.passes(STEPS_MEASURED + TRIAL + 1))
    planned = laid_out(training)
    assert planned == [(("2.weight",), ls.Dense()), (("1.weight", "0.weight"), ls.TopK(density=0.5))]
    monkeypatch.setattr(StepModel, "best", lambda self, others=(): [2, len(self.ready_s)])
    monkeypatch.setattr(Timeline, "span_s", lambda self: 0.01 if laid_out(training) == planned else 0.02)
    training.fusion._start(training.fusion._at_work)
    seen = [laid_out(training) for _ in training.passes(STEPS_MEASURED + TRIAL + 2)]
    assert [names for names, _ in seen[STEPS_MEASURED + 1]] == [("2.weight", "1.weight"), ("0.weight",)]
    assert seen[-1] == planned


def test_a_plan_resumed_within_a_warmup_keeps_protected_parameters_apart(tried: None) -> None:
    compressor = ls.Warmup(100, ls.SkipReduce(protect=["0.*"]))
    saved, resumed = Training(compressor), Training(compressor)
    list(saved.passes(STEPS_MEASURED + TRIAL + 1))
    resumed.fusion.resume(saved.fusion.state(), saved.exchange.steps)
    assert laid_out(resumed) == laid_out(saved)
    assert (("0.weight",), ls.Dense()) in laid_out(resumed)


def test_until_auto_chooses_its_start_says_what_is_dense_and_remembered() -> None:
    auto = ls.Auto(start=ls.MomentumCorrection(0.9, ls.SkipReduce(protect=["*.bias"])))
    assert auto.is_dense("a.bias", 1)
    assert not auto.is_dense("a.weight", 1)
    assert auto.dense_variant() == ls.MomentumCorrection(0.9, ls.Dense())
    assert auto.per_element == ("velocity",)
    assert auto.candidates == ls.Auto().candidates


@pytest.mark.parametrize("passes", [0, 5, STEPS_MEASURED + 2, STEPS_MEASURED + TRIAL + 2])
def test_what_is_dropped_is_gone_without_the_garbage_collector(tried: None, passes: int) -> None:
    """It holds a float32 copy of the gradient."""
    training = Training(ls.TopK(density=0.5))
    list(training.passes(passes))
    exchange = weakref.ref(training.exchange)
    gc.disable()
    try:
        del training
        assert exchange() is None
    finally:
        gc.enable()

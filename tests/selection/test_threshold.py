"""Thresholds that follow what they select, from counts alone."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import strategies as st

from lightning_sparse.selection.host import select
from lightning_sparse.selection.threshold import ThresholdController, pooled_threshold, summary
from lightning_sparse.wire import INDEX_FORMATS, MessageLayout
from tests.support.fuzz import fuzzed


def test_the_threshold_moves_as_far_up_as_down() -> None:
    twice, half = (ThresholdController(1.0).after(picked, 100, 100, 150) for picked in (200, 50))
    assert twice.threshold * half.threshold == pytest.approx(1)
    assert twice.threshold > 1
    assert ThresholdController(1.0).after(100, 100, 100, 150) == ThresholdController(1.0)


def test_a_threshold_that_missed_widely_is_given_up() -> None:
    held = ThresholdController(1.0)
    assert held.lost(201, 400, 100)
    assert held.lost(10, 49, 100)
    assert not held.lost(10, 51, 100)
    assert not ThresholdController(0.0).lost(10, 10, 100)


def test_counts_that_tell_nothing_are_known() -> None:
    held = ThresholdController(1.0)
    assert held.needs_reestimate(24, 100, 24, 500)
    assert not held.needs_reestimate(26, 100, 26, 500)
    assert held.needs_reestimate(125, 100, 150, 170)
    assert not held.needs_reestimate(100, 100, 150, 170)
    assert not held.needs_reestimate(125, 100, 150, 190)
    assert not held.needs_reestimate(90, 100, 90, 90)
    assert not ThresholdController(0.0).needs_reestimate(10, 100, 10, 10)


@pytest.mark.parametrize("most", [1, 100, 700, 5000])
def test_the_pooled_threshold_of_the_largest_is_that_of_what_there_is_room_for(most: int) -> None:
    parts = [torch.randn(m) * scale for m, scale in ((10_000, 1.0), (50, 100.0), (0, 1.0), (3000, 0.1))]
    largest_of_each = torch.cat([part.abs().sort().values[-most:] for part in parts])
    k = min(2, most) * largest_of_each.numel() // 3
    threshold = pooled_threshold(torch.stack([summary(part, most) for part in parts]), k)
    assert (largest_of_each >= threshold).sum() == pytest.approx(k, abs=1 + 3 * most / 128)
    assert pooled_threshold(torch.stack([summary(part, most) for part in parts]), 20_000) == 0


@fuzzed(
    200,
    threshold=st.one_of(st.just(math.nan), st.floats(0)),
    trend=st.floats(-0.03, 0.03),
    counts=st.lists(st.tuples(*[st.integers(0, 2**31)] * 3), min_size=1, max_size=20),
    target=st.integers(1, 2**31),
)
def test_a_threshold_stays_a_float32_whatever_is_counted(
    threshold: float, trend: float, counts: list[tuple[int, int, int]], target: int
) -> None:
    held = ThresholdController(threshold, trend)
    for picked, seen, near in counts:
        held = held.after(picked, target, seen, near)
        assert math.isnan(threshold) or 0 <= held.threshold <= torch.finfo(torch.float32).max
        assert abs(held.trend) <= 0.03
        joined = ThresholdController.of(ThresholdController.joined([(held.state(), 3), (held.state(), 2**40)]))
        assert math.isnan(threshold) or joined.threshold >= 0


def test_what_is_nearly_picked_is_counted_up_to_all_there_is() -> None:
    """The count is drawn from a part; where that looked nothing like the rest, it was beyond 2**31: a crash."""
    x = torch.zeros(2**19)
    x.view(-1, 2**16)[:, 2**15 :] = 1.0  # what the part leaves out
    x.view(-1, 2**16)[:, 1 : 2**15] = 0.96
    x[0] = 1.0
    found = select(x, 1.0, 100)
    assert (found.seen, found.near) == (2**18 + 1, 2**19)
    layout = MessageLayout(2**31, 100, INDEX_FORMATS["int32"])
    back = layout.unpack(layout.pack(replace(found, seen=2**31), torch.empty(layout.nbytes).byte()))
    assert (back.seen, back.near) == (2**31 - 1, 2**19)

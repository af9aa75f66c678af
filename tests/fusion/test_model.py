"""LayerFusion's model and its best plan, without any process."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.fusion.model import Cost, SizeCost, StepModel

ms = st.floats(0, 0.05)
per_element = st.floats(0, 1e-6)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    """A processor and a link that work side by side, as over two lanes."""
    busy, wire = ((draw(ms), draw(per_element)) for _ in range(2))

    def of(n: int) -> SizeCost:
        busy_s, wire_s = (fixed + each * n for fixed, each in (busy, wire))
        return SizeCost(n, busy_s, max(busy_s, wire_s), busy_s + wire_s, n)

    return Cost(of(1), of(1_000_000))


@st.composite
def models(draw: st.DrawFn, most: int = 8) -> StepModel:
    layers, kinds = draw(st.integers(1, most)), draw(st.integers(1, 2))
    gaps = draw(st.lists(ms, min_size=layers, max_size=layers))
    elements = st.tuples(*[st.integers(0, 3_000_000)] * kinds)
    return StepModel(
        tuple(sum(gaps[: i + 1]) for i in range(layers)),
        tuple(draw(st.lists(elements, min_size=layers, max_size=layers))),
        tuple(draw(st.lists(costs(), min_size=kinds, max_size=kinds))),
    )


def every_plan(layers: int) -> list[list[int]]:
    return [[*cuts, layers] for g in range(layers) for cuts in combinations(range(1, layers), g)]


@settings(max_examples=100, deadline=None)
@given(models())
def test_the_best_plan_is_that_of_trying_all(model: StepModel) -> None:
    layers = len(model.ready_s)
    ends = model.best()
    assert ends in every_plan(layers)
    assert model.span(ends) == pytest.approx(min(model.span(plan) for plan in every_plan(layers)), rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(models(most=40), st.lists(st.integers(1, 39)))
def test_no_other_plan_is_expected_to_be_faster(model: StepModel, cuts: list[int]) -> None:
    layers = len(model.ready_s)
    best = model.span(model.best()) * (1 - 1e-9)
    others = {
        "one group": [layers],
        "one a layer": list(range(1, layers + 1)),
        "any": sorted({min(cut, layers) for cut in cuts} | {layers}),
    }
    for name, ends in others.items():
        assert model.span(ends) >= best, name


@given(models(most=20), st.sets(st.integers(1, 19)))
def test_the_times_of_a_plan_are_those_of_the_model(model: StepModel, cuts: set[int]) -> None:
    """end = max(end of the group before + spacing, ready + latency)."""
    layers = len(model.ready_s)
    ends, before = sorted({cut for cut in cuts if cut < layers} | {layers}), 0.0
    for last, time_ in zip(ends, model.times(ends), strict=True):
        assert time_.ready_s == model.ready_s[last - 1]
        assert time_.start_s >= time_.ready_s - 1e-12
        assert time_.end_s >= max(before, time_.ready_s)
        before = time_.end_s


def test_what_messages_cost_decides_how_many_groups_there_are() -> None:
    ready = tuple(0.01 * i for i in range(1, 11))
    elements = ((100_000,),) * 10

    def groups(message_s: float, element_s: float) -> int:
        few, many = (SizeCost(n, 0.0, *[message_s + element_s * n] * 2, n) for n in (1, 1_000_000))
        return len(StepModel(ready, elements, (Cost(few, many),)).best())

    assert groups(message_s=0.5, element_s=0) == 1  # nothing but latency: one message
    assert groups(message_s=0, element_s=1e-7) == 10  # no latency: each layer at once
    assert 1 < groups(message_s=0.005, element_s=1e-7) < 10


def test_costs_are_lines_and_never_fall() -> None:
    cost = Cost(SizeCost(10, 1.0, 2.0, 3.0, 20), SizeCost(100, 0.5, 4.0, 6.0, 200))
    busy, spacing, latency = cost.at(np.array([0, 1, 10, 55, 100, 190]))
    assert busy.tolist() == [0, 1, 1, 1, 1, 1]
    assert spacing.tolist() == pytest.approx([0, 2, 2, 3, 4, 6])
    assert latency.tolist() == pytest.approx([0, 3, 3, 4.5, 6, 9])
    assert cost.bytes_each == 2
    one = SizeCost(10, 1.0, 2.0, 3.0, 20)
    assert Cost(one, one).at(np.array([1, 20])).tolist() == [[1, 1], [2, 2], [3, 3]]

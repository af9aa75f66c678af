"""LayerFusion's model and its best plan, without any process."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_sparse.fusion import model as plan_module
from lightning_sparse.fusion.model import Cost, Plan, StepModel
from lightning_sparse.fusion.planner import with_small_dense

SIZES = (1, 1_000, 1_000_000)
ms = st.floats(0, 0.05)
per_element = st.floats(0, 1e-6)


@st.composite
def costs(draw: st.DrawFn) -> Cost:
    """A processor and a link that work side by side, as over two lanes."""
    busy, wire = ((draw(ms), draw(per_element)) for _ in range(2))
    busy_s = tuple(busy[0] + busy[1] * n for n in SIZES)
    wire_s = tuple(wire[0] + wire[1] * n for n in SIZES)
    spacing_s = tuple(max(pair) for pair in zip(busy_s, wire_s, strict=True))
    latency_s = tuple(sum(pair) for pair in zip(busy_s, wire_s, strict=True))
    return Cost(SIZES, busy_s, spacing_s, latency_s, busy[1], wire[1])


@st.composite
def models(draw: st.DrawFn, most: int = 8) -> StepModel:
    layers, kinds = draw(st.integers(1, most)), draw(st.integers(1, 2))
    gaps = draw(st.lists(ms, min_size=layers, max_size=layers))
    elements = st.tuples(*[st.integers(0, 3_000_000)] * kinds)
    return StepModel(
        tuple(sum(gaps[: i + 1]) for i in range(layers)),
        tuple(draw(st.lists(elements, min_size=layers, max_size=layers))),
        tuple(draw(st.lists(costs(), min_size=kinds, max_size=kinds))),
        draw(st.booleans()),
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
        "greedy": model.greedy(),
        "one group": [layers],
        "one a layer": list(range(1, layers + 1)),
        "any": sorted({min(cut, layers) for cut in cuts} | {layers}),
    }
    for name, ends in others.items():
        assert model.span(ends) >= best, name


@given(models(most=20))
def test_the_times_of_a_plan_are_those_of_the_model(model: StepModel) -> None:
    """end = max(end of the group before + spacing, ready + latency), and where compressing blocks all is later."""
    ends = model.greedy()
    assert ends[-1] == len(model.ready_s)
    before = 0.0
    for last, time_ in zip(ends, model.times(ends), strict=True):
        assert time_.ready_s >= model.ready_s[last - 1]
        assert time_.ready_s == model.ready_s[last - 1] or model.blocking
        assert time_.start_s >= time_.ready_s - 1e-12
        assert time_.end_s >= max(before, time_.ready_s) + 0
        before = time_.end_s


def test_what_messages_cost_decides_how_many_groups_there_are() -> None:
    ready = tuple(0.01 * i for i in range(1, 11))
    elements = ((100_000,),) * 10

    def groups(message_s: float, element_s: float) -> int:
        seconds = tuple(message_s + element_s * n for n in SIZES)
        cost = Cost(SIZES, (0.0,) * 3, seconds, seconds, 0.0, element_s)
        return len(StepModel(ready, elements, (cost,)).best())

    assert groups(message_s=0.5, element_s=0) == 1  # nothing but latency: one message
    assert groups(message_s=0, element_s=1e-7) == 10  # no latency: each layer at once
    assert 1 < groups(message_s=0.005, element_s=1e-7) < 10


@pytest.mark.parametrize(
    ("span_s", "elements", "tried"), [(1.04, 1000, True), (1.06, 1000, False), (1.0, 2**30, True), (1.0, 2**31, False)]
)
def test_one_group_is_tried_where_the_model_cannot_tell_and_indices_can(
    span_s: float, elements: int, tried: bool
) -> None:
    model = StepModel((0.1, 0.2), ((elements,), (elements,)), (line(0.001, 1e-9),))
    plan = Plan(model, ("b", "a"), (1, 2), (1, 2), 0.0, 1.0, {"as before": 1.0, "one group": span_s})
    one = plan.one_group()
    assert (one is not None) == tried
    if one is not None:
        assert (one.ends, one.span_s, one.group_of(), one.one_group()) == ((2,), span_s, {"b": 0, "a": 0}, None)


def test_costs_are_lines_and_never_fall() -> None:
    cost = Cost((10, 100), (1.0, 0.5), (2.0, 4.0), (3.0, 6.0), busy_rise=0.1, wire_rise=0.2)
    busy, spacing, latency = cost.at(np.array([0, 1, 10, 55, 100, 110]))
    assert busy.tolist() == pytest.approx([0, 1, 1, 1, 1, 2])
    assert spacing.tolist() == pytest.approx([0, 2, 2, 3, 4, 6])  # beyond: the slower of processor and link
    assert latency.tolist() == pytest.approx([0, 3, 3, 4.5, 6, 9])  # beyond: both, one after the other


def line(message_s: float, element_s: float, elements: tuple[int, ...] = (256, 2**16, 2**20)) -> Cost:
    seconds = tuple(message_s + element_s * n for n in elements)
    return Cost(elements, (0.0,) * len(elements), seconds, seconds, 0.0, element_s)


def test_small_groups_are_dense_where_that_is_sooner() -> None:
    """Two messages of 1 % each, or one of everything: equal at 100 µs / 99 ns = 1010 elements, beside 256."""
    two, one = line(2e-4, 1e-9), line(1e-4, 1e-7, (256, 2**16))
    assert two.dense_up_to(one) == 512
    assert one.dense_up_to(one) == 0
    assert line(1e-5, 1e-9).dense_up_to(one) == 0
    assert line(1.0, 1e-9).dense_up_to(one) == 2**16
    kinds, up_to = with_small_dense([(False, two), (True, one)], one)
    assert up_to == 512
    assert kinds[1] == (True, one)
    sizes = np.array([0, 1, 256, 512, 513, 2**16, 2**20, 2**21])
    dense = (sizes > 0) & (sizes <= 512)
    for mixed, alone, other in zip(kinds[0][1].at(sizes), one.at(sizes), two.at(sizes), strict=True):
        assert mixed == pytest.approx(np.where(dense, alone, other))
    assert with_small_dense([(True, one)], one) == ([(True, one)], 0)


def spread_out(layers: int, seed: int = 24) -> StepModel:
    """Compressing blocks backward, and hardly anything but it costs time: nearly all plans are as good."""
    generator = np.random.default_rng(seed)
    busy = tuple(4e-4 + 4.4e-7 * n for n in SIZES)
    wire = tuple(1.5e-5 + 2e-7 * n for n in SIZES)
    cost = Cost(SIZES, busy, busy, tuple(a + b for a, b in zip(busy, wire, strict=True)), 4.4e-7, 2e-7)
    ready = np.cumsum(generator.exponential(1.8e-3, layers))
    elements = tuple((int(n),) for n in generator.integers(1, 370_000, layers))
    return StepModel(tuple(ready.tolist()), elements, (cost,), blocking=True)


def test_of_however_many_plans_so_many_are_pursued(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, looked_at = 200, []
    undominated = plan_module._undominated

    def counting(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        looked_at.append(len(a))
        return undominated(a, b)

    monkeypatch.setattr(plan_module, "_undominated", counting)
    spread_out(layers).best()
    assert layers < max(looked_at) <= 32 * layers  # 8 times as many, and growing faster, if all are pursued


@pytest.mark.parametrize(("layers", "most", "excess"), [(9, 3, 0.002), (60, 8, 0.002), (80, 32, 0.0002)])
def test_a_plan_of_few_pursued_is_close_to_the_best(
    monkeypatch: pytest.MonkeyPatch, layers: int, most: int, excess: float
) -> None:
    for seed in range(2):
        model = spread_out(layers, seed)
        monkeypatch.setattr(plan_module, "MOST_STATES", 10**9)
        best = model.span(model.best())
        monkeypatch.setattr(plan_module, "MOST_STATES", most)
        found = model.span(model.best())
        assert best * (1 - 1e-9) <= found <= best * (1 + excess)


def test_where_few_are_pursued_no_plan_that_is_known_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    model = spread_out(60)
    best = model.best()
    monkeypatch.setattr(plan_module, "MOST_STATES", 2)
    assert model.span(model.best()) > model.span(best)
    assert model.best([best]) == best
    assert model.span(model.best()) <= min(model.span(model.greedy()), model.span([60]))

"""Compression ratio and threshold error, as functions and as torchmetrics."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torchmetrics import Metric, MetricCollection

import lightning_sparse as ls
from lightning_sparse.monitor.metrics import compression_ratio, threshold_error

before_any_update = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")


@before_any_update
def test_compression_ratio_is_of_all_bytes_not_a_mean_of_ratios() -> None:
    metric = ls.CompressionRatio()
    metric.update(dense_bytes=100, sent_bytes=10)
    metric.update(dense_bytes=100, sent_bytes=90)
    assert metric.compute() == 2
    metric.reset()
    assert metric.compute() == 1


@before_any_update
def test_threshold_error_is_a_mean_over_steps() -> None:
    metric = ls.ThresholdError()
    assert metric.compute() == 0
    metric.update(picked=torch.tensor(150), target=100)
    metric.update(picked=100, target=100)
    assert metric.compute() == 0.25
    metric.reset()
    metric.update(picked=90, target=100)
    assert metric.compute() == pytest.approx(0.1)


METRICS = [
    pytest.param(ls.CompressionRatio(), [(400, 100), (100, 400), (7, 7)], 507 / 507, id="ratio"),
    pytest.param(ls.ThresholdError(), [(90, 100), (130, 100), (100, 100)], 0.4 / 3, id="error"),
]


@pytest.mark.parametrize(("metric", "updates", "expected"), METRICS)
def test_a_metric_goes_on_where_it_was_pickled_or_copied(metric: Metric, updates: Any, expected: float) -> None:
    metric.reset()
    metric.update(*updates[0])
    for again in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric), metric.clone()):
        for update in updates[1:]:
            again.update(*update)
        assert again.compute().item() == pytest.approx(expected)
    assert metric.update_count == 1


@pytest.mark.parametrize(("metric", "updates", "expected"), METRICS)
def test_forward_is_of_one_step_and_compute_of_all(metric: Metric, updates: Any, expected: float) -> None:
    metric.reset()
    alone = [metric(*update).item() for update in updates]
    for update, value in zip(updates, alone, strict=True):
        single = metric.clone()
        single.reset()
        single.update(*update)
        assert single.compute().item() == value
    assert metric.compute().item() == pytest.approx(expected)


@pytest.mark.skipif(not hasattr(Metric, "merge_state"), reason="needs a newer torchmetrics than 1.0")
@pytest.mark.parametrize(("metric", "updates", "expected"), METRICS)
def test_states_of_ranks_add_up(metric: Metric, updates: Any, expected: float) -> None:
    """As torchmetrics reduces them; on real ranks: tests/monitor/test_monitor_in_trainings.py."""
    rest = metric.clone()
    metric.reset()
    rest.reset()
    metric.update(*updates[0])
    for update in updates[1:]:
        rest.update(*update)
    rest.merge_state(metric)
    assert rest.compute().item() == pytest.approx(expected)


def test_a_year_of_bytes_is_counted_exactly() -> None:
    metric = ls.CompressionRatio()
    metric.update(dense_bytes=2**52, sent_bytes=2**51)
    metric.update(dense_bytes=1, sent_bytes=0)
    assert metric.dense_bytes == 2**52 + 1


def test_both_fit_into_a_collection() -> None:
    both = MetricCollection({"ratio": ls.CompressionRatio(), "error": ls.ThresholdError()})
    both.update(dense_bytes=8, sent_bytes=2, picked=5, target=10)
    assert {name: value.item() for name, value in both.compute().items()} == {"ratio": 4, "error": 0.5}


def test_functional_forms_at_their_edges() -> None:
    assert compression_ratio(0, 0) == 1
    assert compression_ratio(8, 2) == 4
    assert compression_ratio(8, 0) == torch.inf
    assert threshold_error(0, 0) == 0
    assert threshold_error(torch.tensor(5), 10) == 0.5

"""Compression ratio and threshold error, as functions and as torchmetrics."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torchmetrics import Metric

import lightning_sparse as ls
from lightning_sparse.monitor.record import compression_ratio, threshold_error

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


def test_functional_forms_at_their_edges() -> None:
    assert compression_ratio(0, 0) == 1
    assert compression_ratio(8, 2) == 4
    assert compression_ratio(8, 0) == torch.inf
    assert threshold_error(0, 0) == 0
    assert threshold_error(torch.tensor(5), 10) == 0.5

"""Compression ratio, threshold error, and the monitor that reports them."""

import pickle
from types import SimpleNamespace

import lightning as L
import pytest
import torch

import lightning_sparse as ls
from lightning_sparse.callbacks import human_bytes
from lightning_sparse.metrics import compression_ratio, threshold_error

before_any_update = pytest.mark.filterwarnings("ignore:The ``compute`` method of metric")


@before_any_update
def test_compression_ratio_is_of_all_bytes_not_a_mean_of_ratios() -> None:
    metric = ls.CompressionRatio()
    metric.update(dense_bytes=100, sent_bytes=10)
    metric.update(dense_bytes=100, sent_bytes=90)
    assert metric.compute() == 2
    again = pickle.loads(pickle.dumps(metric))
    assert again.compute() == 2
    metric.reset()
    assert metric.compute() == 1


@before_any_update
def test_threshold_error_is_a_mean_over_steps() -> None:
    metric = ls.ThresholdError()
    assert metric.compute() == 0
    metric.update(picked=torch.tensor(150), target=100)
    metric.update(picked=100, target=100)
    assert metric.compute() == 0.25
    assert pickle.loads(pickle.dumps(metric)).compute() == 0.25


def test_functional_forms_at_their_edges() -> None:
    assert compression_ratio(0, 0) == 1
    assert compression_ratio(8, 2) == 4
    assert threshold_error(0, 0) == 0
    assert threshold_error(torch.tensor(5), 10) == 0.5


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.50 kB"), (2.5e6, "2.50 MB"), (3e9, "3.00 GB"), (4e12, "4.00 TB")],
)
def test_bytes_read_well(count: float, text: str) -> None:
    assert human_bytes(count) == text


def test_the_monitor_says_when_there_is_nothing_to_report() -> None:
    trainer = SimpleNamespace(strategy=SimpleNamespace())
    with pytest.warns(UserWarning, match="CompressionMonitor has nothing to report"):
        ls.CompressionMonitor().on_train_start(trainer, L.LightningModule())  # type: ignore[arg-type]

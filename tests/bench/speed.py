"""What must not take long, measured: to be run by itself on a quiet machine, as ``make bench`` does at its end."""

import time
from statistics import median

import numpy as np
import pytest

from lightning_sparse.bench.cluster import Cluster
from lightning_sparse.fusion.model import Cost, SizeCost, StepModel
from tests.support import monitored as test_monitor
from tests.support.hosts import MBIT, emulated, ping, transfer

MB = 1_000_000


def test_a_thousand_layers_are_planned_in_time() -> None:
    generator = np.random.default_rng(24)
    busy_s, wire_s = (lambda n: 4e-4 + 4.4e-7 * n), (lambda n: 1.5e-5 + 2e-7 * n)
    few, many = (SizeCost(n, busy_s(n), busy_s(n), busy_s(n) + wire_s(n), n) for n in (1, 1_000_000))
    ready = np.cumsum(generator.exponential(1.8e-3, 1000)).tolist()
    elements = tuple((int(n),) for n in generator.integers(1, 370_000, 1000))
    model = StepModel(tuple(ready), elements, (Cost(few, many),))
    start_s = time.process_time()
    model.best()
    assert time.process_time() - start_s < 5  # about 1.6 s on a busy machine


def test_a_monitor_costs_less_than_one_percent_of_a_step() -> None:
    """Of one of 200 ms; the norm of what is unsent, of any number of elements, comes on top of it in logged steps."""
    training = test_monitor.Training(test_monitor.quiet(), every=50)
    training.start()
    without = test_monitor.Averager()
    times = {"with": 0.0, "without": 0.0}
    for _ in range(500):
        start = time.process_time()
        without.step()
        middle = time.process_time()
        training.batch()
        times["without"] += middle - start
        times["with"] += time.process_time() - middle
    assert (times["with"] - times["without"]) / 500 < 0.002  # about 0.03 ms here


# - rates of emulated links


def assert_rate(cluster: Cluster, source: int, target: int, payload_bytes: int, rate_bits_per_s: int) -> None:
    """Assert that no transfer is faster than the rate, and that one of three reaches it: other work slows some."""
    for _ in range(3):
        share = transfer(cluster, source, target, payload_bytes) / rate_bits_per_s
        assert share <= 1.02
        if share >= 0.85:
            return
    pytest.fail(f"host {source} to {target}: {share:.0%} of the rate")


@emulated
def test_rate_is_reached_and_kept_in_both_directions() -> None:
    with Cluster("2x100mbit") as cluster:
        for source, target in ((0, 1), (1, 0)):
            assert_rate(cluster, source, target, 10_000_000, 100 * MBIT)


@emulated
def test_slower_end_sets_the_rate_in_both_directions() -> None:
    with Cluster("1xunlimited+1x100mbit") as cluster:
        for source, target in ((0, 1), (1, 0)):
            assert_rate(cluster, source, target, 5_000_000, 100 * MBIT)


# - delays of emulated links


@emulated
@pytest.mark.parametrize(("link", "delay_s"), [("100mbit+50ms", 0.05), ("1gbit+5ms", 0.005)])
def test_a_ping_is_within_five_percent_of_the_delays(link: str, delay_s: float) -> None:
    with Cluster(f"2x{link}") as cluster:
        assert median(ping(cluster, 0, 1, times=50)) == pytest.approx(2 * delay_s, rel=0.05)


@emulated
@pytest.mark.parametrize(
    ("rate", "delay", "payload_bytes"), [("100mbit", "50ms", 100 * MB), ("1gbit", "5ms", 600 * MB)]
)
def test_a_delay_leaves_95_percent_of_the_rate(rate: str, delay: str, payload_bytes: int) -> None:
    """Of one stream, once TCP has reached it; in one of three tries, since other work slows some."""
    shares = []
    for _ in range(3):
        with Cluster(f"2x{rate}") as near, Cluster(f"2x{rate}+{delay}") as far:
            shares.append(transfer(far, 0, 1, payload_bytes, 30 * MB) / transfer(near, 0, 1, payload_bytes))
        if shares[-1] >= 0.95:
            return
    pytest.fail(f"shares of the rate without delay: {shares}")

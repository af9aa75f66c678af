"""Messages that arrive altered: refused, or read as elements that are in range."""

from typing import Any

import pytest
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse import kernels
from lightning_sparse.wire import INDEX_FORMATS, WIRE_DTYPES, CorruptMessage
from tests.support.fuzz import SEEDS, WIRES, fuzzed
from tests.support.simulated import AlteringNetwork, SimulatedRanks, normal

HOW = ["noise", "header", "count", "bits"]
every_kind = pytest.mark.parametrize("kind", [ls.TopK, ls.MiCRO, ls.ImportancePruning, ls.OkTopk])


def with_settings(kind: Any, **settings: Any) -> ls.Compressor:
    """OkTopk with parts that are balanced anew in every step."""
    more = {"repartition_every": 1} if kind is ls.OkTopk else {}
    return kind(**settings, **more)


@every_kind
@pytest.mark.parametrize("indices", INDEX_FORMATS)
@fuzzed(
    6,
    density=st.sampled_from([0.02, 0.1, 0.5]),
    size=st.integers(2, 4),
    n=st.integers(4, 120),
    wire_dtype=WIRES,
    number=st.integers(0, 12),
    how=st.sampled_from(HOW),
    seed=SEEDS,
)
def test_an_altered_message_is_refused_or_stays_in_range(
    kind: Any, indices: str, density: float, size: int, n: int, wire_dtype: str, number: int, how: str, seed: int
) -> None:
    """Also in the steps that follow one that nobody could tell was altered."""
    network = AlteringNetwork(size, WIRE_DTYPES[wire_dtype], number, how, seed)
    ranks = SimulatedRanks(with_settings(kind, density=density, indices=indices), size, n, network=network)
    for gradients in normal(4, size, n, seed=seed):
        try:
            ranks.step(gradients)
        except CorruptMessage:
            break


@every_kind
def test_an_altered_message_on_a_device_is_noticed_or_stays_in_range(
    monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    monkeypatch.setattr(kernels, "used_for", lambda x: True)
    for seed in range(26):  # every place, way, density, size and wire
        size, n = 2 + seed % 3, 7 + seed
        network = AlteringNetwork(
            size, list(WIRE_DTYPES.values())[seed % len(WIRE_DTYPES)], seed % 13, HOW[seed % 4], seed
        )
        ranks = SimulatedRanks(with_settings(kind, density=[0.02, 0.1, 0.5][seed % 3]), size, n, network=network)
        for gradients in normal(4, size, n, seed=seed):
            try:
                ranks.step(gradients)
            except CorruptMessage:
                break

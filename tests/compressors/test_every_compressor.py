"""The laws, for every compressor, on simulated ranks."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_sparse as ls
from lightning_sparse.simulation import simulate
from lightning_sparse.wire import WIRE_DTYPES
from tests.conftest import EVERY_COMPRESSOR

every_compressor = pytest.mark.parametrize("compressor", EVERY_COMPRESSOR)
every_size = pytest.mark.parametrize("size", [1, 2, 3, 8])
every_size_and_wire = pytest.mark.parametrize(
    ("size", "wire_dtype"),
    [
        (1, "float32"),
        (1, "int8"),
        (2, "bfloat16"),
        (2, "sign"),
        (3, "float32"),
        (3, "float16"),
        (4, "int8"),
        (4, "int4"),
        (8, "float32"),
    ],
)


def gradients(steps: int, size: int, n: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(steps, size, n, generator=torch.Generator().manual_seed(seed))


def assert_nothing_lost(gradients: torch.Tensor, result: ls.Simulated) -> None:
    size = gradients.shape[1]
    given = gradients.double().sum((0, 1))
    arrived = size * result.mean.double().sum(0) + result.unsent.double().sum(0)
    scale = gradients.double().abs().sum((0, 1)).max().clamp(min=1e-30)
    assert torch.allclose(arrived, given, rtol=0, atol=1e-6 * float(scale))


@every_compressor
@every_size_and_wire
def test_nothing_is_lost(compressor: ls.Compressor, size: int, wire_dtype: str) -> None:
    given = gradients(5, size, 203)
    assert_nothing_lost(given, simulate(compressor, given, wire_dtype=wire_dtype))


@every_compressor
@settings(max_examples=25, deadline=None)
@given(
    size=st.integers(1, 5),
    n=st.integers(0, 40),
    seed=st.integers(0, 2**31),
    exponent=st.integers(-20, 4),
    wire_dtype=st.sampled_from(list(WIRE_DTYPES)),
    zeros=st.booleans(),
)
def test_nothing_is_lost_whatever_the_gradient(
    compressor: ls.Compressor, size: int, n: int, seed: int, exponent: int, wire_dtype: str, zeros: bool
) -> None:
    """Sizes below and not divisible by P, one element, none; tiny gradients and, in float16, overflowing ones."""
    given = gradients(3, size, n, seed) * 10.0**exponent
    if zeros:
        given[:, :, ::2] = 0
    assert_nothing_lost(given, simulate(compressor, given, wire_dtype=wire_dtype)) if n else None
    assert simulate(compressor, given, wire_dtype=wire_dtype).mean.shape == (3, n)


@every_compressor
@every_size_and_wire
def test_the_same_run_twice_gives_the_same_bits(compressor: ls.Compressor, size: int, wire_dtype: str) -> None:
    first, second = (simulate(compressor, gradients(4, size, 101), wire_dtype=wire_dtype) for _ in range(2))
    for field in dataclasses.fields(first):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name)), field.name


@every_compressor
@every_size
def test_every_rank_launches_the_same_messages_whatever_its_data(compressor: ls.Compressor, size: int) -> None:
    """The simulated network refuses messages that differ; here the ranks' data differ as much as they can."""
    given = gradients(4, size, 64)
    given[:, 0] = 0
    given[:, -1] *= 1e6
    sent = simulate(compressor, given).sent_bytes
    assert (sent == sent[:, :1]).all()


@every_compressor
def test_one_rank_sends_nothing_and_keeps_to_the_law(compressor: ls.Compressor) -> None:
    result = simulate(compressor, gradients(3, 1, 50))
    assert not result.sent_bytes.any()


@pytest.mark.parametrize("density", [1e-4, 0.5])
@pytest.mark.parametrize("kind", [ls.MiCRO, ls.OkTopk, ls.ImportancePruning, ls.SketchFusion, ls.RandomK])
def test_a_density_of_hardly_anything_or_of_half_is_held(kind: Callable[..., ls.Compressor], density: float) -> None:
    """Of 100 elements one at least is meant to be sent; TopK is left out, whose ranks send as many each."""
    given = gradients(100, 2, 100)
    result = simulate(kind(density=density), given)
    assert_nothing_lost(given, result)
    assert result.picked[50:].double().mean() == pytest.approx(max(1, 100 * density), rel=0.25)


@every_compressor
@every_size
def test_zero_gradients_stay_zero(compressor: ls.Compressor, size: int) -> None:
    result = simulate(compressor, torch.zeros(3, size, 37))
    assert not result.mean.any()
    assert not result.unsent.any()


@every_compressor
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_a_gradient_followed_by_zeros_is_delivered(compressor: ls.Compressor, size: int) -> None:
    if compressor == ls.SkipReduce(rotation="static"):
        pytest.skip("a static rotation never sends a rank's skipped slices: its documented price")
    n = 6
    given = torch.zeros(60, size, n)
    given[0] = gradients(1, size, n)[0]
    result = simulate(compressor, given)
    assert torch.allclose(result.mean.sum(0), given[0].mean(0), atol=1e-5)
    assert result.unsent.abs().max() < 1e-6


@every_compressor
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_half_precision_on_the_wire_sends_fewer_bytes(compressor: ls.Compressor, size: int) -> None:
    """And nothing but values is halved: indices keep their size."""
    given = gradients(2, size, 2**17)  # so many that sums take two hops in either
    full = simulate(compressor, given).sent_bytes.sum()
    half = simulate(compressor, given, wire_dtype="bfloat16").sent_bytes.sum()
    assert full == half == 0 if size == 1 else 0.5 * full <= half < 0.8 * full


@every_compressor
def test_settings_are_frozen_and_tell_themselves(compressor: ls.Compressor) -> None:
    field = dataclasses.fields(compressor)[:1]
    for f in field:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(compressor, f.name, None)
    assert eval(repr(compressor), vars(ls)) == compressor

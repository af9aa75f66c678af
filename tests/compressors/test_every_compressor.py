"""The laws, for every compressor, on simulated ranks."""

import dataclasses
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.simulation import simulate
from lightning_sparse.wire import WIRE_DTYPES
from tests.support.compressors import EVERY_COMPRESSOR, OTHERS, every_compressor
from tests.support.fuzz import SEEDS, WIRES, fuzzed
from tests.support.simulated import SimulatedRanks, assert_nothing_lost, normal

every_size = pytest.mark.parametrize("size", [1, 3])
every_size_and_wire = pytest.mark.parametrize(
    ("size", "wire_dtype"),
    [
        (1, "int8"), (2, "bfloat16"), (2, "sign"), (3, "float32"), (3, "float16"), (4, "int8"), (4, "int4"),
        (3, "int2"), (8, "float32"),
    ],
)  # fmt: skip


@every_compressor
@every_size_and_wire
def test_nothing_is_lost_and_the_same_run_twice_gives_the_same_bits(
    compressor: ls.Compressor, size: int, wire_dtype: str
) -> None:
    given = normal(5, size, 203)
    first, second = (simulate(compressor, given, wire_dtype=wire_dtype) for _ in range(2))
    assert_nothing_lost(given, first.mean, first.unsent)
    for field in dataclasses.fields(first):
        assert torch.equal(getattr(first, field.name), getattr(second, field.name)), field.name
    assert size > 1 or not first.sent_bytes.any()


@every_compressor
@every_size
def test_every_rank_launches_the_same_messages_whatever_its_data(compressor: ls.Compressor, size: int) -> None:
    """The simulated network refuses messages that differ; here the ranks' data differ as much as they can."""
    given = normal(4, size, 64)
    given[:, 0] = 0
    given[:, -1] *= 1e6
    sent = simulate(compressor, given).sent_bytes
    assert (sent == sent[:, :1]).all()


@pytest.mark.parametrize("density", [1e-4, 0.5])
@pytest.mark.parametrize("kind", [ls.MiCRO, ls.OkTopk, ls.ImportancePruning, ls.SketchFusion, ls.RandomK])
def test_a_density_of_hardly_anything_or_of_half_is_held(kind: Callable[..., ls.Compressor], density: float) -> None:
    """Of 100 elements one at least is meant to be sent; TopK is left out, whose ranks send as many each."""
    given = normal(100, 2, 100)
    result = simulate(kind(density=density), given)
    assert_nothing_lost(given, result.mean, result.unsent)
    assert result.picked[50:].double().mean() == pytest.approx(max(1, 100 * density), rel=0.25)


@every_compressor
def test_zero_gradients_stay_zero(compressor: ls.Compressor) -> None:
    result = simulate(compressor, torch.zeros(3, 3, 37))
    assert not result.mean.any()
    assert not result.unsent.any()


@every_compressor
@pytest.mark.parametrize("size", [1, 3])
def test_a_gradient_followed_by_zeros_is_delivered(compressor: ls.Compressor, size: int) -> None:
    if compressor == ls.SkipReduce(rotation="static"):
        pytest.skip("a static rotation never sends a rank's skipped slices: its documented price")
    n = 6
    given = torch.zeros(60, size, n)
    given[0] = normal(1, size, n)[0]
    result = simulate(compressor, given)
    assert torch.allclose(result.mean.sum(0), given[0].mean(0), atol=1e-5)
    assert result.unsent.abs().max() < 1e-6


@every_compressor
@pytest.mark.parametrize("size", [1, 3])
def test_half_precision_on_the_wire_sends_fewer_bytes(compressor: ls.Compressor, size: int) -> None:
    """And nothing but values is halved: indices keep their size."""
    given = normal(2, size, 2**17)  # so many that sums take two hops in either
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


# - any gradient

every_compressor_and_others = pytest.mark.parametrize("compressor", [*EVERY_COMPRESSOR, *OTHERS])


KINDS: list[Callable[[Sequence[int], torch.Generator], Tensor]] = [  # of gradients
    lambda shape, seed: torch.randn(shape, generator=seed),
    lambda shape, seed: torch.randn(shape, generator=seed).sign() * 0.0,
    lambda shape, seed: torch.randn(shape, generator=seed).sign() * 3e38,
    lambda shape, seed: torch.randint(-(2**23), 2**23, shape, generator=seed).float() * 2.0**-149,  # denormal
    lambda shape, seed: SPECIAL[torch.randint(len(SPECIAL), shape, generator=seed)],
    # any bits: of 256 numbers one is NaN or infinite, and one is denormal
    lambda shape, seed: torch.randint(-(2**31), 2**31, shape, generator=seed).to(torch.int32).view(torch.float32),
]
SPECIAL = torch.tensor(
    [math.nan, math.inf, -math.inf, 0.0, -0.0, 2.0**-149, 2.0**-126, 65504, 65520, 3.4028235e38, 3.39e38, -1.0]
)


@st.composite
def any_gradients(draw: st.DrawFn) -> Tensor:
    """[T, P, n]: up to three kinds of values mixed, and a few that hypothesis chose."""
    n = draw(st.one_of(st.integers(0, 8), st.integers(0, 200)))
    shape = (draw(st.integers(1, 5)), draw(st.integers(1, 5)), n)
    seed = torch.Generator().manual_seed(draw(SEEDS))
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3, unique=True))
    which = torch.randint(len(kinds), shape, generator=seed)
    values = torch.stack([kind(shape, seed) for kind in kinds]).gather(0, which[None])[0]
    chosen = draw(st.lists(st.floats(width=32), max_size=6)) if n else []
    places = torch.randint(max(values.numel(), 1), (len(chosen),), generator=seed)
    return values.view(-1).index_copy(0, places, torch.tensor(chosen)).view(shape)


@every_compressor_and_others
@fuzzed(8, given=any_gradients(), wire_dtype=WIRES, weigh=st.booleans())
def test_any_gradient_is_delivered_kept_or_seen(
    compressor: ls.Compressor, given: Tensor, wire_dtype: str, weigh: bool
) -> None:
    """What is not finite, or overflows in a sum, stays to be seen in a mean or in what is unsent; the rest is exact.

    As int8 such a value takes those of its block with it, in a sketch all that are sent; and they are seen too.
    """
    weights = given[0, 0].nan_to_num(0, 1, -1) if weigh else None
    result = simulate(compressor, given, weights, wire_dtype=wire_dtype)
    exact = given.double()
    seen = ~(result.mean.isfinite().all(0) & result.unsent.isfinite().all(0))  # [n]
    assert seen[~given.isfinite().all(0).all(0)].all()
    if isinstance(compressor, ls.MomentumCorrection):
        return  # its law is of velocities
    size, total = given.shape[1], exact.abs().sum((0, 1))
    calm = total < 1e37
    if calm.all() or not (wire_dtype in ("int8", "int4", "int2", "sign") or isinstance(compressor, ls.SketchFusion)):
        assert not seen[calm].any()
    lost = (size * result.mean.double().sum(0) + result.unsent.double().sum(0) - exact.sum((0, 1))).abs()
    if wire_dtype in ("int2", "sign") and given.numel():
        # what is much smaller than its block's scale is rounded beside it, and of that all that is finite may be part
        finite = torch.where(exact.isfinite(), exact.abs(), 0)
        lost = lost - 1e-6 * len(given) * size * finite.sum((0, 1)).max()
    assert (lost <= 4e-6 * total + 1e-42)[calm & ~seen].all()
    huge = given.isfinite().all(0).all(0) & ~seen  # and yet it did not overflow
    assert (lost <= 1e-4 * total + 1e-42)[huge].all()


@pytest.mark.parametrize(
    "compressor",
    [*EVERY_COMPRESSOR, *OTHERS, pytest.param(ls.MomentumCorrection(0.9, ls.Dense()), id="momentum-dense")],
)
@pytest.mark.parametrize("wire_dtype", WIRE_DTYPES)
def test_what_is_not_finite_is_seen_in_one_mean_and_then_gone(compressor: ls.Compressor, wire_dtype: str) -> None:
    """So a training may skip that step, as with plain DDP."""
    given = normal(20, 3, 600)
    given[2, 1, 77], given[2, 2, 300] = math.nan, -math.inf
    ranks = SimulatedRanks(compressor, 3, (30, 19), 30, network=SimNetwork(3, WIRE_DTYPES[wire_dtype]))
    means = torch.stack([ranks.mean(gradients) for gradients in given])
    if compressor == ls.SkipReduce(rotation="static"):
        return  # which never delivers what it keeps
    assert 1 <= (~means.isfinite()).any(1).sum() <= 2  # each in one
    assert ranks.unsent.isfinite().all()


SHAPES = st.lists(
    st.sampled_from([(0,), (0, 5), (5, 0), (), (1,), (1, 1), (2, 3), (7,)]), min_size=1, max_size=5
)  # fmt: skip


@every_compressor_and_others
@fuzzed(6, shapes=SHAPES, size=st.integers(1, 5), wire_dtype=WIRES, seed=SEEDS)
def test_empty_and_one_element_parameters_take_part(
    compressor: ls.Compressor, shapes: list[tuple[int, ...]], size: int, wire_dtype: str, seed: int
) -> None:
    """Also more ranks than elements, and parameters that are all empty."""
    network = SimNetwork(size, WIRE_DTYPES[wire_dtype])
    ranks = SimulatedRanks(compressor, size, *(torch.ones(shape) for shape in shapes), network=network)
    given = normal(3, size, ranks.n, seed=seed)
    means = torch.stack([ranks.mean(gradients) for gradients in given])
    if ranks.n and not isinstance(compressor, ls.MomentumCorrection):
        assert_nothing_lost(given, means, ranks.unsent)

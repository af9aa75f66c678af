"""Every option of the strategy, of the hook and of a compressor works, or is refused with its name and value."""

import dataclasses
from typing import Any, get_type_hints

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse import fabric
from lightning_sparse.engine.groups import Piece, fuse
from lightning_sparse.simulation import simulate
from tests.support.fuzz import VALUES, assert_named, fuzzed
from tests.support.simulated import assert_nothing_lost, normal

WRAPPERS = {
    "Warmup": {"steps": 1, "compressor": ls.TopK(density=0.2)},
    "MomentumCorrection": {"momentum": 0.5, "compressor": ls.TopK(density=0.2)},
    "Auto": {},
}
SETTINGS = [
    pytest.param(kind, {}, field.name, id=f"{kind.__name__}-{field.name}")
    for kind in ls.COMPRESSORS.values()
    for field in dataclasses.fields(kind)  # type: ignore[arg-type]
] + [
    pytest.param(getattr(ls, name), others, field.name, id=f"{name}-{field.name}")
    for name, others in WRAPPERS.items()
    for field in dataclasses.fields(getattr(ls, name))
]


@pytest.mark.parametrize(("kind", "others", "name"), SETTINGS)
@fuzzed(12, value=VALUES)
def test_a_setting_works_or_is_refused_by_name(
    kind: type[ls.Compressor | ls.Auto], others: dict[str, Any], name: str, value: Any
) -> None:
    try:
        compressor = kind(**{**others, name: value})
    except (ValueError, TypeError) as error:
        assert_named(error, name, value)
        return
    if isinstance(compressor, ls.Auto):  # chooses what averages, and does not average itself
        assert compressor.choices
        return
    given = normal(3, 2, 40)
    result = simulate(compressor, given, torch.ones(40))
    assert result.mean.isfinite().all()
    loses = not getattr(compressor, "error_feedback", True) or not getattr(compressor, "exact", True)
    if not loses and kind is not ls.MomentumCorrection:
        assert_nothing_lost(given, result.mean, result.unsent)


OPTIONS = get_type_hints(ls.SparseDDPStrategy.__init__).keys() - {"ddp_kwargs", "return"}


@pytest.mark.parametrize("name", [*sorted(OPTIONS), "bucket_cap_mb"])
@fuzzed(25, value=VALUES)
def test_an_option_of_the_strategy_works_or_is_refused_by_name(name: str, value: Any) -> None:
    try:
        strategy = ls.SparseDDPStrategy(**{"compressor": "skip_reduce", "fusion": "bucket", name: value})
    except (ValueError, TypeError) as error:
        assert_named(error, name, value)
        return
    options = strategy.options
    assert options.bucket_bytes >= 1
    assert options.warmup_steps >= 0
    assert options.local_group in ("auto", "node") or int(options.local_group) >= 1
    fuse([Piece("a", 10), Piece("b", 20)], options.fusion, options.bucket_bytes)
    given = torch.ones(2, 2, 9)
    assert simulate(options.averaging, given).mean.isfinite().all()


@pytest.mark.parametrize(("mib", "buckets_mib"), [(0, 1), (4, 1), (43, 4.3), (4000, 25)])
def test_ddp_hands_over_ten_buckets_of_1_to_25_mib_unless_a_user_says_otherwise(mib: int, buckets_mib: float) -> None:
    module = nn.Module()
    module.trained = nn.Parameter(torch.empty(mib, 2**18, device="meta"))
    module.frozen = nn.Parameter(torch.empty(9, 2**18, device="meta"), requires_grad=False)

    def given_to_ddp(fusion: Any, **kwargs: Any) -> dict[str, Any]:
        strategy = ls.SparseDDPStrategy("micro", fusion=fusion, **kwargs)
        with strategy.options.buckets_for(module, strategy):
            return strategy._ddp_kwargs

    assert given_to_ddp("layer") == given_to_ddp(["*"], bucket_cap_mb=None) == {"bucket_cap_mb": buckets_mib}
    assert given_to_ddp("layer", bucket_cap_mb=3) == {"bucket_cap_mb": 3}
    assert given_to_ddp("bucket") == {}
    assert given_to_ddp("none")["bucket_cap_mb"] < 1e-5  # one for each parameter


@pytest.mark.filterwarnings("ignore:There is one rank")
@pytest.mark.parametrize("name", ["compressor", "fusion", "wire_dtype", "warmup_steps", "bucket_bytes", "residuals"])
@fuzzed(12, value=VALUES)
def test_an_option_of_the_hook_works_or_is_refused_by_name(one_rank: None, name: str, value: Any) -> None:
    options = {} if name == "residuals" else {name: value}
    try:
        hook = ls.SparseHook(DistributedDataParallel(nn.Linear(3, 3)), **options)
        if name == "residuals":
            hook.state_dict(value)
    except (ValueError, TypeError) as error:
        assert_named(error, name, value)
    else:
        hook.close()


def test_a_strategy_shows_what_it_was_given_beside_defaults() -> None:
    for kind in (ls.SparseDDPStrategy, fabric.SparseDDPStrategy):
        assert repr(kind()) == "SparseDDPStrategy(Auto())"
        assert repr(kind(ls.Auto(at_most=0.02))) == "SparseDDPStrategy(Auto(at_most=0.02))"
        assert repr(kind("micro", fusion="none")) == "SparseDDPStrategy(MiCRO(density=0.05), fusion='none')"
        assert repr(kind("micro", local_steps=2)).endswith("(MiCRO(density=0.05), local_steps=LocalSteps(steps=2))")
    shown = repr(ls.SparseHSDPStrategy("sparse_dense", wire_dtype="sign"))
    assert shown == "SparseHSDPStrategy(Dense(), wire_dtype='sign')"

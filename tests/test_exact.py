"""Parameters that a user names are summed in float32, whatever the compressor, the format and local steps."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import lightning_sparse as ls
from lightning_sparse.compressors import Compressor
from lightning_sparse.options import Options
from tests.support.models import data, small, trainer, weights
from tests.support.processes import Ranks

PATTERNS = ["*bias", "*norm*"]
COMPRESSORS: list[tuple[Any, str | None]] = [(kind(), None) for kind in ls.COMPRESSORS.values()]
COMPRESSORS += [(ls.Dense(), "int2"), (ls.TopK(density=0.1), "sign"), (ls.Warmup(1, "micro"), "int4")]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 30), nn.LayerNorm(30), nn.Linear(30, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).relu())


def gradients(rank: int, size: int) -> list[tuple[bool, bool]]:
    """Of each compressor, whether biases and norms have ddp's gradients after three steps, and whether all do."""
    found = []
    for compressor, wire_dtype in COMPRESSORS:
        of = []
        for sparse in (True, False):
            torch.manual_seed(0)
            ddp = DistributedDataParallel(Net())
            hook = ls.SparseHook(ddp, compressor, wire_dtype=wire_dtype, exact=PATTERNS) if sparse else None
            for step in range(3):
                x = torch.randn(8, 20, generator=torch.Generator().manual_seed(size * step + rank))
                ddp.zero_grad()
                ddp(x).square().sum().backward()
            of.append({name: p.grad for name, p in ddp.module.named_parameters()})
            if hook:
                hook.close()
        equal = torch.equal if size < 3 else torch.allclose  # among three the order of sums differs
        same = {name: equal(of[0][name], each) for name, each in of[1].items()}
        found.append((all(same[name] for name in same if "weight" not in name or "norm" in name), all(same.values())))
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_is_exact_has_the_gradient_of_ddp(ranks: Ranks, size: int) -> None:
    for of_rank in ranks.run(gradients, size, gloo=True):
        for (compressor, wire_dtype), (exact, every) in zip(COMPRESSORS, of_rank, strict=True):
            assert exact, (compressor, wire_dtype)
            assert every == (size == 1 or (isinstance(compressor, ls.Dense) and wire_dtype is None)), compressor


def moved(rank: int, size: int, exact: list[str], wire_dtype: str) -> Tensor:
    """Weights after six local steps, of which each weight is averaged every second."""
    strategy = ls.SparseDDPStrategy("sparse_dense", wire_dtype=wire_dtype, local_steps=2, exact=exact)
    run, model = trainer(strategy, size, check_every=0, max_epochs=1), small()
    run.fit(model, data(6, size))
    return weights(model)


def test_local_steps_exchange_in_float32_what_is_exact(ranks: Ranks) -> None:
    in_float32, exact, in_two_bits = (
        ranks.run(moved, 2, *each, gloo=True)[0] for each in (([], "float32"), (["*"], "int2"), ([], "int2"))
    )
    assert torch.equal(exact, in_float32)
    assert not torch.equal(in_two_bits, in_float32)


def dense_in(compressor: Compressor) -> list[bool]:
    return [compressor.is_dense(name, 1) for name in ("0.bias", "0.weight")]


def test_every_candidate_of_sparse_auto_and_what_it_begins_with_are_exact() -> None:
    options = Options.of("sparse_auto", "layer", exact=PATTERNS)
    assert dense_in(options.averaging) == [True, False]
    assert options.policy is not None
    for candidate in options.policy.choices:
        sums_all = candidate == ls.Candidate(ls.Dense())  # in float32 anyway, in DDP's own buckets
        assert dense_in(candidate.averaging) == [not sums_all, False]
        assert candidate.averaging.dense_variant() == ls.Dense()
    own = ls.Candidate(ls.MiCRO(), exact=["*.weight"])
    of_own = Options.of(ls.Auto([own]), "layer", exact=PATTERNS).policy
    assert of_own is not None
    assert dense_in(of_own.choices[0].averaging) == [False, True]  # a candidate's own come first


def test_candidates_that_are_equal_are_one() -> None:
    given = [ls.Dense(), ls.Candidate(ls.Dense(), "float32"), ls.Candidate(ls.Dense(), "int4", exact=["*bias"])]
    assert len(ls.Auto(given).choices) == 2
    policy = Options.of(ls.Auto([*given, ls.Candidate(ls.Dense(), "int4")]), "layer", exact=["*bias"]).policy
    assert policy is not None
    assert [str(each) for each in policy.choices] == ["dense, float32", "dense, int4, exact *bias"]


def test_momentum_is_corrected_for_what_is_exact_too() -> None:
    averaging = Options.of(ls.MomentumCorrection(0.9, ls.TopK()), "layer", wire_dtype="int4", exact=PATTERNS).averaging
    assert averaging.dense_variant() == ls.MomentumCorrection(0.9, ls.Dense())


@pytest.mark.parametrize("given", ["*bias", 3, [1]])
def test_what_are_no_patterns_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match="exact must be a list of patterns; got"):
        ls.SparseDDPStrategy("micro", exact=given)


def one_rank(rank: int, size: int) -> None:
    with pytest.warns(UserWarning, match=r"that matches '\*nrom\*' of exact; one is called 'first.weight'"):
        ls.SparseHook(DistributedDataParallel(Net()), "micro", exact=["*bias", "*nrom*"]).close()
    with pytest.warns(UserWarning, match=r"that matches '\*emb\*' of fusion; one is called 'first.weight'"):
        ls.SparseHook(DistributedDataParallel(Net()), "micro", fusion=["*emb*", "*"]).close()


def test_a_pattern_of_no_parameter_is_named(ranks: Ranks) -> None:
    ranks.run(one_rank, 2, gloo=True)

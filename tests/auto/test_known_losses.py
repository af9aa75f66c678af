"""What is said before a training of strategies that are known to cost loss."""

from typing import Any

import pytest

import lightning_sparse as ls
from lightning_sparse.auto.known_losses import KNOWN, caution
from lightning_sparse.compressors import Rounded
from lightning_sparse.options import Options


def said(compressor: Any, **options: Any) -> str:
    given = Options.of(compressor, "layer", **options)
    return caution(given.averaging, given.way.wire_dtype, given.local)


@pytest.mark.parametrize("name", ls.COMPRESSORS)
def test_every_name_but_dense_says_what_its_defaults_cost(name: str) -> None:
    """In one line, with figures of these very defaults."""
    text = said(name)
    assert (text == "") == (name == "sparse_dense")
    if text:
        kind = ls.COMPRESSORS[name]
        assert getattr(kind(), KNOWN[kind].setting) in KNOWN[kind].above
        assert "\n" not in text
        assert "docs/accuracy.md" in text


def test_a_figure_is_of_settings_at_least_as_close_to_dense_training() -> None:
    assert said(ls.MiCRO()).startswith("MiCRO(density=0.05) ended 23 % above dense training's loss")
    assert said(ls.MiCRO(density=0.02)) == said(ls.MiCRO())
    assert said(ls.MiCRO(density=0.06)).startswith("MiCRO(density=0.1) ended 15 %")
    assert said(ls.MiCRO(density=0.5)) == ""
    assert said(ls.OkTopk(density=0.3)) == ""
    assert said(ls.LowRank(rank=16)) == ""
    assert said(ls.LowRank(rank=3)).startswith("LowRank(rank=4) ended 13 %")
    assert "in wire_dtype='int4', with the bytes of density=0.05, 1.5 %: compare" in said("sketch_fusion")
    assert said(ls.SkipReduce(skip=0.25)) == ""
    assert said(ls.SkipReduce(skip=0.75)) == said(ls.SkipReduce())


def test_wrappers_formats_and_local_steps() -> None:
    assert said(ls.MomentumCorrection(0.9, ls.MiCRO()), warmup_steps=5) == said("micro")
    assert said(ls.Dense(), wire_dtype="int4") == ""
    assert said(ls.Dense(), wire_dtype="sign").startswith("a dense sum in wire_dtype='sign' ended 29 %")
    assert said(Rounded(ls.Dense(), "sign")) == said(ls.Dense(), wire_dtype="sign")
    assert said(ls.Dense(), local_steps=1) == ""
    assert said(ls.Dense(), local_steps=15) == ""
    assert said(ls.Dense(), local_steps=20).startswith("local_steps=16 ended 13 %")

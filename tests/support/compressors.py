"""Every compressor."""

import pytest

import lightning_sparse as ls

# The laws are tested over this list.  A name in COMPRESSORS is in it by itself; add settings worth a test of their own.
EVERY_COMPRESSOR = [
    *(pytest.param(kind(), id=name) for name, kind in ls.COMPRESSORS.items()),
    pytest.param(ls.SkipReduce(skip=0.0), id="skip_reduce-0"),
    pytest.param(ls.SkipReduce(skip=1.0), id="skip_reduce-all"),
    pytest.param(ls.SkipReduce(rotation="static"), id="skip_reduce-static"),
    pytest.param(ls.RandomK(density=1.0), id="random_k-all"),
    pytest.param(ls.TopK(density=0.3), id="top_k-0.3"),
    pytest.param(ls.Warmup(2, ls.TopK(density=0.1)), id="warmup-top_k"),
]

every_compressor = pytest.mark.parametrize("compressor", EVERY_COMPRESSOR)

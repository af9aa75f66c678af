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

# Beside the defaults: what works with other arithmetic.
OTHERS = [
    pytest.param(ls.MomentumCorrection(0.9, ls.TopK(density=0.2), clip_norm=0.5), id="momentum"),
    pytest.param(ls.ImportancePruning(density=0.1, rule="fixed", threshold=1.0), id="importance-fixed"),
    pytest.param(ls.ImportancePruning(density=0.1, rule="adaptive", givers=2), id="importance-adaptive"),
    pytest.param(ls.SketchFusion(density=0.1, momentum=0.9), id="sketch_fusion-momentum"),
    pytest.param(ls.OkTopk(density=0.2, evaluate_every=2, repartition_every=2), id="ok_topk-0.2"),
    pytest.param(ls.MiCRO(density=0.9), id="micro-0.9"),
    pytest.param(ls.Warmup(1, ls.MiCRO(density=0.01)), id="warmup-micro"),
]

every_compressor = pytest.mark.parametrize("compressor", EVERY_COMPRESSOR)

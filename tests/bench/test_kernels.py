"""What is timed on a GPU runs on a CPU too, where plain PyTorch and NumPy stand in for the kernels."""

import torch

from lightning_sparse.bench import kernels


def test_every_kernel_that_is_timed_runs() -> None:
    calls = kernels._calls(20_000, torch.device("cpu"))
    assert {name.split()[-1] for name in calls} >= {
        "select",
        "scatter",
        "sketch_encode",
        "decode_indices",
        "take",
        "add",
    }
    for call, nbytes in calls.values():
        call()
        assert nbytes > 0

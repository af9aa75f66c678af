"""Buckets of DDP, cut into gradients."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.engine.bucket import PendingBucket
from tests.support.fuzz import fuzzed, laid_out


@fuzzed(150, parameters=st.lists(laid_out(), min_size=1, max_size=4), before=st.integers(0, 5))
def test_a_bucket_is_cut_into_gradients_that_lie_as_their_parameters_do(parameters: list[Tensor], before: int) -> None:
    elements = sum(p.numel() for p in parameters)
    memory = torch.arange(float(before + elements + 3))
    pending = PendingBucket(memory[before : before + elements], parameters)
    filled = memory.clone()
    start = before
    for parameter, gradient in pending.gradients():
        assert gradient.shape == parameter.shape
        if parameter.numel() and parameter.is_contiguous():
            assert gradient.is_contiguous()
        gradient.copy_(torch.ones_like(gradient))
        filled[start : start + parameter.numel()] = 1
        assert torch.equal(memory, filled)  # its own place, all of it, and no other
        start += parameter.numel()

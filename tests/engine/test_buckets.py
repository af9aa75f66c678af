"""Buckets of DDP, cut into gradients."""

import torch
from hypothesis import strategies as st
from torch import Tensor

from lightning_sparse.engine.bucket import PendingBucket
from lightning_sparse.network.comm import Pending
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


class Once(Pending):
    """A message that must be waited for once, as one over Gloo."""

    waited = 0

    def wait(self) -> Tensor:
        self.waited += 1
        return torch.zeros(0)


def test_the_sum_over_a_node_is_waited_for_once_however_many_groups_a_bucket_has() -> None:
    """Over Gloo a second time would not end; and a short sum would be added anew, over means already in their place."""
    pending, message = PendingBucket(torch.zeros(2), []), Once()
    pending.summed = message
    pending.wait()
    pending.wait()
    assert message.waited == 1

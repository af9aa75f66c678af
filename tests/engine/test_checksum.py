"""The number that tells whether two tensors have the same bits."""

import pytest
import torch

from lightning_sparse.engine.checksum import checksum


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool])
def test_a_checksum_sees_one_bit_of_any_dtype(dtype: torch.dtype) -> None:
    x = torch.ones(5, 3, dtype=dtype).t()
    y = x.clone()
    assert checksum(x) == checksum(y)
    y[1, 2] = 0
    assert checksum(x) != checksum(y)


def test_a_checksum_tells_nan_and_zeros_apart() -> None:
    nan, zeros = torch.full((3,), torch.nan), torch.zeros(3)
    assert checksum(nan) == checksum(nan.clone())
    assert checksum(zeros) != checksum(-zeros)
    assert checksum(torch.empty(0)) == 0


@pytest.mark.parametrize("length", [3, 6, 3_000_000])
def test_a_checksum_sees_what_changes_places_or_cancels_out(length: int) -> None:
    """Statistics in bfloat16 of a few elements often have the same sum of bits on two ranks."""
    x = torch.arange(length, dtype=torch.int16).view(torch.bfloat16)
    other = x.view(torch.int16).clone()
    other[0] += 1
    other[-1] -= 1
    assert len({int(checksum(each)) for each in (x, x.flip(0), other)}) == 3
    assert checksum(x) == checksum(x.clone())

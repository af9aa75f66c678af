"""One number that tells whether two tensors have the same bits."""

from functools import lru_cache

import torch
from torch import Tensor

_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_CHUNK = 1 << 20  # elements that are added up at once
_WRAP = 1 << 64


def checksum(x: Tensor) -> Tensor:
    """Add up the bits of ``x``, each element times a number of its place, modulo 2**64: int64 [], in one pass."""
    bits = as_integers(x).reshape(-1)
    places = _places(bits.device)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for chunk in bits.split(_CHUNK):
        total = total * 31 + (chunk * places[: chunk.numel()]).sum()
    return total


def digest(x: Tensor) -> Tensor:
    """As :func:`checksum`, of which each bit depends on all bits of ``x``, so that some of them may do: int64 []."""
    bits = as_integers(x)
    if bits.element_size() == 8:  # of round numbers only the highest bits differ
        bits = bits ^ _shifted(bits, 32)
    return _mixed(checksum(bits))


def as_integers(x: Tensor) -> Tensor:
    """``x`` as integers, of which NaN equals itself; complex numbers have one dimension more."""
    x = x.detach()
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.view(_INTEGER[x.element_size()])


@lru_cache
def _places(device: torch.device) -> Tensor:
    """A number for each place in a chunk: those of SplitMix64, which look random (Steele, Lea and Flood 2014)."""
    return _mixed(torch.arange(1, _CHUNK + 1, device=device) * (0x9E3779B97F4A7C15 - _WRAP))


def _mixed(x: Tensor) -> Tensor:
    x = (x ^ _shifted(x, 30)) * (0xBF58476D1CE4E5B9 - _WRAP)
    x = (x ^ _shifted(x, 27)) * (0x94D049BB133111EB - _WRAP)
    return x ^ _shifted(x, 31)


def _shifted(x: Tensor, places: int) -> Tensor:
    """``x`` shifted to the right, with zeros before it."""
    return (x >> places) & ((1 << (64 - places)) - 1)

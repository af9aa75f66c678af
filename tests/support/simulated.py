"""Simulated ranks step by step, made-up gradients, and the law that nothing is lost."""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

import lightning_sparse as ls
from lightning_sparse import kernels
from lightning_sparse.compressors.base import take_steps
from lightning_sparse.compressors.group import Group
from lightning_sparse.network.simulated import SimNetwork
from lightning_sparse.selection.sparse import Sparse, dense


class SimulatedRanks:
    """A group of parameters on each of P simulated ranks, which take steps in lockstep.  n = elements in the group.

    Args:
        compressor: decides what is sent.
        size: P.
        parameters: each itself, or its shape if it is of zeros.
        names: of the parameters; p0, p1, ... if none are given.
        network: between the ranks, if it is a special one.
    """

    def __init__(
        self,
        compressor: ls.Compressor,
        size: int,
        *parameters: int | Sequence[int] | Tensor,
        names: Sequence[str] = (),
        network: SimNetwork | None = None,
    ) -> None:
        self.compressor, self.size, self.network = compressor, size, network or SimNetwork(size)
        tensors = tuple(p if isinstance(p, Tensor) else torch.zeros(p) for p in parameters)
        names = tuple(names) or tuple(f"p{i}" for i in range(len(tensors)))
        self.groups = [Group(0, names, tensors) for _ in range(size)]
        self.n = self.groups[0].n

    def step(self, gradients: Tensor) -> Tensor | Sparse:
        """The total of a step with ``gradients`` [P, n]."""
        for group, own in zip(self.groups, gradients, strict=True):
            parts = zip(group.slots(own), group.shapes, strict=True)
            self.compressor.accumulate(group, [part.view(shape) for part, shape in parts], self.size)
        total = take_steps(self.compressor, self.groups, self.network)
        if isinstance(total, Sparse):
            index = total.index
            if kernels.used_for(index):
                index = index[index != self.n]  # which fills messages of a fixed size
            assert (index.diff() > 0).all(), "an element was picked twice, or they are not in order"
            assert ((index >= 0) & (index < self.n)).all()
        return total

    def mean(self, gradients: Tensor) -> Tensor:
        """The mean gradient [n] of a step with ``gradients`` [P, n]."""
        return dense(self.step(gradients), self.n) / self.size

    @property
    def unsent(self) -> Tensor:
        """What each rank has not sent, [P, n]."""
        return torch.stack([group.unsent for group in self.groups])


def layered(
    n: int,
    size: int,
    steps: int,
    std: float = 1.0,
    jumps: Mapping[int, float] | None = None,
    layers: int = 12,
    seed: int = 0,
) -> Iterator[Tensor]:
    """``steps`` gradients [P, n]: layers and elements of different scales, and a mean.

    At the steps in ``jumps`` the scale of all is multiplied, for good.
    """
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randint(n, (layers - 1,), generator=generator).sort().values.tolist()
    scale = torch.cat(
        [
            torch.exp(1.2 * torch.randn(1, generator=generator)).expand(stop - start)
            for start, stop in zip([0, *cuts], [*cuts, n], strict=True)
        ]
    ) * torch.exp(0.5 * torch.randn(n, generator=generator))
    mean = 0.3 * torch.randn(n, generator=generator) * scale
    for step in range(steps):
        std *= (jumps or {}).get(step, 1.0)
        yield std * (torch.randn(size, n, generator=generator) * scale + mean)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers each time, of a normal distribution."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_nothing_lost(gradients: Tensor, mean: Tensor, unsent: Tensor) -> None:
    """The law, of ``gradients`` [T, P, n], the means [T, n] and what is unsent in the end [P, n]."""
    given = gradients.double().sum((0, 1))
    arrived = gradients.shape[1] * mean.double().sum(0) + unsent.double().sum(0)
    scale = gradients.double().abs().sum((0, 1)).max().clamp(min=1e-30)
    assert torch.allclose(arrived, given, rtol=0, atol=1e-6 * float(scale))


class AlteringNetwork(SimNetwork):
    """Alters one message of bytes or integers at its sender, so that all its receivers get the same."""

    def __init__(self, size: int, wire_dtype: torch.dtype, number: int, how: str, seed: int) -> None:
        super().__init__(size, wire_dtype)
        self._left, self._how = number, how
        self._generator = torch.Generator().manual_seed(seed)
        for comm in self.comms:
            comm._launch = functools.partial(self._launch, comm._launch)  # type: ignore[method-assign]

    def _launch(self, launch: Callable[..., Any], kind: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        message = launch(kind, x, *args, **kwargs)
        if not x.is_floating_point():
            if self._left == 0:
                self._alter(message.given.view(torch.uint8).view(-1))
                message.unchanged = None  # what the sender has is not what it said
            self._left -= 1
        return message

    def _alter(self, message: Tensor) -> None:
        header = message[:16]
        if self._how == "noise":
            message.copy_(torch.randint(0, 256, message.shape, generator=self._generator))
        elif self._how == "header":
            header.copy_(torch.randint(0, 256, header.shape, generator=self._generator))
        elif self._how == "count" and header.numel() % 4 == 0:
            header.view(torch.int32)[0] += int(torch.randint(-3, 4, (), generator=self._generator))
        else:
            at = torch.randint(message.numel(), (2,), generator=self._generator)
            message[at] ^= 1 << int(torch.randint(8, (), generator=self._generator))

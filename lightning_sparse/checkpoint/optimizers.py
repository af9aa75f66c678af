"""States of optimizers that differ between ranks."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_sparse.network.agreement import everywhere
from lightning_sparse.network.comm import Comm


def tensors_everywhere(optimizer: Optimizer, comm: Comm, device: torch.device) -> dict[str, Tensor]:
    """Return the tensors of this rank's state, by parameter and name, such as "3.exp_avg", in order.

    Where this rank has none and another has one, zeros stand for it: a parameter it has not used.  To be called on
    every rank.
    """
    own = dict(_tensors(optimizer))
    shapes = {key: (str(x.dtype).removeprefix("torch."), list(x.shape)) for key, x in own.items()}
    every: dict[str, tuple[str, list[int]]] = {}
    for text in everywhere(json.dumps(shapes), comm, device):
        every |= json.loads(text)
    return {
        key: own[key] if key in own else torch.zeros(shape, dtype=getattr(torch, dtype), device=device)
        for key, (dtype, shape) in sorted(every.items())
    }


def set_tensors(optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """Set tensors of ``optimizer``'s state, named as :func:`tensors_everywhere` does."""
    saved = optimizer.state_dict()
    for key, x in tensors.items():
        number, _, name = key.partition(".")
        saved["state"].setdefault(int(number), {})[name] = x.clone()
    optimizer.load_state_dict(saved)


def in_order(optimizers: Iterable[Optimizer], parameters: Sequence[Tensor]) -> list[Optimizer]:
    """Return the optimizers by the first of ``parameters`` that each has; those that have none are left out.

    On every rank they come in the same order, whichever took the first step there.
    """
    positions = {id(p): position for position, p in enumerate(parameters)}

    def found(optimizer: Optimizer) -> list[int]:
        own = (id(p) for group in optimizer.param_groups for p in group["params"])
        return [positions[each] for each in own if each in positions]

    return sorted(filter(found, optimizers), key=lambda optimizer: min(found(optimizer)))


def _tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, state in optimizer.state_dict()["state"].items():
        for name, x in state.items():
            if isinstance(x, Tensor):
                yield f"{number}.{name}", x

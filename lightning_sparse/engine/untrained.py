"""Frozen parameters and statistics in buffers: which of them change, though no optimizer trains them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_sparse.engine.replica import Find
from lightning_sparse.engine.weights import checksum


class Untrained:
    """Watches the tensors of a module that no optimizer trains, and that differ between ranks once they change.

    A teacher that follows the student, a target network, running statistics: with averaged gradients they are the same
    on every rank by themselves, with local steps they are not.  Backbones, masks and tables never change, and cost
    nothing here but a look at them.

    Args:
        found: how to find each tensor, by name: frozen parameters, and buffers that a checkpoint keeps, of floating
            point all of them, which nobody averages.
    """

    def __init__(self, found: Mapping[str, Find]) -> None:
        self.watched = dict(found)
        self._seen: dict[str, Tensor] = {}  # checksums before the first step

    def begin(self) -> None:
        """Note what they are before the first step; also of those that came to be watched since."""
        for name, find in self.watched.items():
            if name not in self._seen:
                self._seen[name] = checksum(find())

    def changed(self) -> Tensor:
        """Whether each has changed on this rank since the first step, in the order of ``watched``: [k] uint8."""
        changes = [not torch.equal(checksum(find()), self._seen[name]) for name, find in self.watched.items()]
        return torch.tensor(changes, dtype=torch.uint8)

    def take(self, name: str) -> Find:
        """Watch the tensor called ``name`` no longer: it is averaged from now on; returns how to find it."""
        self._seen.pop(name, None)
        return self.watched.pop(name)


def untrained_of(module: nn.Module, ignored: set[str]) -> dict[str, Find]:
    """How to find each tensor of ``module`` that no optimizer trains, but for those ``ignored``, by name."""
    found: dict[str, Find] = {}
    for prefix, owner in module.named_modules():
        kept = owner._buffers.keys() - owner._non_persistent_buffers_set
        for name in [*owner._parameters, *sorted(kept)]:
            tensor = getattr(owner, name)
            full = f"{prefix}.{name}" if prefix else name
            watched = tensor is not None and tensor.is_floating_point() and not tensor.requires_grad
            if watched and full not in ignored:
                found[full.replace("_orig_mod.", "")] = _Find(owner, name, tensor.shape, full)
    return found


class _Find:
    """Finds a tensor where its module has it now, which may have put another in its place."""

    def __init__(self, owner: nn.Module, name: str, shape: torch.Size, full: str) -> None:
        self._owner, self._name, self._shape, self._full = owner, name, shape, full

    def __call__(self) -> Tensor:
        tensor: object = getattr(self._owner, self._name, None)
        if not isinstance(tensor, Tensor) or tensor.shape != self._shape:
            got = list(tensor.shape) if isinstance(tensor, Tensor) else tensor
            raise RuntimeError(
                f"{self._full} must keep the shape {list(self._shape)} that it had when the training began: with local "
                f"steps it is averaged over the ranks; got {got}. Register it with persistent=False to have it stay "
                "each rank's own."
            )
        return tensor

"""A group: parameters whose gradients are sent together, and what this rank has not sent of them."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_sparse import kernels
from lightning_sparse.network.comm import Comm
from lightning_sparse.network.cut import WHOLE, Cut, shard_of
from lightning_sparse.selection.sparse import Sparse, clear
from lightning_sparse.selection.streams import draw


class HostCopy:
    """A copy of ``x`` for the host, made beside the device's work; of a tensor on the CPU it is that tensor.

    It must not change before what is launched on the current stream now is done.
    """

    def __init__(self, x: Tensor) -> None:
        self.of, self._host = x, x
        self._arrived: torch.cuda.Event | None = None
        if x.device.type == "cuda":
            self._host = torch.empty_like(x, device="cpu", pin_memory=True).copy_(x, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(x.device))

    def read(self) -> Tensor:
        """Wait until it has arrived, which a step later it has, and return it, on the CPU."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host


@dataclass
class Group:
    """Parameters whose gradients are sent together.  n = elements that this rank sends of them.

    Args:
        index: position in the order in which groups are sent.
        names: of the parameters, in the order in which they lie in ``unsent``.
        parameters: the parameters themselves; of those that FSDP2 shards this rank sends its shard.
        cut: which slice of each this rank has to send, where several ranks share the work.

    Attributes:
        unsent: [n] float32, this rank's gradient that has not been sent yet.
        mask_bytes: of the bytes this rank sent in the last step, those that only said which elements follow.
        shapes: of the parts when the group was made.
        memory: the compressor's own tensors, under the same names and of the same shapes on every rank; saved with a
            checkpoint.
        step: optimizer steps this group has taken part in.
        picked: distinct elements updated in the last step, a number or a 0-d tensor (not read before it is logged).
        target: elements the compressor meant to update in the last step.
        overflow: elements this rank meant to send in the last step but kept, for want of room in a message; likewise.
        weights: the values of the parameters in this step, where an optimizer changes them meanwhile; else None.
        inside: the ranks that send the other slices of the same, for who needs a sum over all of them; None if alone.
    """

    index: int
    names: tuple[str, ...]
    parameters: tuple[Tensor, ...]
    cut: Cut = WHOLE
    unsent: Tensor = field(init=False)
    memory: dict[str, Tensor] = field(default_factory=dict)
    mask_bytes: int = 0
    step: int = 0
    picked: int | Tensor = 0
    target: int = 0
    overflow: int | Tensor = 0
    weights: Sequence[Tensor] | None = field(default=None, repr=False)
    inside: Comm | None = field(default=None, repr=False)
    _places: tuple[Tensor | None, list[Tensor]] = field(default=(None, []), repr=False)  # of parts in ``unsent``
    _sparse: bool = field(default=False, repr=False)  # the total of the last step was
    _zeroed_early: bool = field(default=False, repr=False)
    _on_host: dict[str, HostCopy] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self.shapes = [part.shape for part in self.parts]
        self.sizes = [part.numel() for part in self.parts]
        device = self.parameters[0].device if self.parameters else torch.device("cpu")
        self.unsent = torch.zeros(sum(self.sizes), dtype=torch.float32, device=device)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """Of each parameter what this rank sends: a view, or where it sends all it has of it, that itself."""
        if self.cut.count == 1:
            return tuple(map(shard_of, self.parameters))
        return tuple(self.cut.own(p.detach()) for p in self.parameters)

    @property
    def n(self) -> int:
        """Elements in the group that this rank sends."""
        return self.unsent.numel()

    @property
    def elements(self) -> int:
        """Elements of the parameters, which are the same number on every rank."""
        return sum(p.numel() for p in self.parameters)

    def slots(self, flat: Tensor) -> tuple[Tensor, ...]:
        """``flat`` [n] cut into one view a parameter, in the order of ``names``."""
        return flat.split_with_sizes(self.sizes)

    def add(self, gradients: Sequence[Tensor | None], scale: float = 1.0) -> None:
        """Add the gradient of each parameter, of its shape, times ``scale``, to what is unsent; None where is none."""
        if self._places[0] is not self.unsent:
            slots = zip(self.slots(self.unsent), self.shapes, strict=True)
            self._places = self.unsent, [slot.view(shape) for slot, shape in slots]
        new = [(place, x) for place, x in zip(self._places[1], gradients, strict=True) if x is not None]
        if new:
            torch._foreach_add_(*map(list, zip(*new, strict=True)), alpha=scale)

    def empty(self) -> None:
        """Let go of the memory of what is unsent and remembered, which is another group's now."""
        self.unsent, self.memory, self._places = self.unsent.new_empty(0), {}, (None, [])

    def snapshot(self) -> "Group":
        """The group as it is, with a copy of what a step changes."""
        now = copy(self)
        now.unsent, now.memory = self.unsent.clone(), {key: kept.clone() for key, kept in self.memory.items()}
        return now

    def restore(self, before: "Group") -> None:
        """Undo what happened since ``before``."""
        self.unsent.copy_(before.unsent)
        self.memory, self.step = before.memory, before.step

    def zero_gradients_early(self, gradients: Sequence[Tensor]) -> None:
        """Set gradients that were added to zero already, if a sparse mean is to be expected in their place.

        While a message is under way that costs nothing.
        """
        if self._sparse and not kernels.used_for(self.unsent):
            for gradient in gradients:
                if gradient.is_contiguous():
                    clear(gradient)
            self._zeroed_early = True

    def hand_back(self, total: Tensor | Sparse, gradients: Sequence[Tensor], size: int) -> None:
        """Set the gradient of each parameter to the mean over ``size`` ranks, ``total`` / P."""
        self._sparse, zeroed_early, self._zeroed_early = isinstance(total, Sparse), self._zeroed_early, False
        if kernels.used_for(self.unsent):
            mean = self._scattered(total, size) if isinstance(total, Sparse) else total / size
            if self.parameters:  # a second pass over the mean takes less than a launch for each parameter
                slots = [slot.view_as(x) for slot, x in zip(self.slots(mean), gradients, strict=True)]
                torch._foreach_copy_(list(gradients), slots)
        elif isinstance(total, Sparse):
            mean_of_few = Sparse(total.index, total.values / size)
            for gradient, part in zip(gradients, mean_of_few.split(self.sizes), strict=True):
                part.write(gradient, cleared=zeroed_early)
        else:
            for gradient, slot in zip(gradients, self.slots(total), strict=True):
                torch.div(slot.view_as(gradient), size, out=gradient)

    def _scattered(self, total: Sparse, size: int) -> Tensor:
        """A P-th of a sparse total in full, [n], on a device."""
        count = total.index.new_full((), total.index.numel())
        return kernels.scatter(total.index, total.values, count, size, torch.empty_like(self.unsent))

    def end_dense_step(self) -> None:
        """Note a step in which nothing was unsent and all was summed, elsewhere."""
        self.picked = self.target = self.n
        self.overflow = self.mask_bytes = 0
        self.step += 1

    def send_to_host(self, key: str, x: Tensor) -> None:
        """Keep ``x`` in memory under ``key``, for the host to read in the next step with :meth:`take_from_host`."""
        self.memory[key] = x
        self._on_host[key] = HostCopy(x)

    def take_from_host(self, key: str) -> Tensor | None:
        """What was kept under ``key``, where the host can read it, if anything was; it is kept no longer.

        A step after :meth:`send_to_host` it has long arrived, so that nobody waits for what the device is doing now.
        """
        kept, copied = self.memory.pop(key, None), self._on_host.pop(key, None)
        if kept is None or copied is None or copied.of is not kept:  # resumed, or undone
            return kept
        return copied.read()

    def draw(self, seed: int) -> int:
        """A random integer of this step in [0, 2**63), the same on every rank."""
        return draw(seed, self.step, self.index)

    def generator(self, seed: int) -> torch.Generator:
        """A random stream of this step, the same on every rank whose device is of the same kind."""
        return torch.Generator(self.unsent.device).manual_seed(self.draw(seed))

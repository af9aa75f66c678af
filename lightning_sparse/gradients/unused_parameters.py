"""Parameters that may get no gradient in a step: what is unsent of them stays, and earlier means are not sent again."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from lightning_sparse.compressors.group import Group


class UsedParameters:
    """Notes which parameters a backward used, and what their ``.grad`` held before.

    A parameter that got no gradient on this rank sends nothing and keeps what is unsent: perhaps no rank uses it, and
    DDP then throws the mean away.  And where backward runs twice before an optimizer step, ``.grad`` holds the mean of
    the first when the second begins; only what the second adds is this rank's to send.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._used: set[Tensor] = set()
        self._earlier: dict[Tensor, Tensor] = {}  # parameter -> the mean it had when this backward began
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        for parameter in parameters:
            if not parameter.requires_grad:  # a shard, which whoever hands it over notes
                continue
            self._handles += [
                parameter.register_hook(partial(self._note_earlier, parameter)),
                parameter.register_post_accumulate_grad_hook(self._used.add),
            ]

    def note(self, parameters: Iterable[Tensor]) -> None:
        """Note that backward used these."""
        self._used.update(parameters)

    @contextmanager
    def new_in(
        self,
        group: Group,
        gradients: Sequence[Tensor],
        unscale: Callable[[Tensor], Tensor],
        per_element: Sequence[str] = (),
        joined: Callable[[Sequence[Tensor | None]], Sequence[Tensor | None]] = lambda new: new,
    ) -> Iterator[Sequence[Tensor | None]]:
        """Yield what a step adds to each gradient; None where a parameter got none: its unsent part is laid aside.

        At the end, when the means are in their place, put back what was laid aside, and earlier means.  ``gradients``
        are as DDP's bucket holds them; ``unscale`` takes the loss scale out of an earlier mean.  ``per_element`` are
        the keys of what is remembered of each element, which stays as it is where a parameter got no gradient.
        ``joined`` makes of what is new on this rank that of its member, this rank's slices.
        """
        laid_aside: list[tuple[Tensor, Tensor]] = []  # slots emptied for this step, and what they held
        remembered: list[tuple[Tensor, Tensor]] = []  # slots of the group's memory, and what they held
        earlier: list[tuple[Tensor, Tensor]] = []  # gradients, and the means to be added to theirs
        new: list[Tensor | None] = []
        memory = [group.slots(group.memory[key]) for key in per_element if key in group.memory]
        for parameter, gradient in zip(group.parameters, gradients, strict=True):
            if parameter not in self._used:
                new.append(None)
                if parameter.grad is not None:
                    earlier.append((gradient, gradient.clone()))
            elif parameter in self._earlier:
                mean = unscale(self._earlier[parameter])
                new.append(gradient - mean)
                earlier.append((gradient, mean))
            else:
                new.append(gradient)
        joint = joined(new)
        for i, (x, slot) in enumerate(zip(joint, group.slots(group.unsent), strict=True)):
            if x is None:
                laid_aside.append((slot, slot.clone()))
                slot.zero_()
                remembered += [(slots[i], slots[i].clone()) for slots in memory]
        yield joint
        for place, kept in laid_aside + earlier:
            place.add_(kept)
        for place, kept in remembered:
            place.copy_(kept)

    def end_step(self) -> None:
        self._used.clear()
        self._earlier.clear()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note_earlier(self, parameter: Tensor, gradient: Tensor) -> None:
        """Called before ``gradient`` is added to ``parameter.grad``."""
        if parameter not in self._used and parameter.grad is not None:
            self._earlier[parameter] = parameter.grad.clone()
